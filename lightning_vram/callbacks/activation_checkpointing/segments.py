"""Which numbers of segments there can be."""


def check_segments(segments: object) -> None:
    """Refuse what is no number of segments.

    Raises:
        TypeError: If it is of the wrong kind.
        ValueError: If it is too small.
    """
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
