"""Peak activation bytes of a round, for given choices and offloaded bytes."""

from collections.abc import Sequence

from lightning_vram.techniques.activation_checkpointing.budget.plan import CallProfile, LayerChoice, StepProfile


def predict_peak(profile: StepProfile, choices: Sequence[LayerChoice], offloaded_bytes: int = 0) -> int:
    """Predict the peak activation bytes of a round; exact if nothing is offloaded, else an upper bound."""
    return find_peak(profile, choices, offloaded_bytes)[0]


def find_peak(profile: StepProfile, choices: Sequence[LayerChoice], offloaded_bytes: int = 0) -> tuple[int, str]:
    """Predict the peak as :func:`predict_peak` does, and say where in the round it is."""
    if [choice.name for choice in choices] != [layer.name for layer in profile.layers]:
        raise ValueError("choices must be one for each layer of the profile, in its order.")
    decided = [(call, choice) for layer, choice in zip(profile.layers, choices, strict=True) for call in layer.calls]
    total_bytes = profile.base_total_bytes + sum(choice.kept_bytes for choice in choices)
    traffic = None
    if offloaded_bytes:
        staying_bytes = profile.staying_base_bytes + sum(call.staying_bytes(c.decision) for call, c in decided)
        traffic = Traffic(total_bytes - staying_bytes, offloaded_bytes, profile.largest_bytes)
    peak, place, kept_bytes, staying_bytes = 0, "at the end of the forward", 0, 0
    for call, choice in sorted(decided, key=lambda pair: pair[0].position):
        live_bytes = call.base_live_bytes + kept_bytes
        if traffic is not None:
            live_bytes = traffic.live_bytes(live_bytes, call.staying_base_bytes + staying_bytes, call)
        live_bytes += call.working_bytes(choice.decision)
        if live_bytes > peak:
            peak, place = live_bytes, f"in the backward of {choice.name!r}"
        kept_bytes += call.kept_bytes(choice.decision)
        staying_bytes += call.staying_bytes(choice.decision)
    if traffic is not None:
        total_bytes += traffic.window_bytes + traffic.excess_bytes - traffic.total_bytes
    if total_bytes >= peak:
        peak, place = total_bytes, "at the end of the forward"
    return peak, place


WINDOW_SHARE = 16
"""Part of what travels that serves the traffic, on the device, as in ``ActivationOffloading``."""


class Traffic:
    """What an offloaded round holds on the device of that which may travel.

    What is saved first, up to some bytes, is away. A window serves copies under way, and what is saved last; half of
    what stays in excess is used, as soon as it is free, for what is fetched ahead.
    """

    def __init__(self, total_bytes: int, offloaded_bytes: int, largest_bytes: int) -> None:
        self.total_bytes = total_bytes  # saved in the round, and large enough to travel
        self.offloaded_bytes = offloaded_bytes
        self.window_bytes = max(largest_bytes, -(-total_bytes // WINDOW_SHARE))
        self.excess_bytes = max(0, total_bytes - offloaded_bytes)

    def live_bytes(self, before_bytes: int, staying_bytes: int, call: CallProfile) -> int:
        """Bytes beside the working bytes of ``call``, of ``before_bytes`` that were kept until then."""
        ahead_bytes = -(-self.excess_bytes // 2) + call.new_input_bytes
        left_bytes = max(before_bytes - staying_bytes - self.offloaded_bytes, ahead_bytes)
        return staying_bytes + call.old_input_bytes + self.window_bytes + left_bytes
