"""What a step returned for the parts of a batch, as what it would return for the batch."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_vram.callbacks.micro_batch_try import MicroBatch
from lightning_vram.techniques.output_combining import combine_outputs


def combine_step_outputs(module: pl.LightningModule, outputs: Sequence[Any], parts: Sequence[MicroBatch]) -> Any:
    """Combine by the module's own ``combine_outputs(outputs, sizes)``, else by the rule of the package.

    Raises:
        OutputCombineError: If there is no way to combine them.
    """
    sizes = [part.size for part in parts]
    own = getattr(module, "combine_outputs", None)
    if callable(own):
        return own(list(outputs), sizes)
    return combine_outputs(outputs, sizes, [part.share for part in parts])
