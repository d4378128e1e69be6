"""Modules by the names they had in 0.1, which pickles hold. To be dropped in 0.3.

A module that was saved whole in a run with ``LeanMixedPrecision`` names the functions that it computes with, and a
checkpoint names the ``SavePolicy`` among its hyperparameters. Saved again, they name what is there now.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from typing_extensions import override

NEW_NAMES = {
    "lightning_vram.memory.tracker": "lightning_vram.memory.tracking.tracker",
    "lightning_vram.precision.mixed_precision": "lightning_vram.precision",
    "lightning_vram.techniques.checkpointing": "lightning_vram.techniques.activation_checkpointing",
    "lightning_vram.techniques.class_swap": "lightning_vram.core.surgery.class_swap",
    "lightning_vram.techniques.fp32_islands": "lightning_vram.techniques.mixed_precision.fp32_islands",
    "lightning_vram.techniques.low_precision_norms": "lightning_vram.techniques.mixed_precision.low_precision_norms",
    "lightning_vram.techniques.precision_swaps": "lightning_vram.techniques.mixed_precision.precision_swaps",
    "lightning_vram.techniques.save_policy": "lightning_vram.techniques.activation_checkpointing",
    "lightning_vram.techniques.shadow": "lightning_vram.core.surgery.shadow",
}


class _OldNames(MetaPathFinder, Loader):
    """Asked when nobody else finds a module: makes one that hands on what the new one has."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in NEW_NAMES else None

    @override
    def exec_module(self, module: ModuleType) -> None:
        new = importlib.import_module(NEW_NAMES[module.__name__])
        warnings.warn(
            f"{module.__name__} is now {new.__name__}. Import it from there, or save the loaded file again: the "
            "old name will be removed in 0.3.",
            DeprecationWarning,
            stacklevel=2,
        )
        vars(module)["__getattr__"] = lambda name: getattr(new, name)


sys.meta_path.append(_OldNames())
