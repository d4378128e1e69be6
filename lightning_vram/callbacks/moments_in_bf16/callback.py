"""Keep the moments of Adam and its kin in bfloat16: 4 bytes of optimizer state for each weight in place of 8.

Parameters and gradients stay float32, and so do the numbers that a step computes with. It costs reading and writing the
moments once more in each step, and 12 bytes for each of some million weights at a time. It does not help where weights,
gradients or activations are the most of a step.
"""

from lightning_vram.callbacks.hook_points import MomentsTechnique


class MomentsInBF16(MomentsTechnique):
    """Hold the moments of ``torch.optim``'s Adam, AdamW, Adamax, NAdam and RAdam in bfloat16 during a fit.

    On one device, under DDP, under FSDP2 and under ``fsdp_offload``, where it is ``host_state="bf16"`` and holds for
    what is on the device, too. Other optimizers of the run are left alone. What a step leaves in a moment is rounded at
    random, as it follows from the number of steps and the place of each number: all ranks that have the same moments
    round alike, a resumed run has the bits of one that was not interrupted, and no source of randomness is used.

    Checkpoints hold plain bfloat16 tensors under the usual names, which any run loads; this one loads those of any run.
    What code writes to ``optimizer.state`` is rounded before the next step. After the fit moments are float32 again.

    Raises:
        MisconfigurationException: In ``setup``, if the Trainer is one of ``pytorch_lightning``, has another of these,
            FSDP1, DeepSpeed or another ``host_state``. Before training, if no optimizer has such moments.
        ValueError: Before training, if such an optimizer has weights that are not float32.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import MomentsInBF16
        >>> trainer = pl.Trainer(callbacks=[MomentsInBF16()], logger=False)
    """

    def __init__(self) -> None:
        super().__init__("bf16")
