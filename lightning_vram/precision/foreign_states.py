"""States of other plugins, and of ours for them: a run can change its plugin between two checkpoints."""

from typing import Any

_OTHERS = ("LeanMixedPrecision", "MixedPrecision", "FSDPPrecision")  # Lightning keeps them by the name of the class
_LIGHTNINGS = "MixedPrecision"


def write_scale(checkpoint: dict[str, Any], scaler_state: dict[str, Any]) -> None:
    """Let Lightning's own plugin find the loss scale in a checkpoint of ours."""
    checkpoint[_LIGHTNINGS] = scaler_state


def find_state(checkpoint: dict[str, Any], own_key: str) -> dict[str, Any] | None:
    """Find what another plugin has left, where ``own_key`` is not there; ``None`` if nothing is."""
    if own_key in checkpoint:
        return None  # Lightning hands it over by itself
    return next((checkpoint[key] for key in _OTHERS if checkpoint.get(key)), None)


def is_scaler_state(state: dict[str, Any]) -> bool:
    """Whether it is what ``GradScaler.state_dict`` returns: all that Lightning's plugins keep."""
    return "scale" in state
