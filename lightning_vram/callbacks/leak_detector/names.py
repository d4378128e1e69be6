"""Names of what a training is made of, from which the references to a leak are followed."""

from collections.abc import Iterator

import lightning.pytorch as pl
from torch import Tensor

from lightning_vram.private_names.torch.trees import tensors_in


def names_in(trainer: pl.Trainer) -> dict[int, str]:
    """Return names by ``id``: ``self`` is the module, ``self.net`` a part of it, a callback is called by its class."""
    names = {id(trainer): "trainer"}
    for things in (trainer.callbacks, trainer.loggers, [trainer.datamodule]):  # type: ignore[attr-defined]
        names |= {id(thing): type(thing).__name__ for thing in things if thing is not None}
    for index, optimizer in enumerate(trainer.optimizers):
        names[id(optimizer)] = f"trainer.optimizers[{index}]"
    for name, module in trainer.lightning_module.named_modules():
        names[id(module)] = f"self.{name}" if name else "self"
    return names


def held_by(trainer: pl.Trainer) -> Iterator[Tensor]:
    """Yield what may be new after any step, and stay: parameters, their gradients, buffers and optimizer states."""
    for parameter in trainer.lightning_module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from trainer.lightning_module.buffers()
    for optimizer in trainer.optimizers:
        yield from tensors_in(list(optimizer.state.values()))
