"""Our dispatch modes: ``torch.compile`` neither compiles them nor runs eagerly because of them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_vram.core.hooks.hidden_from_dynamo import hide_from_dynamo
from lightning_vram.private_names.torch.dispatch import UnwrappedMode


class QuietMode(UnwrappedMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that Dynamo does not see and that lets operators pass while it is paused."""

    supports_higher_order_operators = True
    _is_paused = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in vars(cls):
            cls.__torch_dispatch__ = hide_from_dynamo(cls.__torch_dispatch__)  # type: ignore[method-assign]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled callables run compiled: else Dynamo silently runs them eagerly."""
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Mark operators inside the block as our own. Other modes see them."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before


def count_writes(targets: Iterable[Tensor]) -> None:
    """Count the writes of an operator on lists: under a dispatch mode autograd does not count them on the host."""
    increment_version([target for target in targets if not target.is_inference()])
