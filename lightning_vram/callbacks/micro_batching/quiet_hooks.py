"""Keep a hook from callbacks and modules that expect it once per batch while it is called once per micro-batch."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_vram.core.surgery.shadow import Shadow, instead


@contextmanager
def quiet_hooks(trainer: pl.Trainer, names: Collection[str], heard_by: Callable[[Callback], bool]) -> Iterator[None]:
    """Within the context, call hooks ``names`` only on callbacks for which ``heard_by`` is true, not on the module."""
    module = trainer.lightning_module
    quiet: list[tuple[Any, str]] = [(module, name) for name in names if _overrides(module, name, pl.LightningModule)]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        heard = [name for name in names if _overrides(callback, name, Callback)]
        if heard and not heard_by(callback):
            quiet += [(callback, name) for name in heard]
    with ExitStack() as stack:
        for owner, name in quiet:
            stack.callback(Shadow(owner, name, instead(_do_nothing)).remove)
        yield


def _overrides(owner: Any, name: str, base: type) -> bool:
    return name in vars(owner) or getattr(type(owner), name, None) is not getattr(base, name)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a hook."""
