"""The pages of the documentation, read: links, code, the table of the parts and the matrix of what goes together."""

import re
from pathlib import Path

import torch
from support.parts import PUBLIC, ROOT, snake_case

PAGES = sorted(
    path for folder in ("configs", "examples", "lightning_vram", "tests") for path in (ROOT / folder).rglob("*.md")
)
README = ROOT / "README.md"
CONTEXTS_PAGE = ROOT / "lightning_vram" / "callbacks" / "README.md"
MATRIX = ROOT / "lightning_vram" / "callbacks" / "README.md"
_NO_PARTS = ("DeviceSpec", "SavePolicy")
PARTS = [part.__name__ for part in PUBLIC if isinstance(part, type) and part.__name__ not in _NO_PARTS]
MARKS = ("works", "limited", "refused")
_ELSEWHERE = {
    "FSDPOffloadStrategy": "lightning_vram/strategies/fsdp_offload",
    "LeanMixedPrecision": "lightning_vram/precision",
    "StreamedCheckpointIO": "lightning_vram/checkpoint_io",
}
_CONFIGS = {"FSDPOffloadStrategy": "fsdp_offload"}
_BLOCKS = {
    language: re.compile(rf"^```{language}\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
    for language in ("python", "bash")
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def title(path: Path) -> str:
    return str(path.relative_to(ROOT))


def page_of(part: str) -> Path:
    return ROOT / _ELSEWHERE.get(part, f"lightning_vram/callbacks/{snake_case(part)}") / "README.md"


def code_in(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def shown_by(path: Path) -> list[tuple[str, str]]:
    """Python of a page, each block with what the page shows of its output: the block of text right behind it."""
    return _BLOCKS["python"].findall(path.read_text())


def commands_in(path: Path) -> list[tuple[str, str]]:
    """Commands of this package on a page, each with what the page shows of its output."""
    found = []
    for block, output in _BLOCKS["bash"].findall(path.read_text()):
        commands = [line for line in block.splitlines() if line.startswith("lightning-vram ")]
        found += [(command, output if command is commands[-1] else "") for command in commands]
    return found


def figures_hold() -> bool:
    """Whether this is the torch that the pages' figures come from: another one may save other activations."""
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return torch.__version__.startswith(f"{pinned}.")


def links_in(text: str) -> list[str]:
    return [target for _, target in _LINK.findall(text)]


def shown(cell: str) -> str:
    """What a reader sees of a cell: the text of links."""
    return _LINK.sub(r"\1", cell).strip()


def anchors_in(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", shown(heading).lower()).replace(" ", "-") for heading in headings}


def section(path: Path, heading: str) -> str:
    _, _, rest = path.read_text().partition(f"\n## {heading}\n")
    return rest.partition("\n## ")[0]


def rows_of(text: str) -> list[list[str]]:
    """Rows of the first table, its heading first."""
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()]
    return [rows[0], *rows[2:]]


def parts_table() -> dict[str, list[str]]:
    """Cells of README.md, by part."""
    return {shown(row[0]).strip("`"): row for row in rows_of(section(README, "The parts"))[1:]}


def matrix() -> dict[tuple[str, str], str]:
    """Cells, by the parts of row and column. A heading is known by the page that it leads to."""
    heading, *rows = rows_of(section(MATRIX, "Which parts go together"))
    pages = [(MATRIX.parent / target).resolve() for target in links_in(" ".join(heading))]
    columns = [next(part for part in PARTS if page_of(part) == page) for page in pages]
    return {
        (shown(row[0]).strip("`"), column): cell for row in rows for column, cell in zip(columns, row[1:], strict=True)
    }


def assert_documented(part: str) -> None:
    """A part has a row in README.md that leads to its page, a YAML file, and a row and a column in the matrix."""
    page = page_of(part)
    assert links_in(parts_table()[part][0]) == [title(page)]
    config = ROOT / "configs" / f"{_CONFIGS.get(part, snake_case(part))}.yaml"
    assert f"lightning_vram.{part}" in config.read_text()
    for heading in ("What it does", "When it helps, when not", "Arguments", "What goes together", "Measured"):
        assert section(page, heading), heading
    assert f"configs/{config.name})" in page.read_text()
    cells = matrix()
    assert {(part, other) for other in PARTS} | {(other, part) for other in PARTS} <= cells.keys()
    assert f"`{part}`" in (ROOT / "CHANGELOG.md").read_text()
