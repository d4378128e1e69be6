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
