"""States of metrics, which grow with every batch, in host memory. May import: core, memory.

A metric that needs all samples at once (AUROC, average precision) collects them in lists.
"""

from lightning_vram.techniques.metric_offload.growing_lists import GrowingList, GrowingLists
from lightning_vram.techniques.metric_offload.host_group import host_group
from lightning_vram.techniques.metric_offload.host_lists import copy_to, keep_on_host

__all__ = ["GrowingList", "GrowingLists", "copy_to", "host_group", "keep_on_host"]
