"""Argument checks shared by all constructors, so that the same mistake always gets the same message."""


def check_positive_int(name: str, value: object) -> None:
    """Reject anything but an ``int`` of at least 1.

    ``True`` is an ``int`` in Python, but as a count it is a slip: it is rejected.

    Args:
        name: Argument as the user wrote it, with its class: ``"EmptyCache(every_n_batches)"``.
        value: What the user passed.

    Raises:
        TypeError: If ``value`` is not an ``int``.
        ValueError: If ``value`` is smaller than 1.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")


def check_bool(name: str, value: object) -> None:
    """Reject anything but ``True`` and ``False``.

    Args:
        name: Argument as the user wrote it, with its class.
        value: What the user passed.

    Raises:
        TypeError: If ``value`` is not a ``bool``.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}.")
