"""Pages, public docstrings and messages use the field's terms: those that nobody searches for do not come back."""

import pytest
from support.pages import PAGES, README, title
from support.parts import ROOT
from support.words import SOURCES, messages_in, public_docstrings, terms_in

ALLOWED: dict[str, int] = {}  # places where a term has another meaning: so many hits


@pytest.mark.parametrize(
    "path", [README, *PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / ".github").rglob("*.md"))], ids=title
)
def test_a_page_has_none_of_the_terms_to_avoid(path):
    found = terms_in(path.read_text())
    assert len(found) == ALLOWED.get(title(path), 0), found


def test_public_docstrings_have_none():
    assert {name: terms_in(text) for name, text in public_docstrings() if terms_in(text)} == {}


def test_messages_have_none():
    found = {
        f"{title(path)}:{line}": terms_in(text)
        for path in SOURCES
        for line, text in messages_in(path)
        if terms_in(text)
    }
    assert found == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The memory of plain.", ["'plain' -> baseline; without lightning_vram"]),
        ("Tensors kept for the backward.", ["'kept for' -> saved for backward; saved activations"]),
        ("Equal to the bit, beside others.", ["'to the bit'", "'beside'"]),
        ("What the second run does not reach is not kept.", ["'second run'", "subject a noun"]),
        ("Users shall not read it twice.", ["'shall'"]),
        ("`plain`, plain text and hidden states:\n```python\nbeside = 1\n```\n", []),
        ("| What you see | What uses memory? |", []),
    ],
)
def test_terms_are_found_outside_of_code(text, found):
    hits = terms_in(text)
    assert len(hits) == len(found)
    assert all(any(part in hit for hit in hits) for part in found)
