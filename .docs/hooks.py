"""What MkDocs builds besides ``pages/``: the repository's own pages at their own paths, files they link to, the API."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

import griffe
from docstrings import as_markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_vram"
FOLDERS = (".github", "configs", "examples", PACKAGE, "tests")
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".sbatch": "bash",
    ".cpp": "cpp",
    ".h": "cpp",
    ".c": "c",
    ".toml": "toml",
}
ASSETS = (".png", ".svg", ".json", ".html")  # a browser shows these itself
_FEATURES: dict[str, str] = {}  # a page of the repository, and the public name that it is about
HIDDEN = "---\nsearch: { exclude: true }\n---\n"
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(?=[)#])")
_FENCED = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)
_LIST = re.compile(r"^(?![-*] |\d+\. |[ |#>]|$)(.+)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that they have on a forge."""
    config.mdx_configs["toc"]["slugify"] = lambda text, _: re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages, what they link to, and the API reference."""
    paths = pages_of_repository()
    linked = {target for path in paths for _, target in _links(path.read_text(), path) if target.suffix != ".md"}
    for path in paths:
        _add(files, config, _name(path), path.read_text())
    for target in sorted(linked):
        _add_linked(files, config, target)
    for name, text in _api_pages(config).items():
        _add(files, config, f"api/{name}.md", text)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to what this site has, and give lists the empty line before them that Python-Markdown wants."""
    source = ROOT / page.file.src_uri
    parts = _FENCED.split(markdown)
    for number, text in enumerate(parts[::2]):
        parts[2 * number] = _LIST.sub(r"\1\n\n", _LINK.sub(lambda match: _target_on_site(source, match[0]), text))
    markdown = "".join(parts)
    if name := _FEATURES.get(page.file.src_uri):
        markdown = re.sub(r"(?<!\[)\bAPI reference\b", f"[API reference][{PACKAGE}.{name}]", markdown, count=1)
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Let links to a public name find it where it is defined in another module."""
    name = PurePosixPath(page.file.src_uri).stem
    if page.file.src_uri.startswith("api/") and name in config.extra["defined_in"]:
        path = config.extra["defined_in"][name]
        config.plugins["autorefs"].register_anchor(page, f"{PACKAGE}.{name}", path, primary=True)
    return html


def pages_of_repository() -> list[Path]:
    """Pages that a forge shows, by their paths."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")]
    return sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(p for p in found if "ISSUE_TEMPLATE" not in p.parts)])


def _add(files: Files, config: MkDocsConfig, name: str, content: str, *, is_listed: bool = True) -> None:
    inclusion = InclusionLevel.INCLUDED if is_listed else InclusionLevel.NOT_IN_NAV
    file = File.generated(config, name, content=content, inclusion=inclusion)
    file.dest_uri = re.sub(r"(^|/)\.", r"\1", file.dest_uri)  # web servers may keep hidden folders back
    files.append(file)


def _add_linked(files: Files, config: MkDocsConfig, target: Path) -> None:
    name = _name(target)
    if target.suffix in ASSETS:
        files.append(File.generated(config, name, abs_src_path=str(target), inclusion=InclusionLevel.INCLUDED))
    elif target.suffix == ".ipynb":
        _add(files, config, f"{name}.md", _notebook(json.loads(target.read_text())))
    elif target.is_dir() and not (target / "README.md").exists():
        _add(files, config, f"{name}.md", _listing(target), is_listed=False)
        for file in _listed(target):
            if files.get_file_from_path(f"{_name(file)}.md") is None and file.suffix != ".ipynb":
                _add_linked(files, config, file)
    elif target.is_file():
        language = LANGUAGES.get(target.suffix, "bash" if target.read_text().startswith("#!") else "text")
        _add(
            files,
            config,
            f"{name}.md",
            f"{HIDDEN}# {name}\n\n````{language}\n{target.read_text()}````\n",
            is_listed=False,
        )


def _notebook(notebook: dict[str, Any]) -> str:
    """Return cells with their saved outputs."""
    text = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        text.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if "text" in output:
                text.append(f"```text\n{''.join(output['text'])}```")
            elif "image/png" in output.get("data", {}):
                data = "".join(output["data"]["image/png"]).strip().replace("\n", "")
                text.append(f'<img alt="Output of the cell above" src="data:image/png;base64,{data}">')
    return "\n\n".join(text) + "\n"


def _listing(folder: Path) -> str:
    rows = [f"- [{file.relative_to(folder)}]({file.relative_to(folder.parent)})\n" for file in _listed(folder)]
    return f"{HIDDEN}# {_name(folder)}\n\n{''.join(rows)}"


def _listed(folder: Path) -> list[Path]:
    kinds = {*LANGUAGES, *ASSETS, ".ipynb", ".md"}
    return [path for path in sorted(folder.rglob("*")) if path.suffix in kinds and "__pycache__" not in path.parts]


def _links(text: str, path: Path) -> Iterator[tuple[str, Path]]:
    for part in _FENCED.split(text)[::2]:
        for match in _LINK.finditer(part):
            yield match[0], ROOT / normpath(_name(path.parent / match[0]))


def _target_on_site(source: Path, link: str) -> str:
    """Return a link to the page that shows a file or a folder."""
    target = ROOT / normpath(_name(source.parent / link))
    if target.is_dir():
        return f"{link.rstrip('/')}/README.md" if (target / "README.md").exists() else f"{link.rstrip('/')}.md"
    is_shown = target.is_file() and target.suffix not in (".md", *ASSETS)
    return f"{link}.md" if is_shown else link


def _name(path: Path) -> str:
    return str(PurePosixPath(normpath(path)).relative_to(PurePosixPath(ROOT)))


# --- the API reference: nothing is imported ---


def public_names() -> list[str]:
    """Return what ``__all__`` of the package has first."""
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text())
    found = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__"
    )
    return list(ast.literal_eval(next(found)))


def _api_pages(config: MkDocsConfig) -> dict[str, str]:
    package, pages, summaries = griffe.load(PACKAGE, search_paths=[ROOT]), {}, {}
    for name in public_names():
        path = config.extra["defined_in"].get(name, f"{PACKAGE}.{name}")
        found = package[path.removeprefix(f"{PACKAGE}.")]
        assert found.docstring is not None, f"{name} has no docstring"
        summaries[name] = as_markdown(found.docstring.value.partition("\n\n")[0].replace("\n", " "))
        pages[name] = _api_page(name, path, config.extra["returns"].get(name, []), Path(str(found.filepath)))
    pages["README"] = _overview(config.nav, summaries)
    return pages


def _api_page(name: str, path: str, returned: list[str], source: Path) -> str:
    guide = next(folder / "README.md" for folder in source.parents if (folder / "README.md").exists())
    lines = [f"---\ntitle: {name}\n---\n", f"::: {path}\n    options:\n      heading: {name}\n"]
    if name in guide.read_text().partition("\n")[0]:
        _FEATURES[_name(guide)] = name
    lines.append(f"When to use it, limits and measurements: [guide](../{_name(guide)}).\n")
    lines += [f"::: {one}\n    options:\n      heading_level: 2\n" for one in returned]
    return "\n".join(lines)


def _overview(nav: list[Any], summaries: dict[str, str]) -> str:
    """Return a table of names for each section of the navigation."""
    (sections,) = (section["API reference"] for section in nav if "API reference" in section)
    text = ["# API reference\n", f"Import every name from `{PACKAGE}`: `from {PACKAGE} import VRAMMonitor`.\n"]
    for title, entries in (item for section in sections if isinstance(section, dict) for item in section.items()):
        names = [PurePosixPath(entry).stem for entry in entries]
        rows = [f"| [`{name}`]({name}.md) | {summaries[name]} |" for name in names]
        text.append("\n".join([f"## {title}\n", "| Name | Summary |", "| --- | --- |", *rows, ""]))
    return "\n".join(text)
