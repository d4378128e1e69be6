"""Which 16-bit format a run computes in: what the user chose, what the device supports."""

import warnings
from typing import Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_vram.memory.device.accelerators import has_native_bf16
from lightning_vram.private_names.torch.autocast import can_autocast

Choice = Literal["auto", "bf16", "fp16", "bf16-mixed", "16-mixed"]  # of a user
Precision16 = Literal["bf16-mixed", "16-mixed"]  # Lightning's names

_PRECISIONS: dict[str, Precision16 | None] = {
    "auto": None,
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "bf16-mixed": "bf16-mixed",
    "16-mixed": "16-mixed",
}
DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def check_choice(precision: object) -> Precision16 | None:
    """Translate what the user wrote; ``None`` means ``"auto"``."""
    if not isinstance(precision, str):
        raise TypeError(
            f"LeanMixedPrecision(precision) must be a string, got {precision!r} of type {type(precision).__name__}."
        )
    if precision not in _PRECISIONS:
        raise ValueError(
            f"LeanMixedPrecision(precision) must be 'auto', 'bf16' (or 'bf16-mixed') or 'fp16' (or '16-mixed'), got "
            f"{precision!r}. For other precisions use Trainer(precision=...) without this plugin."
        )
    return _PRECISIONS[precision]


def resolve_precision(choice: Precision16 | None, device_type: str) -> Precision16:
    """Choose for a device: bf16 where its hardware computes in it, else fp16; or check what was chosen."""
    precision = choice or ("bf16-mixed" if has_native_bf16(device_type) else "16-mixed")
    if why := _why_not(device_type, DTYPES[precision]):
        other = "bf16" if precision == "16-mixed" else "fp16"
        raise MisconfigurationException(
            f"LeanMixedPrecision(precision={'fp16' if precision == '16-mixed' else 'bf16'!r}) does not work on "
            f"{device_type!r} devices: {why}. Use {other!r}, or Trainer(precision='32-true') without this plugin."
        )
    if choice == "bf16-mixed" and not has_native_bf16(device_type):
        rank_zero_warn(
            f"LeanMixedPrecision(precision='bf16'): this {device_type} device emulates bfloat16, which is slow. 'auto' "
            "would choose float16 with loss scaling."
        )
    return precision


def _why_not(device_type: str, dtype: torch.dtype) -> str | None:
    """The reason why autocast refuses a device and a format, which it would otherwise only warn about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            is_enabled = can_autocast(device_type, dtype)
        except RuntimeError as error:
            return str(error).rstrip(".")
    if is_enabled:
        return None
    return str(caught[-1].message).splitlines()[0].rstrip(".") if caught else "autocast is not available"
