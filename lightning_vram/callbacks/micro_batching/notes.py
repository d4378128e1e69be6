"""What an error that comes out of a part of a batch does not say itself: that it was a part."""

from lightning_vram.core.batches.errors import BatchSplitError
from lightning_vram.memory.device.out_of_memory import is_out_of_memory


def add_cut_note(error: Exception, *, number: int, count: int) -> None:
    """Tell the user that the cut may be the cause of an error of the model. Its type stays, for those who catch it.

    Nothing is added where that cannot be: in a whole batch, of memory that ran out, and where the cut itself failed.

    Args:
        error: That is being raised.
        number: Of the part, from 1 on.
        count: Of all parts of the batch.
    """
    if count == 1 or isinstance(error, BatchSplitError) or is_out_of_memory(error):
        return
    error.add_note(
        f"MicroBatching had cut the batch: this was part {number} of {count}. If the whole batch runs without this "
        "error, the cut is the cause. So it is with a batch that is padded to its longest sample, and a model that "
        "takes the length from the longest sample it gets: trim each part in MicroBatching(split=...), or in "
        "split_batch(batch, size) of the LightningModule. What is the same for all samples is named in shared_keys=."
    )
