"""How many files of the package one training step enters: ``python -m tests.benchmarks.files_per_step [FEATURES]``.

A reader of a step has to open each of them. Counted on all threads, in the fifth step of a small ``ByteGPT`` on a CPU.
"""

import logging
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import lightning.pytorch as pl

import lightning_vram
from lightning_vram import ActivationCheckpointing, FSDPOffloadStrategy, LeanMixedPrecision, MicroBatching
from lightning_vram.demos import ByteGPT, SourceText

PACKAGE = Path(lightning_vram.__file__).parent
COUNTED_BATCH = 4  # by then plans have been made and sizes found

FEATURES: dict[str, Callable[[], dict[str, object]]] = {
    "fsdp_offload": lambda: {"strategy": FSDPOffloadStrategy()},
    "LeanMixedPrecision": lambda: {"plugins": LeanMixedPrecision("bf16")},
    "ActivationCheckpointing(budget)": lambda: {"callbacks": [ActivationCheckpointing(budget="1GiB")]},
    "MicroBatching": lambda: {"callbacks": [MicroBatching()]},
    "all four": lambda: {
        "strategy": FSDPOffloadStrategy(),
        "plugins": LeanMixedPrecision("bf16"),
        "callbacks": [ActivationCheckpointing(budget="1GiB"), MicroBatching()],
    },
}


class FilesPerStep(pl.Callback):
    """Counts calls into the package while one batch trains: per file, and how often the file changes."""

    def __init__(self) -> None:
        self.calls: Counter[Path] = Counter()
        self.num_switches = 0
        self._is_counting = False
        self._last: dict[int, Path] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, index: int) -> None:
        self._is_counting = index == COUNTED_BATCH

    def on_train_batch_end(self, *args: object) -> None:
        self._is_counting = False

    def count(self, frame: FrameType, event: str, argument: object) -> None:
        if not self._is_counting or event != "call":
            return
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            thread = threading.get_ident()
            self.calls[path] += 1
            self.num_switches += self._last.get(thread, path) != path
            self._last[thread] = path


def count_files(features: str) -> FilesPerStep:
    """Train with some ``FEATURES``, and return what the counted step has entered."""
    counter, options = FilesPerStep(), FEATURES[features]()
    callbacks = [*options.pop("callbacks", []), counter]  # type: ignore[misc] - a list
    off = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
    }
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=COUNTED_BATCH + 2, callbacks=callbacks, **off, **options
    )
    threading.setprofile(counter.count)
    sys.setprofile(counter.count)
    try:
        trainer.fit(ByteGPT(2, 16, 2, 16), SourceText(4, 16, num_train_bytes=10_000))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type] - as documented
    return counter


def main() -> None:
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    print(f"{'features':32}{'files':>7}{'calls':>7}{'switches':>10}")
    for features in [argument for argument in sys.argv[1:] if argument != "--list"] or FEATURES:
        counter = count_files(features)
        print(f"{features:32}{len(counter.calls):7}{counter.calls.total():7}{counter.num_switches:10}")
    if "--list" in sys.argv:  # of the last row
        for path, num_calls in counter.calls.most_common():
            print(f"{num_calls:7}  {path.relative_to(PACKAGE)}")


if __name__ == "__main__":
    main()
