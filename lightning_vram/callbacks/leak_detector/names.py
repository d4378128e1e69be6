"""Names of what a training is made of, from which the references to a leak are followed."""

from collections.abc import Iterator

import lightning.pytorch as pl
from torch import Tensor

from lightning_vram.memory.leaks.attributes import Held, read_attributes
from lightning_vram.private_names.torch.trees import tensors_in


def names_in(trainer: pl.Trainer) -> dict[int, str]:
    """Return names by ``id``: ``self`` is the module, ``self.net`` a part of it, a callback is called by its class."""
    names = {id(trainer): "trainer"}
    for index, optimizer in enumerate(trainer.optimizers):
        names[id(optimizer)] = f"trainer.optimizers[{index}]"
    return names | {id(thing): name for name, thing in _owners(trainer)}


def attributes_in(trainer: pl.Trainer) -> dict[str, Held]:
    """Return what attributes of the module, of its parts, of callbacks, loggers and the data module hold, by path."""
    return read_attributes(_owners(trainer))


def _owners(trainer: pl.Trainer) -> Iterator[tuple[str, object]]:
    for things in (trainer.callbacks, trainer.loggers, [trainer.datamodule]):  # type: ignore[attr-defined]
        yield from ((type(thing).__name__, thing) for thing in things if thing is not None)
    for name, module in trainer.lightning_module.named_modules():
        yield f"self.{name}" if name else "self", module


def held_by(trainer: pl.Trainer) -> Iterator[Tensor]:
    """Yield what may be new after any step, and stay: parameters, their gradients, buffers and optimizer states."""
    for parameter in trainer.lightning_module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from trainer.lightning_module.buffers()
    for optimizer in trainer.optimizers:
        yield from tensors_in(list(optimizer.state.values()))
