"""A plan as people see it: a table, a picture."""

from lightning_vram.planner.plan import plan_memory as _plan_memory
from lightning_vram.report.estimate.progress import shows_progress
from lightning_vram.report.plan.shown import ShownPlan as ShownPlan
from lightning_vram.report.plan.shown import shown as shown
from lightning_vram.report.plan.table import plan_table as plan_table

plan_memory = shown(shows_progress(_plan_memory))
