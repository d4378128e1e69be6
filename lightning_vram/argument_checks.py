"""Argument checks shared by all constructors, so that the same mistake always gets the same message.

``name`` is the argument with its class, as the user writes it: ``"MicroBatching(size)"``.
"""

from collections.abc import Collection
from typing import Any


def check_kind(name: str, value: object, kinds: Any, expected: str) -> None:
    """Reject what is no instance of ``kinds``, a type or a union; ``expected`` describes them, such as ``"a path"``."""
    if not isinstance(value, kinds):
        raise _wrong_kind(name, value, expected)


def check_bool(name: str, value: object) -> None:
    """Reject anything but ``True`` and ``False``."""
    check_kind(name, value, bool, "True or False")


def check_number(name: str, value: object, kinds: Any, expected: str, *, at_least: float) -> None:
    """Reject what is no instance of ``kinds``, such as ``int | float``, or less than ``at_least``.

    ``True`` is an ``int`` in Python, but as a number it is a slip: it is rejected.
    """
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise _wrong_kind(name, value, expected)
    if not value >= at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}.")


def check_positive_int(name: str, value: object) -> None:
    """Reject anything but an ``int`` of at least 1."""
    check_number(name, value, int, "an int", at_least=1)


def check_choice(name: str, value: object, choices: Collection[str | None]) -> None:
    """Reject what is none of ``choices``, which the message lists: text, and ``None`` where that is one."""
    *most, last = map(repr, choices)
    expected = f"{', '.join(most)} or {last}" if most else last
    if not isinstance(value, str | None):
        raise _wrong_kind(name, value, expected)
    if value not in choices:
        raise ValueError(f"{name} must be {expected}, got {value!r}.")


def _wrong_kind(name: str, value: object, expected: str) -> TypeError:
    return TypeError(f"{name} must be {expected}, got {value!r} of type {type(value).__name__}.")
