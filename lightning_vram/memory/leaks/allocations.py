"""Storages that were allocated in a watched step: where, and which of them are alive later."""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.memory.storages import ByStorage, iterate_storages
from lightning_vram.memory.tracking.ledger import Ledger, follow_modules
from lightning_vram.memory.tracking.operator_listener import StorageSubscriber
from lightning_vram.private_names.torch import num_nodes, storage_key

_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_vram")
}


@dataclass(frozen=True)
class Site:
    """Where a storage was made."""

    module: str = ""  # name of the innermost module whose forward ran; empty for the root and outside of any
    line: str = ""  # innermost line of the user's, ``"model.py:42 in training_step"``; empty in the backward

    def __str__(self) -> str:
        """``net.0, model.py:42 in training_step``."""
        return ", ".join(filter(None, [self.module, self.line])) or "place unknown"


def storages_of(tensors: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages behind tensors that take memory: not those of fake tensors, which compilers keep."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            yield from (storage for storage, _ in iterate_storages(tensor) if storage.device.type != "meta")


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, those of libraries left out."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            yield frame
        frame = frame.f_back


def line_of_user(outer: set[FrameType]) -> str:
    """Return the innermost line of the user's code that runs now; empty if it is none inside of ``outer`` frames."""
    for frame in _frames(sys._getframe(1)):
        if frame in outer:
            return ""
        if not frame.f_code.co_filename.startswith("<"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


class StepWatch(StorageSubscriber):
    """Storages made from before one step to before the next: :meth:`finish` ends it. Followed steps run uncompiled."""

    takes_apart = True
    known: ByStorage[Site]

    def __init__(self, module: nn.Module, *, follows_operators: bool) -> None:
        super().__init__(ByStorage())
        self.nodes = range(0)  # of the graph of the step, by number
        self.is_finished = False
        self._module = module
        self._follows_operators = follows_operators
        self._old_keys = {storage_key(storage) for storage in _visible_storages()}
        self._first_node = num_nodes()
        self._place = Ledger()  # of which only the name of the module is used
        self._outer: set[FrameType] = set()  # frames that were there before the step, and made nothing of it

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Follow the operators of the step inside the block, if they may be."""
        if not self._follows_operators or self.is_finished:
            yield
            return
        self._outer.update(_frames(sys._getframe(1)))
        with ExitStack() as stack:
            stack.callback(self._outer.clear)
            stack.callback(self._place.close)
            follow_modules(stack, self._place, self._module, lambda: None)
            stack.enter_context(self)
            yield

    @override
    def on_storage(self, func: Any, storage: torch.UntypedStorage, device: torch.device) -> None:
        if storage.device.type != "meta":
            self.known.note_storage(storage, Site(self._place.module, self._line_of_user()))

    def _line_of_user(self) -> str:
        """Return the innermost line of the user's code that runs now; empty if it is none inside of the step."""
        for frame in _frames(sys._getframe(1)):
            if frame in self._outer:
                return ""
            if not frame.f_code.co_filename.startswith("<"):
                return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        return ""

    def finish(self, held: Callable[[], Iterable[Tensor]]) -> None:
        """End with the step; ``held`` returns what may be new and stay: parameters, gradients, optimizer states."""
        self.nodes = range(self._first_node, num_nodes())
        for storage in _visible_storages():
            if storage_key(storage) not in self._old_keys and self.known.find_storage(storage) is None:
                self.known.note_storage(storage, Site())
        for storage in storages_of(held()):
            self.known.drop_storage(storage)
        self._old_keys.clear()
        self.is_finished = True

    def alive(self) -> dict[int, tuple[int, Site]]:
        """Return bytes and site of the storages that are alive, by their key."""
        return {storage_key(storage): (int(storage.nbytes()), site) for storage, site in self.known.items()}


def live_tensors() -> list[Tensor]:
    """Return the tensors that Python can see."""
    kinds = {Tensor}
    waiting = [Tensor]
    while waiting:
        new = set(waiting.pop().__subclasses__()) - kinds
        kinds |= new
        waiting += new
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


def _visible_storages() -> Iterator[torch.UntypedStorage]:
    for tensor in live_tensors():
        try:
            yield from storages_of([tensor])
        except (AttributeError, RuntimeError, NotImplementedError):  # half made, or of a transform
            continue
