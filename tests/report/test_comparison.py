"""What a person reads: the cells of the tables."""

import io
from dataclasses import replace

import torch
from rich.console import Console
from support.consoles import assert_every_number_is_whole_at_80_columns

from lightning_vram.memory.device.measurement import Measurement
from lightning_vram.report.comparison import FitResult, comparison_table, describe_equality
from lightning_vram.report.tables import memory_table

MIB = 2**20


def reading(activations: int, source: str = "tracker", **changes) -> Measurement:
    sizes = {"parameters": 2 * MIB, "activations": activations}
    return Measurement(
        "train", 0, 1, 2, "cpu", source, 2 * MIB, 2 * MIB + activations, peak_by_category=sizes, **changes
    )


def show(table) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def row(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


WEIGHTS = {"a": torch.ones(3), "b": torch.arange(2)}


def test_ratios_and_equality():
    plain = FitResult(reading(8 * MIB), 0.5, WEIGHTS)
    packed = FitResult(reading(2 * MIB), 0.75, {name: tensor.clone() for name, tensor in WEIGHTS.items()})
    text = show(comparison_table(plain, packed, "ActivationCheckpointing"))
    assert row(text, "activations") == ["8.00 MiB", "2.00 MiB", "0.25"]
    assert row(text, "parameters") == ["2.00 MiB", "2.00 MiB", "1.00"]
    assert row(text, "peak allocated") == ["10.00 MiB", "4.00 MiB", "0.40"]
    assert row(text, "time per step") == ["500.0 ms", "750.0 ms", "1.50"]
    assert "Final weights equal: yes, bit-exact." in text


def test_weights_that_differ_are_measured():
    one = FitResult(None, None, WEIGHTS)
    assert describe_equality(one, FitResult(None, None, {**WEIGHTS, "a": torch.ones(3) + 0.25})) == (
        "no: 1 of 2 tensors differ, by at most 2.5e-01"
    )
    assert describe_equality(one, FitResult(None, None, {"a": torch.ones(3)})) == "no: 1 names differ"


def test_a_run_is_shown_by_stage():
    readings = [reading(MIB), reading(4 * MIB), reading(2 * MIB, seconds_per_batch=2.0)]
    readings.append(Measurement("validate", 0, 0, 3, "cpu", "tracker", MIB, MIB))
    text = show(memory_table(readings))
    assert row(text, "peak allocated") == ["6.00 MiB", "1.00 MiB"]
    assert row(text, "activations") == ["4.00 MiB", "-"]
    assert "4 readings" in text
    assert "Median time per training batch: 2.00 s." in text


def test_a_narrow_terminal_cuts_no_number():
    by_module = {"model.decoder.layers.attention.projection_of_queries_and_keys": 1023 * MIB}
    one = reading(1023 * 1024 * MIB, "allocator", peak_reserved_bytes=2**40 - 2**30, peak_by_module=by_module)
    stages = [
        replace(one, stage=stage, epoch=12, batch_idx=123456) for stage in ("train", "validate", "test", "predict")
    ]
    assert_every_number_is_whole_at_80_columns(memory_table(stages))
    fit = FitResult(one, 0.5, WEIGHTS)
    table = comparison_table(fit, FitResult(one, 123.4, WEIGHTS), "ActivationCheckpointing and ActivationOffload")
    assert_every_number_is_whole_at_80_columns(table)


def test_what_an_allocator_adds_and_a_run_out_of_memory_lacks():
    packed = FitResult(reading(2 * MIB, "allocator", peak_reserved_bytes=10 * MIB), None, WEIGHTS)
    plain = FitResult(reading(8 * MIB, "allocator", peak_reserved_bytes=20 * MIB), None, WEIGHTS)
    assert row(show(comparison_table(plain, packed, "it")), "peak reserved") == ["20.00 MiB", "10.00 MiB", "0.50"]
    text = show(comparison_table(FitResult(None, None, None), packed, "it"))
    assert row(text, "activations") == ["out of memory", "2.00 MiB", "-"]
    assert "Final weights equal: -." in text


def test_names_are_neither_markup_nor_orders_to_the_terminal():
    named = replace(reading(MIB), peak_by_module={"[/foo]\x1b[31m": 3})
    assert row(show(memory_table([named])), "[/foo]?[31m") == ["3 B"]
