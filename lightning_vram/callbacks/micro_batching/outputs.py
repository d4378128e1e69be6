"""What a step returned for the parts of a batch, as what it would return for the batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import WarningCache

from lightning_vram.callbacks.micro_batching.attempt import MicroBatch
from lightning_vram.core.batches.combining import OutputCombineError, combine_outputs

_warnings = WarningCache()


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


def combine_extras(
    module: pl.LightningModule, outputs: Sequence[Mapping[str, Any]], parts: Sequence[MicroBatch]
) -> dict[str, Any]:
    """Combine what training steps returned beside their loss.

    It goes to ``on_train_batch_end``, if anybody looks at it. So what cannot be combined does not end a run that has
    just survived an out-of-memory error: it is handed over as a list, with a warning.
    """
    if callable(getattr(module, "combine_outputs", None)) or any(one.keys() != outputs[0].keys() for one in outputs):
        whole = combine_step_outputs(module, outputs, parts)
        return {key: value for key, value in whole.items() if key != "loss"}
    combined: dict[str, Any] = {}
    for key in outputs[0]:
        values = [one[key] for one in outputs]
        try:
            combined[key] = combine_step_outputs(module, [{key: value} for value in values], parts)[key]
        except OutputCombineError as error:
            _warnings.warn(f"on_train_batch_end gets a list of outputs[{key!r}], one for each micro-batch: {error}")
            combined[key] = values
    del combined["loss"]
    return combined
