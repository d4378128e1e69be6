"""What ``print(estimate)`` says, line by line."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from support.consoles import assert_every_number_is_whole_at_80_columns, shown_at
from support.estimates import GIB, MIB, allocation, estimate_of, timeline_of

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.tracking.timeline import Category, Phase
from lightning_vram.report.estimate import ShownEstimate, estimate_table, shown


def text_of(**changes) -> str:
    return str(estimate_of(kind=ShownEstimate, **changes))


def test_the_first_line_is_the_answer():
    assert text_of().splitlines()[0] == "Fits: 900.00 MiB of 1.00 GiB on RTX 4090"
    assert text_of(limit_bytes=800 * MIB).splitlines()[0] == (
        "Does not fit: 900.00 MiB of 800.00 MiB on RTX 4090, 100.00 MiB too much"
    )


def test_the_answer_is_green_or_red_on_a_terminal():
    def colored(limit_bytes: int) -> str:
        file = io.StringIO()
        console = Console(file=file, width=100, force_terminal=True, color_system="standard")
        console.print(estimate_table(estimate_of(limit_bytes=limit_bytes)))
        return file.getvalue()

    assert colored(GIB).startswith("\x1b[1;32mFits")
    assert colored(MIB).startswith("\x1b[1;31mDoes not fit")


@pytest.mark.parametrize(
    "line",
    [
        "The peak of tensors, 760.00 MiB, is in the backward, made by aten.mm in net.embed.",
        "\N{BLACK SQUARE} activations          300.00 MiB    39%",
        "net.embed           400.00 MiB    53%",
        "optimizer step   450.00 MiB",
        "validation       760.00 MiB",
        "of it workspaces                  8.00 MiB",
        "reserved                        800.00 MiB",
        "reserved, expandable segments   790.00 MiB",
        "context                         100.00 MiB",
        "reserved and context            900.00 MiB",
        "largest batch that fits   11 samples",
        "longest sequence   512 tokens (limit: model)",
        "host memory        3.00 GiB",
        "of it pinned       1.00 GiB",
        "ranks              4",
        "Note: Compiled modules were traced eagerly.",
    ],
)
def test_lines(line):
    (train,) = estimate_of().stages.values()
    stages = {"train": replace(train, host_bytes=3 * GIB, pinned_bytes=GIB), "validation": train}
    notes = ("Compiled modules were traced eagerly.",)
    sizes = {"max_batch_size": 11, "max_sequence_length": 512, "sequence_length_refusal": "IndexError: index 512"}
    text = text_of(stages=stages, **sizes, world_size=4, notes=notes)
    assert " ".join(line.split()) in " ".join(text.split())


def test_a_large_estimate_fits_a_page_of_a_log_file():
    names = [f"model.decoder.layer{number}.attention.projection_of_queries_and_keys" for number in range(48)]
    made = [allocation("held", name, category) for name in names for category in Category]
    timeline = timeline_of(made, [(number, 2000, Phase.FORWARD) for number in range(len(made))])
    (stage,) = estimate_of(timeline).stages.values()
    stages = {"train": replace(stage, host_bytes=GIB, pinned_bytes=GIB), "validation": stage}
    sizes = {"max_batch_size": 128, "max_sequence_length": 131072, "world_size": 1024}
    text = text_of(stages=stages, **sizes, notes=("a" * 90, "b" * 90))
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "…" not in text
    assert "...tion_of_queries_and_keys" in text
    assert "\x1b" not in text
    assert "38 others" in text


def test_a_narrow_terminal_has_one_column_of_tables_and_cuts_no_number():
    (train,) = estimate_of().stages.values()
    stages = {"train": replace(train, host_bytes=3 * GIB, pinned_bytes=GIB), "validation": train}
    table = estimate_table(estimate_of(stages=stages, max_batch_size=11, max_sequence_length=131072, world_size=1024))
    assert_every_number_is_whole_at_80_columns(table)
    headings = "tensors at the peak", "modules at the peak"
    in_line = [sum(all(one in line for one in headings) for line in shown_at(n, table).splitlines()) for n in (80, 100)]
    assert in_line == [0, 1]


def test_names_of_modules_are_no_markup():
    timeline = timeline_of([allocation("held", "net[red]", Category.PARAMETERS)], [(0, 5, Phase.FORWARD)])
    assert "net[red]" in str(estimate_of(timeline, kind=ShownEstimate))


def test_what_a_function_estimates_can_be_printed():
    def estimate_memory(module: str, *, device: str, on_progress: object) -> MemoryEstimate:
        """Estimate."""
        return estimate_of(notes=(module, device))

    found = shown(estimate_memory, ShownEstimate)("m", device="d")
    assert found.notes == ("m", "d")
    assert str(found).startswith("Fits: ")
    assert shown(estimate_memory, ShownEstimate).__doc__ == "Estimate."
