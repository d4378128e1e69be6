"""What is fetched ahead in a backward: what was saved before the tensor it just asked for, latest first."""

import torch

from lightning_vram.core.host.arena import OffloadError
from lightning_vram.techniques.activation_offload.items import OffloadedItem

_LOOK_AHEAD = 64  # items that are looked at for one that may be fetched


def fetch_ahead(item: OffloadedItem, window_bytes: int) -> None:
    """Begin to fetch what was saved before ``item``, which is about to be handed over, as far as the window reaches."""
    items = item.run.items
    room = window_bytes - item.run.resident_bytes + item.counted_bytes
    for number in range(item.number - 1, max(-1, item.number - 1 - _LOOK_AHEAD), -1):
        earlier = items[number]()
        if earlier is None or earlier.is_here:
            continue
        if earlier.num_bytes > room:
            return
        try:
            earlier.fetch()
        except (torch.OutOfMemoryError, OffloadError):  # whoever needs it now may still have it
            return
        room -= earlier.num_bytes


def make_room(item: OffloadedItem, window_bytes: int) -> None:
    """Pass over what was saved after ``item`` and nobody asked for, if it fills the window.

    The backward took another way: of two losses of one forward only the first, say.
    """
    run = item.run
    if run.resident_bytes and run.resident_bytes + item.num_bytes > window_bytes:
        for reference in run.items[item.number + 1 :]:
            later = reference()
            if later is not None:
                later.pass_over()
