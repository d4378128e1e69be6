"""A Trainer's steps in a process of their own; "ours" imports the package first. See ``nothing.py``."""

import json
import sys
import time

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

NUM_STEPS, NUM_COUNTED = 60, 4


class Steps(pl.Callback):
    """Processor time of each step, and the Python calls of some at the end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.num_calls = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: object) -> None:
        if trainer.global_step == NUM_STEPS - NUM_COUNTED:
            sys.setprofile(self.count)
        self.start = time.process_time()

    def on_train_batch_end(self, *args: object) -> None:
        self.seconds.append(time.process_time() - self.start)

    def count(self, frame: object, event: str, argument: object) -> None:
        self.num_calls += event == "call"


def main() -> None:
    if sys.argv[1] == "ours":
        import lightning_vram  # noqa: F401 - what is measured
    torch.set_num_threads(1)
    steps = Steps()
    switched_off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_steps=NUM_STEPS, callbacks=[steps], accelerator="cpu", enable_model_summary=False, **switched_off
    )
    trainer.fit(BoringModel())
    sys.setprofile(None)
    print(json.dumps({"seconds": min(steps.seconds[: NUM_STEPS - NUM_COUNTED]), "calls": steps.num_calls}))


if __name__ == "__main__":
    main()
