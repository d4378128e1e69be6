"""A page about memory that ran out: what held it, why there was not enough, and what would help."""

from lightning_vram.report.out_of_memory.facts import OutOfMemory, Remedy
from lightning_vram.report.out_of_memory.page import write_page

__all__ = ["OutOfMemory", "Remedy", "write_page"]
