"""Watch one step closely: every storage that is allocated in it, with the line that made it."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.memory.leaks.births import Births, Site, line_of_user, storages_of, user_frames
from lightning_vram.memory.tracking.following import follow_modules
from lightning_vram.memory.tracking.ledger import Ledger
from lightning_vram.memory.tracking.operator_results import ResultRecorder, Results
from lightning_vram.private_names.torch.autograd import num_nodes
from lightning_vram.private_names.torch.tensors import storage_key
from lightning_vram.private_names.torch.trees import tensors_in


class Watch:
    """From before one step to before the next: :meth:`finish` ends it. Followed steps run uncompiled."""

    def __init__(self, module: nn.Module, *, follows_operators: bool) -> None:
        self._module = module
        self._follows_operators = follows_operators
        self._old_keys = {storage_key(storage) for storage in _visible_storages()}
        self._first_node = num_nodes()
        self.births = Births()
        self.is_finished = False

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Follow the operators of the step inside the block, if they may be."""
        if not self._follows_operators or self.is_finished:
            yield
            return
        place = Ledger()  # of which only the name of the module is used
        outer = user_frames()  # which were there before the step, and made nothing of it

        def note(result: Any, results: Results, func: Any) -> None:
            if results is Results.NEW:
                site = Site(place.module, line_of_user(outer))
                for storage in storages_of(tensors_in(result)):
                    self.births.add(storage, site)

        with ExitStack() as stack:
            follow_modules(stack, place, self._module, lambda: None)
            stack.enter_context(ResultRecorder(note))
            yield

    def finish(self, held: Callable[[], Iterable[Tensor]]) -> None:
        """End with the step; ``held`` returns what may be new and stay: parameters, gradients, optimizer states."""
        self.births.nodes = range(self._first_node, num_nodes())
        self.births.alive()  # forgets the dead, whose addresses may be used again
        for storage in _visible_storages():
            if storage_key(storage) not in self._old_keys:
                self.births.add(storage, Site())
        self.births.forget({storage_key(storage) for storage in storages_of(held())})
        self._old_keys.clear()
        self.is_finished = True


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
