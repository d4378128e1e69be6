"""Which saved tensors may leave the device."""

from typing import Any

from torch import Tensor, nn

from lightning_vram.core.tensors.by_storage import ByStorage
from lightning_vram.core.tensors.versions import storage_address
from lightning_vram.memory.device.accelerators import is_capturing
from lightning_vram.memory.tracking.storages import iterate_storages, iterate_tensors
from lightning_vram.private_names.torch.autograd import current_graph_task_id
from lightning_vram.private_names.torch.dispatch import FakeTensor


class OffloadCandidates:
    """Chooses tensors on the device with at least ``min_bytes`` of memory that is not held there anyway."""

    def __init__(self, min_bytes: int) -> None:
        self._min_bytes = max(1, min_bytes)
        self._in_place: ByStorage[bool] = ByStorage()
        self._parameters: set[int] = set()  # addresses of their storages
        self._may_be_host = True  # whether the host is the device

    def begin(self, module: nn.Module | None) -> None:
        """Learn what the parameters and buffers of ``module`` are now, and where."""
        tensors = [] if module is None else [*module.parameters(), *module.buffers()]
        self._parameters = {storage_address(tensor) for tensor in tensors} | {0}
        self._may_be_host = all(tensor.device.type == "cpu" for tensor in tensors)

    def keep_in_place(self, nest: Any) -> None:
        """Let the memory of all tensors in ``nest`` stay as long as it lives."""
        for tensor in iterate_tensors(nest):
            for storage, _ in iterate_storages(tensor):
                self._in_place.note_storage(storage, True)  # noqa: FBT003

    def keep_memory(self, tensor: Tensor) -> None:
        """Let the memory of ``tensor`` stay as long as it lives."""
        self._in_place.note(tensor, True)  # noqa: FBT003

    def may_travel(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, or a part of its memory, may be sent away."""
        address = storage_address(tensor)
        if address in self._parameters or tensor.untyped_storage().nbytes() < self._min_bytes:
            return False
        if self._in_place.find(tensor):
            return False
        if current_graph_task_id() != -1:  # in a backward: needed again at once, or by the next backward
            return False
        return tensor.numel() > 0 and self._is_on_device(tensor) and not tensor.is_quantized

    def _is_on_device(self, tensor: Tensor) -> bool:
        kind = tensor.device.type
        if kind == "cpu":
            return self._may_be_host
        if type(tensor) is not FakeTensor and (kind == "meta" or is_capturing(tensor.device)):
            return False
        self._may_be_host = False  # a module on the host that computes elsewhere: FSDP2 with offload
        return True
