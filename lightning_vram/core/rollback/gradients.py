"""Restore gradients after a backward that failed."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part


class GradientState:
    """Gradients to restore, in the same tensors: others, such as DDP's buckets, share their memory.

    A backward that ran out of memory has added to some gradients and not to others. At the start of an accumulation
    window there is nothing to save: gradients are set to ``None`` again. Later in a window a copy is needed, as large
    as the gradients: on their device, or on the host if the device has too little free memory.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(dict.fromkeys(parameters))
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._copies = _copy_all([gradient for gradient in self._gradients if gradient is not None])

    def restore(self) -> None:
        """Go back. May be called again, after each further try."""
        with torch.no_grad():
            copies = iter(self._copies)
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
                if gradient is not None:
                    local_part(gradient).copy_(next(copies))


def _copy_all(gradients: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        try:
            return [local_part(gradient).detach().clone() for gradient in gradients]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the handler: the error holds on to the copies made so far.
        return [local_part(gradient).detach().to("cpu", copy=True) for gradient in gradients]
