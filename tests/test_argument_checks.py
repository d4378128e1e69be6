"""The same mistake always gets the same message."""

import pytest

from lightning_vram.argument_checks import check_bool, check_positive_int


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


def test_accepts_what_is_right():
    check_positive_int("A(b)", 1)
    check_bool("A(b)", False)
