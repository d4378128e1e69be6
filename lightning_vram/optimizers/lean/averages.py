"""An average of weights (EMA, SWA) that are lean: made of the exact ones, and put in their place for a time.

The average is float32, as that of a plain run. An update reads the exact weights, some million at a time: 4 bytes for
each of those. While the module has the average, what its weights were waits in host memory, 4 bytes for each.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_vram.core.surgery.shadow import Shadow, instead
from lightning_vram.optimizers.lean.parameters import LeanParameters
from lightning_vram.optimizers.stepping import move_average


class LeanAverage:
    """Has an ``AveragedModel`` average what lean parameters stand for, until :meth:`remove`.

    Args:
        average: A copy of the module from before its parameters were lean. What it has in bfloat16 becomes float32.
        module: Its parameters come in the same order.
        lean: Of the module.

    Raises:
        ValueError: If the module has other parameters than the average.
    """

    def __init__(self, average: AveragedModel, module: nn.Module, lean: LeanParameters) -> None:
        self._average, self._lean = average, lean
        self._is_lent = False
        self._averages = dict(zip(module.parameters(), average.module.parameters(), strict=True))
        for own in self._averages.values():
            if own.dtype is torch.bfloat16:
                own.data = own.data.float()
        self._stand_in = Shadow(average, "update_parameters", instead(self.update))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the weights.

        Args:
            model: The module, whose buffers are averaged, or copied.
        """
        number = self._average.n_averaged.clone()
        for parameters, values in self._lean.exact_weights():
            device = parameters[0].device  # what is frozen comes on the host
            theirs = [value.to(device) for value in values]
            move_average(self._average, number, ([self._averages[p] for p in parameters], ()), (theirs, ()))
        plain = self._plain()
        buffers = (self._average.module.buffers(), model.buffers())
        move_average(self._average, number, (plain.values(), buffers[0]), (plain, buffers[1]))
        self._average.n_averaged += 1

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Let the module have the average, and the average the weights; and the other way round the next time.

        Args:
            model: The module, whose buffers are swapped.
        """
        for parameters, values in self._lean.exact_weights():
            averages = {parameter: self._averages[parameter] for parameter in parameters}
            if not self._is_lent:
                self._lean.lend(averages)
            for average, value in zip(averages.values(), values, strict=True):
                average.copy_(value)
        if self._is_lent:
            self._lean.take_back()
        self._is_lent = not self._is_lent
        for ours, theirs in self._others(model):
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)

    @torch.no_grad()
    def put(self, model: nn.Module) -> None:
        """Let the module have the average from now on.

        Args:
            model: The module, whose buffers become those of the average.
        """
        self._lean.lend({parameter: self._averages[parameter] for parameter in self._lean.parameters()})
        for ours, theirs in self._others(model):
            theirs.copy_(ours)

    def remove(self) -> None:
        """Let the average be moved as others are."""
        self._stand_in.remove()

    def _plain(self) -> dict[nn.Parameter, nn.Parameter]:
        """Parameters that are not lean, with their averages."""
        lean = self._lean.parameters()
        return {parameter: average for parameter, average in self._averages.items() if parameter not in lean}

    def _others(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what is not lean: of the average, and of the module."""
        for parameter, average in self._plain().items():
            yield average.data, parameter.data
        yield from zip(self._average.module.buffers(), model.buffers(), strict=True)
