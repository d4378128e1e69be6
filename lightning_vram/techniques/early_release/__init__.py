"""What is kept for nothing: gradients after a step, graphs of evaluations, cyclic garbage. May import: core, memory."""

from lightning_vram.techniques.early_release.collection import PacedCollection
from lightning_vram.techniques.early_release.gradients import gradient_bytes, unstepped_gradients
from lightning_vram.techniques.early_release.graphs import HeldGraph, find_held_graph

__all__ = [
    "HeldGraph",
    "PacedCollection",
    "find_held_graph",
    "gradient_bytes",
    "unstepped_gradients",
]
