"""Pages of HTML: one file that needs no network and no library, and what drawings of pages are made of."""

from collections.abc import Callable, Iterable
from html import escape
from importlib.resources import files

WIDTHS = {"wide": 860, "narrow": 440}  # of a drawing, in pixels: its letters are as large on a small screen
LETTER = 8.4  # width, in pixels


def fill(template: str, **parts: str) -> str:
    """Return a template of this folder, filled with HTML."""
    # Split rather than replaced one after the other: what is put in is never read as the name of a part.
    texts = files(__package__).joinpath(template).read_text(encoding="utf-8").split("{{")
    filled = [parts[name] + rest for name, _, rest in (text.partition("}}") for text in texts[1:])]
    return "".join([texts[0], *filled])


def page(title: str, *, is_good: bool, lead: str, drawing: str, **parts: str) -> str:
    """Return a page; ``parts`` are HTML: ``side`` next to the drawing, ``tables``, ``notes`` and ``script`` below."""
    color = "good" if is_good else "bad"
    empty = {"side": "", "tables": "", "notes": "", "script": ""}
    return fill("page.html", title=escape(title), color=color, lead=escape(lead), drawing=drawing, **{**empty, **parts})


def drawings(height: int, name: str, draw: Callable[[int], Iterable[str]]) -> str:
    """Return a drawing twice, for wide and for small screens: the page shows one of them."""
    return "".join(
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">'
        f"{''.join(draw(width))}</svg>"
        for kind, width in WIDTHS.items()
    )


def table(name: str, lines: Iterable[tuple[str, ...]], colors: Iterable[str] = (), columns: Iterable[str] = ()) -> str:
    """Return a table of text; a single cell is as wide as the table. ``colors`` are of the first rows."""
    squares = [f'<u style="background:{color}"></u>' for color in colors]
    body = ""
    for number, line in enumerate(lines):
        cells, square = "</td><td>".join(map(escape, line)), squares[number] if number < len(squares) else ""
        body += f"<tr><td{' colspan=9' * (len(line) == 1)}>{square}{cells}</td></tr>"
    heads = "".join(f"<th>{escape(column)}</th>" for column in columns)
    first = f"<th>{escape(name)}</th>{heads}" if heads else f'<th colspan="9">{escape(name)}</th>'
    return f"<table><tr>{first}</tr>{body}</table>"


def rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    """An element of SVG."""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def text_at(x: float, y: float, text: str, kind: str = "") -> str:
    """An element of SVG."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'
