"""Train larger models on the GPU you have: callbacks, a strategy and a precision plugin for PyTorch Lightning.

Import public names from here; modules below this package may move between releases. Without Lightning, the names that
need only PyTorch are available, and so are the subpackages ``techniques``, ``optimizers``, ``core`` and ``memory``.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import lightning_vram.startup as startup  # before imports that fail in versions which are too old

# isort: split
from lightning_vram.version import __version__ as __version__

__all__ = [
    "AccumulationScheduler",
    "ActivationCheckpointing",
    "ActivationCompression",
    "ActivationOffload",
    "AutoVRAM",
    "ChunkedLoss",
    "DeviceSpec",
    "EarlyRelease",
    "EmptyCache",
    "FSDPOffloadStrategy",
    "InPlaceFusion",
    "LeakDetector",
    "LeanMixedPrecision",
    "LowBitOptimizer",
    "MemoryBudget",
    "MetricOffload",
    "MicroBatching",
    "MomentsInBF16",
    "OptimizerInBackward",
    "QuantizationAwareTraining",
    "QuantizeFrozenWeights",
    "SavePolicy",
    "SlurmRequeue",
    "StreamedCheckpointIO",
    "TokenTiling",
    "VRAMMonitor",
    "configure_allocator",
    "dequantize_frozen_weights",
    "estimate_memory",
    "load_quantized",
    "plan_memory",
    "quantize_after_fit",
    "track_memory",
]

if not startup.is_command(sys.orig_argv):  # which imports PyTorch and Lightning only where it needs them
    from lightning_vram.public_names import *
elif importlib.util.find_spec("lightning") is None:
    sys.exit("lightning-vram: error: needs Lightning: pip install lightning 'jsonargparse[signatures]' omegaconf rich")

if not TYPE_CHECKING:
    _ALL = frozenset(__all__)
    if importlib.util.find_spec("lightning") is None:
        __all__ = ["DeviceSpec", "SavePolicy", "configure_allocator", "load_quantized", "track_memory"]

    def __getattr__(name: str) -> Any:
        if name not in _ALL:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        names = vars(importlib.import_module("lightning_vram.public_names"))
        if name not in names:
            raise ImportError(f"lightning_vram.{name} needs Lightning, which is not installed: pip install lightning")
        return names[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
