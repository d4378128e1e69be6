"""Checks of arguments."""


def check_bytes(name: str, value: object, allowed: str = "bytes as an int") -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``value`` is a non-negative int."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {allowed}, got {value!r} of type {type(value).__name__}.")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}.")


def check_max_slowdown(name: str, value: object, disk_path: object) -> None:
    """Refuse an invalid slowdown, and one with a disk, whose own waits are not measured."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number or None, got {value!r} of type {type(value).__name__}.")
    if not value >= 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
    if disk_path is not None:
        raise ValueError(f"{name} is for host memory: with disk_path, set most_bytes.")
