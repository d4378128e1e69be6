"""The pages of the documentation, read: links, code, the table of symptoms, the pairs with a limit."""

import re
from pathlib import Path

import torch
from support.parts import PUBLIC, ROOT, snake_case

PAGES = sorted(
    path for folder in ("configs", "examples", "lightning_vram", "tests") for path in (ROOT / folder).rglob("*.md")
)
README = ROOT / "README.md"
CONTEXTS_PAGE = ROOT / "lightning_vram" / "callbacks" / "README.md"
_NO_PARTS = ("DeviceSpec", "SavePolicy")
PARTS = [part.__name__ for part in PUBLIC if isinstance(part, type) and part.__name__ not in _NO_PARTS]
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
_TINY_LLAMA = (
    "AutoModelForCausalLM.from_config(__import__('transformers').LlamaConfig(vocab_size=512, hidden_size=64, "
    "intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1), dtype=torch.bfloat16)"
)
SMALLER = {  # what stands in the code of a page, and what the tests run instead
    "lora.md": {
        'AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", dtype=torch.bfloat16)': _TINY_LLAMA,
        "torch.randint(0, 128_256, (8, 2048))": "torch.randint(0, 512, (8, 32))",
    },
    "gan.md": {"def __init__(self, width=64)": "def __init__(self, width=8)"},
    "unet_3d.md": {"levels=6": "levels=3", "size = 224 ": "size = 16 "},
    "contrastive.md": {"depth=12": "depth=2", "tokens, width = 512, 64, 768": "tokens, width = 8, 4, 64"},
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def title(path: Path) -> str:
    return str(path.relative_to(ROOT))


def page_of(part: str) -> Path:
    return ROOT / _ELSEWHERE.get(part, f"lightning_vram/callbacks/{snake_case(part)}") / "README.md"


def code_in(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def shown_by(path: Path) -> list[tuple[str, str]]:
    """Python of a page, each block with what the page shows of its output: the block of text right behind it.

    Models that a laptop cannot train are made smaller, of the same classes.
    """
    text = path.read_text()
    for large, small in SMALLER.get(path.name, {}).items():
        assert text.count(large) == 1, f"{path.name}: {large}"
        text = text.replace(large, small)
    return _BLOCKS["python"].findall(text)


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
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", shown(heading).lower()).replace(" ", "-") for heading in headings}


def section(path: Path, heading: str) -> str:
    _, _, rest = path.read_text().partition(f"\n## {heading}\n")
    return rest.partition("\n## ")[0]


def rows_of(text: str) -> list[list[str]]:
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()]
    return [rows[0], *rows[2:]]


def symptoms() -> list[list[str]]:
    """Rows of the table of README.md: what you see, feature, line to paste, saves, costs, exact."""
    return rows_of(section(README, "Find your problem"))[1:]


def pairs_with_a_limit() -> list[tuple[str, str]]:
    """Features of ``lightning_vram/callbacks/README.md`` that do not simply work together."""
    return re.findall(r"^- `(\w+)`, `(\w+)`: \S", section(CONTEXTS_PAGE, "Pairs with a limit"), re.MULTILINE)


def assert_documented(part: str) -> None:
    """A feature has a row in README.md that leads to its page, a page with all sections, and a YAML file."""
    page = page_of(part)
    assert title(page) in links_in(section(README, "Find your problem"))
    config = ROOT / "configs" / f"{_CONFIGS.get(part, snake_case(part))}.yaml"
    assert f"lightning_vram.{part}" in config.read_text()
    for heading in ("What it does", "When to use it", "Arguments", "Compatibility", "Measured"):
        assert section(page, heading), heading
    assert f"configs/{config.name})" in page.read_text()
    assert f"`{part}`" in (ROOT / "CHANGELOG.md").read_text()
