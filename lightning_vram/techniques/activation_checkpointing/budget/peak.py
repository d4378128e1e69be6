"""The peak of activation bytes that a choice for every layer leads to, exactly, however calls of layers interleave."""

from collections.abc import Sequence

from lightning_vram.techniques.activation_checkpointing.budget.plan import LayerChoice, StepProfile


def predict_peak(profile: StepProfile, choices: Sequence[LayerChoice]) -> int:
    """Predict the peak of activation bytes of a round, exactly, however calls of layers interleave.

    Args:
        profile: What was observed.
        choices: One for each layer of the profile, in its order.

    Returns:
        Bytes at the end of the forward or in the backward of a call, whichever is more.

    Raises:
        ValueError: If the choices are for other layers.
    """
    return find_peak(profile, choices)[0]


def find_peak(profile: StepProfile, choices: Sequence[LayerChoice]) -> tuple[int, str]:
    """Predict the peak as :func:`predict_peak` does, and say where in the round it is."""
    if [choice.name for choice in choices] != [layer.name for layer in profile.layers]:
        raise ValueError("choices must be one for each layer of the profile, in its order.")
    decided = [(call, choice) for layer, choice in zip(profile.layers, choices, strict=True) for call in layer.calls]
    peak, place, kept_bytes = 0, "at the end of the forward", 0
    for call, choice in sorted(decided, key=lambda pair: pair[0].position):
        live_bytes = call.base_live_bytes + kept_bytes + call.working_bytes(choice.decision)
        if live_bytes > peak:
            peak, place = live_bytes, f"in the backward of {choice.name!r}"
        kept_bytes += call.kept_bytes(choice.decision)
    if profile.base_total_bytes + kept_bytes >= peak:
        peak, place = profile.base_total_bytes + kept_bytes, "at the end of the forward"
    return peak, place
