"""Argument checks shared by all constructors, so that the same mistake always gets the same message."""


def check_positive_int(name: str, value: object) -> None:
    """Reject anything but an ``int`` of at least 1.

    ``True`` is an ``int`` in Python, but as a count it is a slip: it is rejected.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")


def check_bool(name: str, value: object) -> None:
    """Reject anything but ``True`` and ``False``; ``name`` is the argument with its class."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}.")
