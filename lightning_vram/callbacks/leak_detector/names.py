"""Objects of a training from which the references to a leak are followed."""

from collections.abc import Iterator

import lightning.pytorch as pl
from torch import Tensor

from lightning_vram.private_names.torch.trees import tensors_in


def names_in(trainer: pl.Trainer) -> dict[int, str]:
    """Name objects by ``id``: ``self`` is the module, ``self.net`` a submodule, a callback is named by its class."""
    names = {id(trainer): "trainer"}
    for index, optimizer in enumerate(trainer.optimizers):
        names[id(optimizer)] = f"trainer.optimizers[{index}]"
    return names | {id(thing): name for name, thing in attribute_owners(trainer)}


def attribute_owners(trainer: pl.Trainer) -> Iterator[tuple[str, object]]:
    """Yield the module, its submodules, callbacks, loggers and the data module, with their names."""
    for things in (trainer.callbacks, trainer.loggers, [trainer.datamodule]):  # type: ignore[attr-defined]
        yield from ((type(thing).__name__, thing) for thing in things if thing is not None)
    for name, module in trainer.lightning_module.named_modules():
        yield f"self.{name}" if name else "self", module


def held_by(trainer: pl.Trainer) -> Iterator[Tensor]:
    """Yield tensors that may be new after any step, and last: parameters, gradients, buffers, optimizer state."""
    for parameter in trainer.lightning_module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from trainer.lightning_module.buffers()
    for optimizer in trainer.optimizers:
        yield from tensors_in(list(optimizer.state.values()))
