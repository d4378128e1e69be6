"""Tables as terminals of some width show them."""

import io
import re
from collections import Counter

from rich.console import Console, RenderableType


def shown_at(width: int, table: RenderableType) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return file.getvalue()


def assert_every_number_is_whole_at_80_columns(table: RenderableType) -> None:
    """Names may wrap; no number of the wide table may be missing, or be cut."""
    wide, narrow = shown_at(400, table), shown_at(80, table)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow
    found, wanted = (Counter(re.findall(r"[\d.,]*\d%?", text)) for text in (narrow, wide))
    assert wanted - found == Counter()
    assert wanted
