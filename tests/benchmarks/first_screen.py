"""Draw the pictures of README.md and of the page of estimate_memory. No GPU is needed: both are estimated.

python -m tests.benchmarks.first_screen
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback

from lightning_vram import ActivationCheckpointing, ActivationOffload, EarlyRelease, estimate_memory
from lightning_vram.demos import ByteGPT
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.drawing import Picture
from lightning_vram.report.estimate import ShownEstimate, side_by_side

ROOT = Path(__file__).parents[2]
BEFORE_AFTER = ROOT / "examples" / "first_screen.png"
STEP = ROOT / "lightning_vram" / "estimation" / "step.png"
DEVICE = "rtx4090"
MODEL = "a GPT-2 Large body (36 layers, width 1,280), batch 16 x 1,024, AdamW, bf16-mixed"
LARGE = ((36, 1280, 20, 1024), 16)  # ByteGPT's layers, width, heads and length; the batch
MEDIUM = ((24, 1024, 16, 1024), 8)


def features() -> list[Callback]:
    """Return the callbacks of the optimized run; the weights stay bitwise identical."""
    return [ActivationCheckpointing(), ActivationOffload(), EarlyRelease()]


def estimate(size: tuple[tuple[int, ...], int], callbacks: list[Callback]) -> ShownEstimate:
    """Estimate a step on the GPU of the pictures."""
    shape, batch_size = size
    with torch.device("meta"):
        model = ByteGPT(*shape)
    tokens = torch.zeros(batch_size, shape[-1] + 1, dtype=torch.int64)
    trainer: dict[str, Any] = {"precision": "bf16-mixed", "callbacks": callbacks, "logger": False}
    return estimate_memory(model, tokens, device=DEVICE, trainer=trainer, find_limits=False)


def before_after() -> Picture:
    """Return the picture of README.md."""
    steps = {}
    for name, fits, callbacks in (("Baseline", "fits", []), ("With lightning_vram", "bit-exact", features())):
        step = estimate(LARGE, callbacks)
        steps[f"{name}: {fits if step.fits else 'out of memory'}, {format_bytes(step.needed_bytes)}"] = step
    names = ", ".join(f"{type(feature).__name__}()" for feature in features())
    notes = [f"Estimated: one training step of {MODEL}.", f"With lightning_vram: callbacks=[{names}]"]
    return side_by_side(steps, "Memory of one training step", notes)


def shrink(path: Path) -> None:
    """Save a picture with its 256 most frequent colors; each other pixel gets the nearest. A third of the bytes."""
    from PIL import Image  # matplotlib brings it

    with Image.open(path) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    colors, where, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    palette = colors[np.argsort(-counts)[:256]]
    distances = np.square(colors[:, None].astype(int) - palette[None].astype(int)).sum(-1)
    picture = Image.fromarray(distances.argmin(1)[where].reshape(pixels.shape[:2]).astype(np.uint8))
    picture.putpalette(palette.tobytes())
    picture.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.first_screen", description=__doc__)
    parser.add_argument("--before_after", type=Path, default=BEFORE_AFTER, help="picture of README.md to write, .png")
    parser.add_argument("--step", type=Path, default=STEP, help="picture of estimate_memory's page to write, .png")
    arguments = parser.parse_args()
    before_after().write(arguments.before_after)
    estimate(MEDIUM, []).plot(arguments.step)
    for path in (arguments.before_after, arguments.step):
        shrink(path)
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB.")


if __name__ == "__main__":
    main()
