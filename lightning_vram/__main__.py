"""``python -m lightning_vram``: the same as the ``lightning-vram`` command."""

from lightning_vram.cli import main

if __name__ == "__main__":
    main()
