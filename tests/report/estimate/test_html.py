"""The page: its drawing, measured, and what its script is given."""

import json
import re
from xml.etree import ElementTree

import pytest
from support.estimates import MIB, allocation, estimate_of, timeline_of

from lightning_vram.memory.tracking.timeline import Category, Phase
from lightning_vram.report.drawing import WIDTH
from lightning_vram.report.estimate import BOTTOM, COLORS, LEFT, MARGIN, TOP, axis_bytes, picture

RIGHT = WIDTH - MARGIN


def page(estimate) -> str:
    return picture(estimate).page()


def data_of(text: str) -> dict:
    return json.loads(re.search(r"^const data = (.*);$", text, re.MULTILINE)[1])


def drawing_of(estimate) -> ElementTree.Element:
    return ElementTree.fromstring(re.search(r"<svg.*?</svg>", page(estimate))[0])


def height(estimate, num_bytes: int) -> float:
    return round(BOTTOM - num_bytes / axis_bytes(estimate) * (BOTTOM - TOP), 1)


def test_the_script_gets_every_column():
    data = data_of(page(estimate_of()))
    columns, names = data["columns"], data["names"]
    assert len(columns) == 11
    phase, op, module, *sizes = columns[5]
    assert [names[phase], names[op], names[module]] == ["backward", "aten.mm", "net.embed"]
    assert [size // MIB for size in sizes] == [100, 200, 100, 300, 60]
    assert data["categories"] == [
        ["parameters", COLORS[Category.PARAMETERS]],
        ["optimizer state", COLORS[Category.OPTIMIZER_STATE]],
        ["gradients", COLORS[Category.GRADIENTS]],
        ["activations", COLORS[Category.ACTIVATIONS]],
        ["temporaries", COLORS[Category.TEMPORARIES]],
    ]
    assert data["area"] == [LEFT, TOP, MARGIN, BOTTOM]


def test_the_stack_is_drawn_to_scale():
    estimate = estimate_of()
    color = COLORS[Category.ACTIVATIONS]
    (path,) = (found for found in drawing_of(estimate) if found.tag == "path" and found.get("fill") == color)
    column = (RIGHT - LEFT) / 11
    corners = [height(estimate, size * MIB) for size in (300, 600, 610, 600, 700, 400, 300)]
    edges = [f"{LEFT + number * column:.1f}" for number in (1, 2, 3, 5, 6, 10)]
    there, _ = path.get("d").split(f"H{RIGHT}")
    rises = "".join(f"H{x}V{y}" for x, y in zip(edges, corners[1:], strict=True))
    assert there == f"M{LEFT} {corners[0]}{rises}"


def test_the_peak_the_limit_and_what_is_needed_stand_at_their_heights():
    estimate = estimate_of()
    drawing = drawing_of(estimate)
    (peak,) = (found for found in drawing if found.get("class") == "peak")
    assert float(peak.get("cx")) == pytest.approx(LEFT + 5.5 / 11 * (RIGHT - LEFT), abs=0.1)
    assert float(peak.get("cy")) == height(estimate, 760 * MIB)
    lines = {found.get("class"): found.get("d") for found in drawing if found.tag == "path"}
    assert lines["limit good"] == f"M{LEFT} {height(estimate, 924 * MIB)}H{RIGHT}"
    assert lines["needed"] == f"M{LEFT} {height(estimate, 800 * MIB)}H{RIGHT}"
    words = {"peak of tensors 760.00 MiB", "reserved 800.00 MiB", "RTX 4090 minus context 924.00 MiB"}
    assert words <= {found.text for found in drawing}


def test_a_page_needs_nothing_else():
    text = page(estimate_of())
    assert set(re.findall(r"\w+://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<(link|img|iframe)|src=|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text


def test_names_are_text_wherever_they_stand():
    evil = "</script><b>{{data}}&amp;"
    timeline = timeline_of(
        [allocation(evil, evil, Category.PARAMETERS), allocation(evil, evil, Category.INPUTS)],
        [(0, 5, Phase.FORWARD), (1, 5, Phase.FORWARD)],
    )
    text = page(estimate_of(timeline, notes=(evil,)))
    assert "<b>" not in text.partition("const data")[0]
    assert text.count("</script>") == 1
    assert evil in data_of(text)["names"]


def test_tables_and_notes():
    text = page(estimate_of(notes=("Traced eagerly.",), max_batch_size=11))
    assert "</u>activations</td><td>300.00 MiB</td><td>39%</td></tr>" in text
    assert "<tr><td>optimizer step</td><td>450.00 MiB</td></tr>" in text
    assert "<tr><td>reserved</td><td>800.00 MiB</td></tr>" in text
    assert "<tr><td>largest batch that fits</td><td>11 samples</td></tr>" in text
    assert "<tr><td>net.embed</td><td>400.00 MiB</td><td>53%</td></tr>" in text
    assert "<p>Note: Traced eagerly.</p>" in text
    assert text.count("<td>8 samples</td>") == 1


def test_modules_that_differ_in_a_number_only_are_one_row():
    names = [*(f"net.blocks.{number}.mlp" for number in range(8)), "net.blocks2d"]
    made = [allocation("held", name, Category.PARAMETERS) for name in names]
    changes = [(number, 5 if number else 6, Phase.FORWARD) for number in range(9)]
    text = page(estimate_of(timeline_of(made, changes)))
    for name, size in (("net.blocks.*.mlp x7", 35), ("net.blocks.0.mlp", 6), ("net.blocks2d", 5)):
        assert f"<tr><td>{name}</td><td>{size}.00 MiB</td>" in text
