"""The public parts of the package, and each callback as its configuration file makes it."""

import re
from contextvars import copy_context
from functools import partial
from pathlib import Path

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from support.helpers import LitTiny, TinyCNN, TinyGPT

import lightning_vram

ROOT = Path(__file__).parents[2]
PUBLIC = [getattr(lightning_vram, name) for name in lightning_vram.__all__]
CALLBACKS = [part.__name__ for part in PUBLIC if isinstance(part, type) and issubclass(part, Callback)]
CHANGES_TRAINING = {
    "AccumulationScheduler",
    "ChunkedLoss",
    "LowBitOptimizer",
    "MomentsInBF16",
    "QuantizationAwareTraining",
    "QuantizeFrozenWeights",
    "TokenTiling",
}  # callbacks whose purpose is to change the result
KEEPS_RESULT = [name for name in CALLBACKS if name not in CHANGES_TRAINING]
AUTOMATIC_ONLY = {"MicroBatching", "OptimizerInBackward"}  # refuse manual optimization
NEEDS_HEAD = {"ChunkedLoss"}  # refuse a model without one
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PRESETS = [path for path in CONFIGS if "quickstart.yaml" not in path.read_text().splitlines()[0]]  # need no other file


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def net_for(name: str) -> TinyCNN | TinyGPT:
    return TinyGPT() if name in NEEDS_HEAD else TinyCNN()


def from_config(name: str) -> Callback:
    args = [f"--config={ROOT / 'configs' / snake_case(name)}.yaml", "--model.net=support.helpers.TinyCNN"]
    # jsonargparse keeps its last parser in a context variable, that the callback, and this what it was fitted with.
    make = partial(LightningCLI, LitTiny, args=args, run=False, save_config_callback=None)
    trainer = copy_context().run(make).trainer
    (callback,) = (c for c in trainer.callbacks if type(c).__name__ == name)
    return callback
