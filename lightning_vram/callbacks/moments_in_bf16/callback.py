"""Adam's moments in bfloat16: 4 bytes of optimizer state per parameter instead of 8.

Parameters, gradients and the arithmetic of the step stay float32. It costs converting the moments in each step, and 12
bytes for each of a few million weights at a time. It does not help if weights, gradients or activations dominate the
peak.
"""

from lightning_vram.callbacks.hook_points import MomentsTechnique


class MomentsInBF16(MomentsTechnique):
    """Store Adam's first and second moment in bfloat16 during a fit: 4 bytes per parameter instead of 8.

    Works with ``torch.optim``'s Adam, AdamW, Adamax, NAdam and RAdam, on one device, under DDP and FSDP2. Under
    ``fsdp_offload`` it sets ``host_state="bf16"``. Other optimizers of the run are left unchanged.

    Moments are written with stochastic rounding. The random numbers depend only on the step and the position of each
    value: replicas stay identical, a resumed run is exact, and the global random state is not used.

    Checkpoints hold bfloat16 tensors under the usual names, so runs with and without this callback load them. Values
    that your code writes to ``optimizer.state`` are rounded before the next step. After the fit the moments are float32
    again.

    Raises:
        MisconfigurationException: In ``setup``, if the Trainer comes from ``pytorch_lightning``, has a second
            ``MomentsInBF16`` or ``LowBitOptimizer``, uses FSDP1 or DeepSpeed, or another ``host_state``. Before
            training, if no optimizer has such moments.
        ValueError: Before training, if such an optimizer has weights that are not float32.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import MomentsInBF16
        >>> trainer = pl.Trainer(callbacks=[MomentsInBF16()], logger=False)
    """

    def __init__(self) -> None:
        super().__init__("bf16")
