"""Sizes as text, both ways."""

import pytest

from lightning_vram.memory.units import GIB, KIB, MIB, TIB, format_argument, format_bytes, parse_bytes, parse_limit


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (MIB + MIB // 2, "1.50 MiB"),
        (3 * TIB, "3.00 TiB"),
        (-2 * GIB, "-2.00 GiB"),
    ],
)
def test_format(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (" 24 gib ", 24 * GIB),
        ("24G", 24 * GIB),
        ("1.5KiB", 1536),
        (".5 KiB", 512),
        ("24GB", 24 * 10**9),
        ("80B", 80),
        ("1.3 B", 1),
        ("0.1TiB", TIB // 10),  # in floats 0.1 TiB is one byte off
        (12345, 12345),
    ],
)
def test_parse(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        ("", ValueError, r"^size must be a number and one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB, got ''\.$"),
        ("20", ValueError, r"^size has no unit, got '20': write '20GiB'\.$"),
        ("-1GiB", ValueError, r"^size must be a number and one of .*, got '-1GiB'\.$"),
        (-1, ValueError, r"^size must not be negative, got -1\.$"),
        (True, TypeError, r"^size must be bytes as an int or text such as '24GiB', got True of type bool\.$"),
    ],
)
def test_parse_refuses(size, error, message):
    with pytest.raises(error, match=message):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("num_bytes", "down", "up"),
    [
        (1023, "1023B", "1023B"),
        (14794 * KIB, "14.44MiB", "14.45MiB"),
        (24 * GIB - 1, "23.99GiB", "24.00GiB"),
        (TIB + 1, "1.00TiB", "1.01TiB"),
    ],
)
def test_an_argument_is_on_the_safe_side_of_what_it_was_made_from(num_bytes, down, up):
    assert format_argument(num_bytes) == down
    assert format_argument(num_bytes, round_up=True) == up
    assert parse_bytes(down) <= num_bytes <= parse_bytes(up)


def test_a_limit_is_a_size_above_0_with_its_unit():
    assert parse_limit("20B", "budget") == 20
    assert parse_limit(MIB, "budget") == MIB
    with pytest.raises(ValueError, match=r"^budget has no unit, got 20: write '20GiB'\.$"):
        parse_limit(20, "budget")
    for size in (0, "0B", "0.5B"):
        with pytest.raises(ValueError, match=rf"^budget must be above 0, got {size!r}\.$"):
            parse_limit(size, "budget")
