"""Check ``segments``."""


def check_segments(segments: object) -> None:
    """Refuse other values than ``None``, ``"sqrt"`` and integers from 2."""
    if segments is None or segments == "sqrt":
        return
    if not isinstance(segments, int) or isinstance(segments, bool):
        raise TypeError(
            f"ActivationCheckpointing(segments) must be an int, 'sqrt' or None, "
            f"got {segments!r} of type {type(segments).__name__}."
        )
    if segments < 2:
        raise ValueError(
            f"ActivationCheckpointing(segments) must be at least 2, got {segments}: one segment recomputes the whole "
            "body at once and saves nothing. 'sqrt' needs the least memory."
        )
