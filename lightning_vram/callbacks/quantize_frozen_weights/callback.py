"""Keep the weights of frozen layers in 8 or 4 bits: a quarter or a seventh of what they take in float32.

In fine-tuning of adapters most weights are frozen, and they are most of the memory. A layer decodes its weight for the
call and again in the backward, so nothing of it is kept in between. It costs decoding twice, and an error of the
weights, which the adapters train with. It does not help where weights are trained.
"""

from collections.abc import Container, Sequence
from functools import partial
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from rich.progress import track
from torch import nn
from typing_extensions import override

from lightning_vram.argument_checks import check_bool
from lightning_vram.callbacks.hook_points import FitTechnique, refuse_moved_parameters
from lightning_vram.callbacks.quantize_frozen_weights.checkpoints import Checkpoints
from lightning_vram.core.layers.patterns import LayerPattern, check_layers
from lightning_vram.core.surgery.shadow import Shadow, instead
from lightning_vram.memory.units import format_bytes
from lightning_vram.private_names.fsdp2.states import (
    dtype_to_compute,
    groups_of,
    is_sharded,
    look_past_attribute,
    place_of,
    shards_integers,
)
from lightning_vram.private_names.lightning.strategies import saves_folders
from lightning_vram.techniques.quantize_frozen_weights import (
    MIN_BLOCK_SIZE,
    Library,
    QuantizedLayers,
    quantize_frozen_weights,
    quantized_weight,
    why_not_installed,
)
from lightning_vram.techniques.sharding import has_meta, materialize

_NAME, _SEED = "QuantizeFrozenWeights", 0


class QuantizeFrozenWeights(FitTechnique):
    """Keep weights of frozen Linear, Conv, Embedding layers and transformers' ``Conv1D`` as int8 or NF4 during a run.

    What is trained, such as adapters of ``peft``, is left alone, and so are norms, biases and small weights. Forward
    and backward are, to the bit, those of a plain module that has the decoded weights. On one device, under DDP, under
    FSDP2 and under ``fsdp_offload``.
    Other names: QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), weight-only quantization.

    Weights are quantized when the module is complete (after ``configure_model``), on the device, some numbers of one
    weight at a time, before the module moves there; a progress bar shows how far it is. Layers that were built on the
    meta device get their values, and are quantized, one after the other.
    Checkpoints with weights in full precision can be loaded before and after that, layer by layer. A parameter keeps
    its name; in checkpoints of the run it is a plain tensor of bytes, and a resumed run has the same bits.

    Under ``ModelParallelStrategy`` weights are quantized before ``configure_model`` shards them, and stay so after the
    run. What that makes itself needs a call of ``quantize_frozen_weights`` there, before ``fully_shard``.

    Args:
        bits: Of a number: 8 (levels at equal distances) or 4 (NF4).
        layers: ``"auto"``: all that are frozen and have 4096 numbers or more. Else class names, module names, globs
            or classes: these layers, and what is frozen inside them.
        block_size: Neighbours that share a float32 scale: a power of two from 16 to 4096.
        save: ``"all"``, or ``"trainable"``: checkpoints without frozen parameters, which the run that resumes has to
            have from where this one had them.
        keep: Leave the weights quantized after the run, until ``dequantize_frozen_weights(model)``. Else they are
            decoded then, on the host, layer by layer: the module has what it had, up to the error of quantization, in
            as much memory.
        library: Whose kernels decode: ``"own"``; ``"bitsandbytes"``, in extra ``lowbit``, blocks of 32 or more;
            ``"auto"``: the latter where it is installed and faster, on CUDA and with 4 bits on the host. Bytes and
            checkpoints are the same with all, and on the host all numbers are.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ModuleNotFoundError: In ``setup``, if the library is not installed.
        ValueError: If an argument has a value that is not allowed; before training, if ``layers`` names what cannot be
            quantized, or a checkpoint has weights in other blocks.
        MisconfigurationException: In ``setup``, if the Trainer is one of ``pytorch_lightning``, has another of these,
            FSDP1 or DeepSpeed, a callback that unfreezes layers, or, with ``save="trainable"``, a strategy that saves
            folders of shards.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import QuantizeFrozenWeights
        >>> trainer = pl.Trainer(callbacks=[QuantizeFrozenWeights(bits=4)], logger=False)
    """

    _stages = ("fit", "validate", "test", "predict")

    def __init__(
        self,
        bits: Literal[8, 4] = 8,
        layers: LayerPattern | Sequence[LayerPattern] = "auto",
        block_size: int = 64,
        save: Literal["all", "trainable"] = "all",
        keep: bool = False,  # noqa: FBT001, FBT002 - set by name in configuration files
        library: Library = "own",
    ) -> None:
        _check_int("bits", bits, "8 or 4", (8, 4))
        check_layers("QuantizeFrozenWeights(layers)", layers)
        _check_int("block_size", block_size, "a power of two from 16 to 4096", [2**power for power in range(4, 13)])
        if save not in ("all", "trainable"):
            raise ValueError(f"QuantizeFrozenWeights(save) must be 'all' or 'trainable', got {save!r}.")
        check_bool("QuantizeFrozenWeights(keep)", keep)
        _check_library(library, block_size)
        self.bits = bits
        self.layers = layers
        self.block_size = block_size
        self.save = save
        self.keep = keep
        self.library = library
        self._quantized: QuantizedLayers | None = None
        self._checkpoints: Checkpoints | None = None

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        why = why_not_installed(self.library)
        if why is not None:
            raise ModuleNotFoundError(why)
        _check_run(self, trainer, has_frozen=self.save == "all")

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if isinstance(trainer.strategy, ModelParallelStrategy) and next(pl_module.parameters(), None) is not None:
            self._quantize(trainer)  # configure_model shards
        # a checkpoint is loaded before the strategy is set up
        self._checkpoints = Checkpoints(trainer, lambda: self._quantize(trainer), has_frozen=self.save == "all")

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        _check_memory(trainer)
        self._quantize(trainer)
        assert self._quantized is not None
        module = trainer.lightning_module
        for part in filter(is_sharded, module.modules()):
            _fit_shards(part)
        _tell(self._quantized, module, is_fit=trainer.training)

    def _quantize(self, trainer: pl.Trainer) -> None:
        """Quantize what there is and is not yet."""
        module: Any = trainer.lightning_module
        is_loaded = trainer.ckpt_path is not None

        def give_memory(part: nn.Module) -> None:
            materialize(part, seed=_SEED, model=module, uninitialized_ok=is_loaded)

        is_shown = trainer.is_global_zero and trainer.progress_bar_callback is not None
        self._quantized = quantize_frozen_weights(
            module,
            self.bits,
            self.block_size,
            self.layers,
            library=self.library,
            give_memory=give_memory,
            device=trainer.strategy.root_device,
            follow=partial(track, description="Quantizing frozen weights", transient=True, disable=not is_shown),
        )
        if has_meta(module) and not hasattr(trainer.strategy, "moments"):  # fsdp_offload does it shard by shard
            give_memory(module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._quantized is None or not any(weight.is_sharded for weight in self._quantized.weights()):
            super().on_exception(trainer, pl_module, exception)
            return

        def teardown() -> None:  # of the strategy, which makes the module whole
            shadow.remove()
            trainer.strategy.teardown()
            self._undo()

        shadow = Shadow(trainer.strategy, "teardown", instead(teardown))

    @override
    def _undo(self) -> None:
        quantized, self._quantized = self._quantized, None
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            checkpoints.remove()
        if quantized is not None and not self.keep:
            quantized.remove()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_quantized": None, "_checkpoints": None}  # a copy is not part of any run


def _fit_shards(part: nn.Module) -> None:
    """Let FSDP2 shard quantized weights of ``part`` by their bytes, and be them what it casts plain ones to."""
    for group in groups_of(part):
        for parameter in group.fsdp_params:
            look_past_attribute(parameter)
            weight = quantized_weight(place_of(parameter)[0])
            if weight is not None:
                weight.form.read_as = dtype_to_compute(group, parameter)


def _tell(quantized: QuantizedLayers, module: nn.Module, *, is_fit: bool) -> None:
    weights = list(quantized.weights())
    if weights:
        before = sum(weight.form.shape.numel() * weight.form.dtype.itemsize for weight in weights)
        now = sum(weight.packed.nbytes for weight in weights)
        rank_zero_info(
            f"QuantizeFrozenWeights keeps {len(weights)} frozen weights in {weights[0].form.packing.bits} bits: "
            f"{format_bytes(now)} in place of {format_bytes(before)}."
        )
    elif is_fit:
        rank_zero_warn(
            f"QuantizeFrozenWeights does nothing: {type(module).__name__} has no frozen Linear, Conv or Embedding with "
            "4096 weights or more. Freeze with requires_grad_(False) in __init__, setup or configure_model."
        )


def _check_int(argument: str, value: object, allowed: str, numbers: Container[int]) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{_NAME}({argument}) must be {allowed}, got {value!r} of type {type(value).__name__}.")
    if value not in numbers:
        raise ValueError(f"{_NAME}({argument}) must be {allowed}, got {value}.")


def _check_library(library: object, block_size: int) -> None:
    if library not in get_args(Library):
        named = ", ".join(map(repr, get_args(Library)))
        raise ValueError(f"QuantizeFrozenWeights(library) must be one of {named}, got {library!r}.")
    if library == "bitsandbytes" and block_size < MIN_BLOCK_SIZE:
        raise ValueError(
            f"QuantizeFrozenWeights(library='bitsandbytes') has blocks of {MIN_BLOCK_SIZE} or more, got "
            f"block_size={block_size}: use block_size={MIN_BLOCK_SIZE}, or library='own'."
        )


def _check_run(callback: Callback, trainer: pl.Trainer, *, has_frozen: bool) -> None:
    """Refuse what cannot work, before anything of the run happens.

    Args:
        callback: Of ours.
        trainer: In its ``setup`` hooks.
        has_frozen: Whether checkpoints have what is frozen.

    Raises:
        MisconfigurationException: With the reason and the way out.
    """
    refuse_moved_parameters(_NAME, trainer, "quantized weights are decoded from")
    strategy = type(trainer.strategy)
    if hasattr(strategy, "device_mesh") and not shards_integers:  # ModelParallelStrategy, fsdp_offload
        raise MisconfigurationException(
            f"{_NAME} with {strategy.__name__} needs torch >= 2.13, got {torch.__version__}, whose FSDP2 shards no "
            "integers: use 'ddp' or a single device."
        )
    whole_files = None if has_frozen else _how_to_save_whole(trainer.strategy)
    if whole_files is not None:
        raise MisconfigurationException(
            f"{_NAME}(save='trainable') does not work with folders of shards, which load by the names that the module "
            f"has: use {whole_files}, whose files are small without what is frozen, or save='all'."
        )
    for other in trainer.callbacks:  # type: ignore[attr-defined]
        if type(other) is type(callback) and other is not callback:
            raise MisconfigurationException(f"Two {_NAME} in one Trainer: leave one out.")
        if isinstance(other, BaseFinetuning):
            raise MisconfigurationException(
                f"{_NAME} does not work with {type(other).__name__}, which unfreezes layers: a quantized weight cannot "
                "be trained. Leave one out."
            )
        if isinstance(other, WeightAveraging | StochasticWeightAveraging):
            raise MisconfigurationException(
                f"{_NAME} does not work with {type(other).__name__}, which averages all parameters, bytes too. Leave "
                "one out."
            )


def _check_memory(trainer: pl.Trainer) -> None:
    """Refuse meta layers of ``configure_model`` where Lightning empties all layers to give these memory.

    Raises:
        MisconfigurationException: If there are some.
    """
    if isinstance(trainer.strategy, ModelParallelStrategy) and has_meta(trainer.lightning_module):
        raise MisconfigurationException(
            f"{_NAME} does not work with {type(trainer.strategy).__name__} where configure_model leaves layers on the "
            "meta device: Lightning would empty the quantized ones, too. Make them on the host, or in __init__, or use "
            "strategy='fsdp_offload'."
        )


def _how_to_save_whole(strategy: Strategy) -> str | None:
    """What to set if the strategy saves folders; ``None``: it does not."""
    if isinstance(strategy, ModelParallelStrategy):
        return f"{type(strategy).__name__}(save_distributed_checkpoint=False)" if saves_folders(strategy) else None
    arguments = getattr(strategy, "arguments", None)  # of fsdp_offload
    is_folder = getattr(arguments, "state_dict_type", "full") == "sharded"
    return f"{type(strategy).__name__}(state_dict_type='full')" if is_folder else None
