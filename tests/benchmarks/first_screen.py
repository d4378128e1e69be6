"""Draw the picture at the top of README.md: memory over one step, plain and packed, and peak against step time.

    python -m tests.benchmarks.first_screen results/speed.json -o lightning_vram/report/first_screen.png

The left half is estimated, for a card that need not be here; the right half is what a file of results has.
"""

import argparse
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback

from lightning_vram import ActivationCheckpointing, ActivationOffload, EarlyRelease, estimate_memory
from lightning_vram.demos import ByteGPT
from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.benchmarks.points import PEER, Panel, front, read_panels
from lightning_vram.report.benchmarks.results import PLAIN, read_results
from lightning_vram.report.benchmarks.scatter import draw_panel
from lightning_vram.report.estimate.figure import draw_areas, draw_phases
from lightning_vram.report.estimate.scale import Scale, choose_scale
from lightning_vram.report.estimate.step import COLORS, CONTEXT_COLOR, read_step
from lightning_vram.report.pictures import BAD, FAINT, FONT, GOOD, GRID, INK, save_figure
from lightning_vram.report.tables import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEVICE, MODEL, BATCH_SIZE = "rtx4090", "GPT-2 Large body, batch 16 x 1,024, bf16-mixed", 16
SHAPE = (36, 1280, 20, 1024)  # layers, width, heads, length of ByteGPT: GPT-2 Large over bytes
_SIZE = (12.0, 5.4)  # inches
_MAX_COLUMNS, _NUM_COLORS = 900, 96


def packed_parts() -> list[Callback]:
    """What the packed run has and the plain one has not; all leave the weights as they are, to the bit."""
    return [ActivationCheckpointing(), ActivationOffload(), EarlyRelease()]


def estimate(callbacks: list[Callback]) -> MemoryEstimate:
    """Play the step on a card that is not there."""
    with torch.device("meta"):
        model = ByteGPT(*SHAPE)
    tokens = torch.zeros(BATCH_SIZE, SHAPE[-1] + 1, dtype=torch.int64)
    trainer: dict[str, Any] = {"precision": "bf16-mixed", "callbacks": callbacks, "logger": False}
    return estimate_memory(model, tokens, device=DEVICE, trainer=trainer, find_limits=False)


def draw(plain: MemoryEstimate, packed: MemoryEstimate, parts: str, panel: Panel, caption: str) -> "Figure":
    """Draw both halves.

    Args:
        plain: The step as it is.
        packed: The same with parts of the package.
        parts: Their names.
        panel: Of a file of results.
        caption: The machine that the panel comes from.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(FONT):
        figure, scale = Figure(figsize=_SIZE, facecolor="white"), choose_scale(plain)
        figure.text(0.012, 0.975, f"Estimated: {MODEL}", va="top", fontweight="bold", color=INK)
        places = ((0.047, 0.2, 0.213, 0.55), (0.274, 0.2, 0.213, 0.55))
        for place, one, name in zip(places, (plain, packed), (PLAIN, "packed"), strict=True):
            _draw_step(figure.add_axes(place), one, scale, name, has_numbers=one is plain)
        _draw_legend(figure, plain)
        note = f"packed: {parts}\nThe titles say what is needed: with what the allocator reserves beside tensors."
        figure.text(0.012, 0.025, note, va="bottom", fontsize=10, color=FAINT)
        _draw_points(figure, panel)
        figure.text(0.535, 0.975, f"Measured: {panel.workload}", va="top", fontweight="bold", color=INK)
        figure.text(0.535, 0.025, "\n".join(wrap(caption, 56)), va="bottom", fontsize=10, color=FAINT)
    return figure


def _draw_step(axes: "Axes", one: MemoryEstimate, scale: Scale, name: str, *, has_numbers: bool) -> None:
    step = read_step(one.timeline, _MAX_COLUMNS, one.main_stage.first_event)
    axes.set_xlim(0, len(step.columns))
    axes.set_ylim(0, scale.end_bytes)
    axes.set_yticks(scale.ticks, [scale.label(tick) if has_numbers else "" for tick in scale.ticks])
    axes.set_xticks([])
    axes.set_xlabel("one training step", color=INK)
    axes.tick_params(length=0, colors=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    draw_phases(axes, step, scale)
    for text in axes.texts:
        text.set(fontsize=9.5, text=text.get_text().removeprefix("optimizer "))
    draw_areas(axes, one, step)
    limit = one.device.memory_bytes
    if scale.has_limit:
        axes.axhline(limit, color=BAD, linewidth=2)
    fits = "fits" if name == PLAIN else "fits, equal to the bit"
    verdict, color = (fits, GOOD) if one.fits else ("out of memory", BAD)
    title = f"{name}: {format_bytes(one.needed_bytes)}\n{verdict}"
    axes.set_title(title, loc="left", color=color, fontweight="bold", fontsize=14, pad=20)
    if has_numbers:
        axes.set_ylabel(f"memory, {scale.unit}", color=INK)
    elif scale.has_limit:
        place: dict[str, Any] = {"xytext": (4, 4), "textcoords": "offset points", "fontweight": "bold"}
        axes.annotate(f"{one.device.name}: {format_bytes(limit)}", (0, limit), color=BAD, **place)


def _draw_points(figure: "Figure", panel: Panel) -> None:
    """As many points with names as there is room for; those that nothing beats come first, and others' ways."""
    best = [one for one in panel.points if one.kind == PLAIN or one in front(panel.points)]
    for named in (panel.points, [one for one in panel.points if one in best or one.kind == PEER], best, []):
        axes = figure.add_axes((0.578, 0.2, 0.415, 0.63))
        if draw_panel(axes, panel, named):
            break
        axes.remove()
    axes.set_title("", loc="left")
    handles, labels = axes.get_legend_handles_labels()
    words = [text.partition(":")[0] for text in labels]
    style: dict[str, Any] = {"frameon": False, "fontsize": 10, "columnspacing": 1, "handletextpad": 0.4, "borderpad": 0}
    axes.legend(handles, words, loc="lower left", bbox_to_anchor=(0, 1.02), ncols=len(words), **style)


def _draw_legend(figure: "Figure", plain: MemoryEstimate) -> None:
    from matplotlib.patches import Patch

    step = read_step(plain.timeline, _MAX_COLUMNS, plain.main_stage.first_event)
    most = {kind: max(column.by_category[kind] for column in step.columns) for kind in step.categories}
    shown = [kind for kind in step.categories if most[kind] > 0.01 * plain.peak_bytes]
    patches = [Patch(color=COLORS[kind], label=label(kind)) for kind in shown]
    patches.insert(0, Patch(color=CONTEXT_COLOR, label="context"))
    style: dict[str, Any] = {"frameon": False, "fontsize": 9.5, "handlelength": 0.8, "columnspacing": 0.7}
    figure.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(0.004, 0.088), ncols=len(patches), handletextpad=0.3, **style
    )


def _shrink(path: Path) -> None:
    """A picture of few colours takes a quarter of the bytes with a palette, and looks the same."""
    from PIL import Image  # matplotlib brings it

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(_NUM_COLORS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.first_screen", description=__doc__)
    parser.add_argument("results", type=Path, help="file of results with peaks and step times, of the suite speed")
    parser.add_argument("--workload", default="", help="part of its name; the first of the file by default")
    parser.add_argument("-o", "--output", type=Path, required=True, help="picture to write, .png")
    arguments = parser.parse_args()
    file = read_results(arguments.results)
    panels = [panel for panel in read_panels(file) if arguments.workload in panel.workload]
    if not panels:
        parser.error(f"{arguments.results} has no rows of {arguments.workload!r} with by, a peak and a time.")
    parts = packed_parts()
    names = " + ".join(f"{type(part).__name__}()" for part in parts)
    figure = draw(estimate([]), estimate(parts), names, panels[0], file.caption)
    save_figure(figure, arguments.output)
    _shrink(arguments.output)
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1024:.0f} KiB.")


if __name__ == "__main__":
    main()
