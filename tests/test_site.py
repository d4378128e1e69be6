"""The documentation site has every page and every public name. CI builds it in strict mode: no link is broken."""

from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml
from support.pages import PAGES, README, title
from support.parts import ROOT

import lightning_vram

SITE = yaml.safe_load((ROOT / ".docs" / "mkdocs.yml").read_text())
HIDDEN_PAGES = [title(path) for path in (ROOT / ".github").glob("*.md")]


def entries(nav: Any) -> list[str]:
    """Return the pages of a navigation, or of a part of it, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in entries(entry)]


IN_NAVIGATION = entries(SITE["nav"])


def test_every_page_is_in_the_navigation_once():
    shown = [page for page in IN_NAVIGATION if not page.startswith("api/") and page.endswith(".md")]
    expected = [title(README), "CHANGELOG.md", *map(title, PAGES), *HIDDEN_PAGES, "examples/quickstart.ipynb.md"]
    assert sorted(shown) == sorted(expected)


def test_every_public_name_has_a_page_of_the_api_reference():
    names = [PurePosixPath(page).stem for page in IN_NAVIGATION if page.startswith("api/")]
    assert sorted(names) == sorted(["README", *lightning_vram.__all__])


@pytest.mark.parametrize("path", [path for paths in SITE["extra"]["returns"].values() for path in paths])
def test_classes_that_are_documented_exist(path):
    module, _, name = path.rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name).__doc__
