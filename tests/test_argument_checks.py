"""The same mistake always gets the same message."""

from pathlib import Path

import pytest

from lightning_vram.argument_checks import check_bool, check_choice, check_kind, check_number, check_positive_int


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, r"^A\(b\) must be at least 1, got 0\.$"),
        (-5, ValueError, r"^A\(b\) must be at least 1, got -5\.$"),
        (2.0, TypeError, r"^A\(b\) must be an int, got 2\.0 of type float\.$"),
        ("2", TypeError, r"^A\(b\) must be an int, got '2' of type str\.$"),
        (True, TypeError, r"^A\(b\) must be an int, got True of type bool\.$"),
    ],
)
def test_refuses_what_is_no_count(value, error, message):
    with pytest.raises(error, match=message):
        check_positive_int("A(b)", value)


def test_refuses_what_is_no_bool():
    with pytest.raises(TypeError, match=r"^A\(b\) must be True or False, got 1 of type int\.$"):
        check_bool("A(b)", 1)


def test_refuses_another_kind():
    with pytest.raises(TypeError, match=r"^A\(b\) must be a path or None, got 3 of type int\.$"):
        check_kind("A(b)", 3, str | Path | None, "a path or None")


@pytest.mark.parametrize("value", [-0.5, float("nan")])
def test_refuses_a_number_that_is_too_small(value):
    with pytest.raises(ValueError, match=r"^A\(b\) must be at least 0, got "):
        check_number("A(b)", value, int | float, "a number", at_least=0)


def test_refuses_what_is_no_choice():
    with pytest.raises(ValueError, match=r"^A\(b\) must be 'x', 'y' or None, got 'z'\.$"):
        check_choice("A(b)", "z", ("x", "y", None))
    with pytest.raises(TypeError, match=r"^A\(b\) must be 'x', got 3 of type int\.$"):
        check_choice("A(b)", 3, ("x",))
