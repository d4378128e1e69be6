"""Keep what an optimizer keeps for each weight in 8 or 4 bits: 2.06 or 1.06 bytes for Adam's two moments, not 8.

Other names: 8-bit optimizers, quantized optimizer states. Parameters and gradients stay float32, and so do the numbers
that a step computes with. It costs reading and writing the moments once more in each step, in a dozen operators, and 12
bytes for each of some million weights at a time. It does not help where weights, gradients or activations are the most
of a step, or where each parameter has less than 4096 weights.
"""

from typing import Literal, get_args

from lightning_vram.callbacks.hook_points import MomentsTechnique
from lightning_vram.optimizers.narrow import Library


class LowBitOptimizer(MomentsTechnique):
    """Hold moments in 8 or 4 bits during a fit: of Adam's kind, SGD with momentum and Lion.

    ``torch.optim``'s Adam, AdamW, Adamax, NAdam, RAdam and SGD, and any optimizer of the name Lion that steps as its
    paper has it. They stay the same objects, with their groups, schedulers, hooks and counts of steps; others of the
    run are left alone. Moments of a parameter with less than 4096 weights, on all ranks together, stay float32.

    On one device, under DDP and FSDP2, and under ``fsdp_offload``, where it is ``host_state="8bit"`` or ``"4bit"`` but
    for small parameters, and holds for what is on the device, too.

    Blocks of 128 numbers share a scale: the largest of them, which is exact. A number is a square of evenly spaced
    roots, of which what is divided by has no zero. Checkpoints hold plain float32 tensors on the host under the usual
    names: a run without this callback loads them, and this one loads those of any run. A resumed run has the bits of
    one that was not interrupted. After the fit moments become float32 when the optimizer steps by itself.

    Source of blocks, and of no zero for what is divided by: Li, Chen and Zhu, "Memory Efficient Optimizers with 4-bit
    States" (2023); of roots: "FlashOptim" (arXiv 2602.23349).

    Args:
        bits: Of a number: 8 (2.06 bytes for each weight of Adam's kind, 1.03 of SGD and Lion) or 4 (1.06, 0.53).
        library: Whose kernels step: ``"own"``, anything anywhere; ``"torchao"``, Adam and AdamW, by code that
            ``torch.compile`` makes; ``"bitsandbytes"``, AdamW, SGD and Lion, 8 bits only. The last two, in extra
            ``lowbit``, step what is not sharded, without ``fused``; what is rounded, and how, is theirs. ``"auto"``:
            on CUDA the first of bitsandbytes and torchao that is installed and can, else our own. The optimizer and
            its checkpoints are the same with all.

    Raises:
        ValueError: If ``bits`` or ``library`` is none of those, or the library has no such bits. Before training, if
            such an optimizer has weights that are not float32, or the library cannot step it.
        ModuleNotFoundError: In ``setup``, if the library is not installed.
        MisconfigurationException: In ``setup``, if the Trainer is one of ``pytorch_lightning``, has another of these or
            ``MomentsInBF16``, FSDP1, DeepSpeed or another ``host_state``. Before training, if no optimizer has such
            moments.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import LowBitOptimizer
        >>> trainer = pl.Trainer(callbacks=[LowBitOptimizer(bits=8)], logger=False)
    """

    def __init__(self, bits: Literal[8, 4] = 8, library: Library = "own") -> None:
        if bits not in (8, 4) or isinstance(bits, bool):
            raise ValueError(f"LowBitOptimizer(bits) must be 8 or 4, got {bits!r}.")
        if library not in get_args(Library):
            named = ", ".join(map(repr, get_args(Library)))
            raise ValueError(f"LowBitOptimizer(library) must be one of {named}, got {library!r}.")
        if library == "bitsandbytes" and bits == 4:
            raise ValueError(
                "LowBitOptimizer(library='bitsandbytes') has states of 8 bits only, got bits=4: use bits=8, or "
                "library='own' or 'torchao'."
            )
        super().__init__("8bit" if bits == 8 else "4bit", library)
