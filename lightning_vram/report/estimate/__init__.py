"""A memory estimate as people see it: a table, a picture, a page."""

from lightning_vram.report.estimate.shown import ShownEstimate as ShownEstimate
from lightning_vram.report.estimate.shown import shown as shown
