"""A memory estimate as people see it: a table, a picture, a page."""

from lightning_vram.estimation import estimate_memory as _estimate_memory
from lightning_vram.report.estimate.shown import ShownEstimate as ShownEstimate
from lightning_vram.report.estimate.shown import estimate_table as estimate_table
from lightning_vram.report.estimate.shown import shown as shown
from lightning_vram.report.progress import ProgressDisplay as ProgressDisplay
from lightning_vram.report.progress import shows_progress as shows_progress

estimate_memory = shown(shows_progress(_estimate_memory))
