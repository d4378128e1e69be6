"""Lightning's averages of weights, where the weights are changed for a run."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_vram.core.surgery.shadow import Shadow, instead
from lightning_vram.optimizers.lean import LeanAverage, LeanParameters
from lightning_vram.private_names.lightning.callbacks import (
    PUT_AVERAGE,
    SWAP_WITH_AVERAGE,
    average_of,
    averaging_callbacks,
)


def list_averages(trainer: pl.Trainer | None, module: nn.Module) -> list[tuple[WeightAveraging, AveragedModel]]:
    """List ``WeightAveraging`` callbacks and their averages; refuse a module that has grown since it was copied."""
    found = []
    for callback in averaging_callbacks(trainer):
        average = average_of(callback)
        assert average is not None
        counts = [len(list(one.parameters())) for one in (average.module, module)]
        if counts[0] != counts[1]:
            raise MisconfigurationException(
                f"{type(callback).__name__} copied the module when it had {counts[0]} parameters; now it has "
                f"{counts[1]}. Put callbacks that change the module before it in Trainer(callbacks=...)."
            )
        found.append((callback, average))
    return found


def average_exact_weights(trainer: pl.Trainer, module: nn.Module, lean: LeanParameters) -> list[Shadow | LeanAverage]:
    """Let averages follow the exact weights, and swap with them, until all that is returned is removed."""
    changes: list[Shadow | LeanAverage] = []
    for callback, whole in list_averages(trainer, module):
        average = LeanAverage(whole, module, lean)
        swap = Shadow(callback, SWAP_WITH_AVERAGE, instead(average.swap))
        changes += [swap, Shadow(callback, PUT_AVERAGE, instead(average.put)), average]
    return changes
