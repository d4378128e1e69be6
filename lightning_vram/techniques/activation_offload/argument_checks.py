"""What is refused, with a message that names the argument."""


def check_bytes(name: str, value: object, allowed: str = "bytes as an int") -> None:
    """Refuse what is no size.

    Raises:
        TypeError: If ``value`` is no ``int``.
        ValueError: If it is negative.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {allowed}, got {value!r} of type {type(value).__name__}.")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}.")


def check_max_slowdown(name: str, value: object, disk_path: object) -> None:
    """Refuse what is no slowdown, and one with a disk, whose own waits are not measured.

    Raises:
        TypeError: If ``value`` is neither a number nor ``None``.
        ValueError: If it is below 1, or ``disk_path`` is set as well.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number or None, got {value!r} of type {type(value).__name__}.")
    if not value >= 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
    if disk_path is not None:
        raise ValueError(f"{name} is for host memory: with disk_path, set most_bytes.")
