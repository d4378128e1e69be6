"""QLoRA: weights of frozen layers in 8 or 4 bits, a quarter or a seventh of their float32 memory."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_choice, check_kind
from lightning_vram.callbacks.hook_points import FitTechnique, refuse_moved_parameters, refuse_several
from lightning_vram.core.layers import LayerPattern, check_layers
from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.memory.units import format_bytes
from lightning_vram.private_names import fsdp2
from lightning_vram.private_names.lightning import refuse_callbacks, saves_folders
from lightning_vram.techniques.quantize_frozen_weights import (
    MIN_BLOCK_SIZE,
    Library,
    QuantizedLayers,
    quantize_frozen_weights,
    quantized_weight,
)
from lightning_vram.techniques.sharding import has_meta, materialize


def _frozen_names(module: nn.Module) -> set[str]:
    return {name for name, one in module.named_parameters(remove_duplicate=False) if not one.requires_grad}


def _fit_checkpoint(given: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return weights of a checkpoint in the format that the module has."""
    own, frozen = module.state_dict(), _frozen_names(module)
    if frozen and frozen.isdisjoint(given):  # it was saved without
        # a module may leave them out of its state_dict, and have strict_loading=False
        kept = {name: own[name] for name in frozen & own.keys()}
        whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in kept.items()}
        return {**given, **whole}
    full = {name: given[name] for name in _full_precision_names(given, own)}
    if full:
        module.load_state_dict(full, strict=False)  # into what ``own`` shares
    return {**given, **{name: own[name] for name in full}}


def _full_precision_names(given: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Names of weights that are quantized here, and not in the checkpoint."""
    packed = {name for name, value in own.items() if isinstance(value, Tensor) and value.dtype is torch.uint8}
    return [name for name, value in given.items() if name in packed and value.is_floating_point()]


_NAME, _SEED = "QuantizeFrozenWeights", 0
_REFUSED = {
    "BaseFinetuning": "unfreezes layers: a quantized weight cannot be trained",
    "WeightAveraging": "cannot average quantized weights",
    "StochasticWeightAveraging": "cannot average quantized weights",
}


class QuantizeFrozenWeights(FitTechnique):
    """Store weights of frozen Linear, Conv, Embedding layers and transformers' ``Conv1D`` as int8 or NF4 during a run.

    Other names: QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), 4-bit base weights, weight-only
    quantization. Trainable weights, such as adapters of ``peft``, norms, biases and small weights are not quantized.
    Forward and backward are bitwise those of a module with the dequantized weights. Runs on one device, under DDP,
    FSDP2 and ``fsdp_offload``.

    Load the model in any floating-point dtype: bf16 halves the host memory of loading. Weights are quantized when the
    module is complete (after ``configure_model``), one at a time, on the device, before the module moves there. Layers
    on the meta device are materialized and quantized one after the other.

    Full-precision checkpoints can be loaded before and after quantization, layer by layer. Parameters keep their names;
    in checkpoints of the run they are ``uint8`` tensors. A resumed run is exact.

    Under ``ModelParallelStrategy`` weights are quantized before ``configure_model`` shards them, and stay quantized
    after the run. If ``configure_model`` builds the layers, call ``quantize_frozen_weights`` there, before
    ``fully_shard``.

    Args:
        bits: 8 (evenly spaced levels) or 4 (NF4).
        layers: ``"auto"``: all frozen layers with 4096 weights or more. Otherwise class names, module names, globs or
            classes: these layers, and frozen layers inside them.
        block_size: Number of weights that share a float32 scale: a power of two from 16 to 4096.
        save: ``"all"``, or ``"trainable"``: checkpoints without frozen parameters. A resumed run must then load the
            base weights from the same source.
        keep: ``True`` leaves the weights quantized after the run, until ``dequantize_frozen_weights(model)``. ``False``
            dequantizes them on the host, layer by layer, which takes their full memory there.
        library: Whose kernels dequantize: ``"own"``; ``"bitsandbytes"`` (extra ``lowbit``, ``block_size`` of 32 or
            more); ``"auto"``: bitsandbytes if installed, on CUDA and with 4 bits on the CPU. All share one storage
            format and checkpoints; on the CPU their results are bitwise identical.

    Raises:
        TypeError: If an argument has the wrong type.
        ModuleNotFoundError: In ``setup``, if the library is not installed.
        ValueError: If an argument has an invalid value. Before training, if ``layers`` matches a layer that cannot be
            quantized.
        RuntimeError: Before training, if a checkpoint has weights with another ``bits`` or ``block_size``.
        MisconfigurationException: In ``setup``, if the Trainer comes from ``pytorch_lightning``, has a second
            ``QuantizeFrozenWeights`` or a callback that unfreezes or averages weights, uses FSDP1 or DeepSpeed, or,
            with ``save="trainable"``, a strategy that saves sharded checkpoints.

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
        check_layers("QuantizeFrozenWeights(layers)", layers)
        for argument, value, allowed, numbers in (
            ("bits", bits, "8 or 4", (8, 4)),
            ("block_size", block_size, "a power of two from 16 to 4096", [2**power for power in range(4, 13)]),
        ):
            check_kind(f"QuantizeFrozenWeights({argument})", value, int, allowed)
            if value not in numbers:
                raise ValueError(f"QuantizeFrozenWeights({argument}) must be {allowed}, got {value}.")
        check_choice("QuantizeFrozenWeights(save)", save, ("all", "trainable"))
        check_bool("QuantizeFrozenWeights(keep)", keep)
        check_choice("QuantizeFrozenWeights(library)", library, get_args(Library))
        if library == "bitsandbytes" and block_size < MIN_BLOCK_SIZE:
            raise ValueError(
                f"{_NAME}(library='bitsandbytes') needs block_size={MIN_BLOCK_SIZE} or more, got {block_size}."
            )
        self.bits, self.layers, self.block_size = bits, layers, block_size
        self.save, self.keep, self.library = save, keep, library
        self._quantized: QuantizedLayers | None = None
        self._patches: list[MethodPatch] = []  # of loading and saving

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        if self.library == "bitsandbytes":
            import_module(self.library)  # now, not in the first forward
        refuse_moved_parameters(_NAME, trainer, "quantized weights belong to")
        strategy: Any = trainer.strategy
        if hasattr(type(strategy), "device_mesh") and not fsdp2.shards_integers:  # ModelParallelStrategy, fsdp_offload
            raise MisconfigurationException(
                f"{_NAME} with {type(strategy).__name__} needs torch >= 2.13, got {torch.__version__}, whose FSDP2 "
                "shards no integers: use 'ddp' or a single device."
            )
        is_parallel, ours = isinstance(strategy, ModelParallelStrategy), getattr(strategy, "arguments", None)
        is_folder = saves_folders(strategy) if is_parallel else getattr(ours, "state_dict_type", "full") == "sharded"
        if self.save == "trainable" and is_folder:
            raise MisconfigurationException(
                f"{_NAME}(save='trainable') does not work with sharded checkpoints, which need all parameters: save "
                "full ones, or use save='all'."
            )
        refuse_several(trainer, type(self), f"Two {_NAME} in one Trainer: leave one out.")
        refuse_callbacks(_NAME, trainer, _REFUSED)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if isinstance(trainer.strategy, ModelParallelStrategy) and next(pl_module.parameters(), None) is not None:
            self._quantize(trainer)  # configure_model shards
        replaced: dict[str, Callable[..., Any]] = {"load_model_state_dict": self._load}
        if isinstance(trainer.strategy, ModelParallelStrategy):
            replaced["load_checkpoint"] = self._load_into_shards
        if self.save == "trainable":
            replaced["lightning_module_state_dict"] = self._without_frozen
        for name, run in replaced.items():
            self._patches.append(MethodPatch(trainer.strategy, name, partial(partial, run, trainer)))

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        if isinstance(trainer.strategy, ModelParallelStrategy) and has_meta(module):
            raise MisconfigurationException(
                f"{_NAME} does not work with {type(trainer.strategy).__name__} where configure_model leaves layers on "
                "the meta device: Lightning would empty the quantized ones, too. Make them on the host, or in "
                "__init__, or use strategy='fsdp_offload'."
            )
        self._quantize(trainer)
        assert self._quantized is not None
        # FSDP2 is to shard quantized weights by their bytes, and to read them in the dtype that it casts to.
        groups = (group for part in filter(fsdp2.is_sharded, module.modules()) for group in fsdp2.groups_of(part))
        for group, parameter in ((one, parameter) for one in groups for parameter in one.fsdp_params):
            fsdp2.look_past_attribute(parameter)
            weight = quantized_weight(fsdp2.place_of(parameter)[0])
            if weight is not None:
                weight.form.read_as = fsdp2.dtype_to_compute(group, parameter)
        _report(self._quantized, module, is_fit=trainer.training)

    def _quantize(self, trainer: pl.Trainer) -> None:
        """Quantize the layers that exist and are not quantized yet."""
        module: Any = trainer.lightning_module

        def give_memory(part: nn.Module) -> None:
            materialize(part, seed=_SEED, model=module, uninitialized_ok=trainer.ckpt_path is not None)

        self._quantized = quantize_frozen_weights(
            module,
            self.bits,
            self.block_size,
            self.layers,
            library=self.library,
            give_memory=give_memory,
            device=trainer.strategy.root_device,
        )
        if has_meta(module) and not hasattr(trainer.strategy, "moments"):  # fsdp_offload does it shard by shard
            give_memory(module)

    def _load(
        self, trainer: pl.Trainer, load: Callable[..., None], checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        self._quantize(trainer)  # a checkpoint is loaded before the strategy is set up
        if "state_dict" in checkpoint:  # else the strategy reads it where it is
            checkpoint = {
                **checkpoint,
                "state_dict": _fit_checkpoint(checkpoint["state_dict"], trainer.lightning_module),
            }
        load(checkpoint, *args, **kwargs)

    def _load_into_shards(
        self, trainer: pl.Trainer, load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Read a file as ModelParallelStrategy does, parameter by parameter."""
        module = trainer.lightning_module
        if not Path(path).is_file():
            return load(path, *args, **kwargs)
        own, frozen, strict = module.state_dict(), _frozen_names(module), module.strict_loading
        given = torch.load(path, mmap=True, map_location="cpu", weights_only=kwargs.get("weights_only"))["state_dict"]
        for name in _full_precision_names(given, own):
            raise ValueError(
                f"the checkpoint has {name} in full precision, and {type(trainer.strategy).__name__} would load "
                "it into quantized shards: load it in __init__, or use strategy='fsdp_offload'."
            )
        if frozen.isdisjoint(given) and own.keys() - frozen == given.keys():  # it was saved without
            module.strict_loading = False
        try:
            return load(path, *args, **kwargs)
        finally:
            module.strict_loading = strict

    def _without_frozen(self, trainer: pl.Trainer, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        frozen = _frozen_names(trainer.lightning_module)
        return {name: value for name, value in state_dict().items() if name not in frozen}

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._quantized is None or not any(weight.is_sharded for weight in self._quantized.weights()):
            super().on_exception(trainer, pl_module, exception)
            return

        def teardown() -> None:  # of the strategy, which makes the module whole
            shadow.remove()
            trainer.strategy.teardown()
            self._undo()

        shadow = MethodPatch(trainer.strategy, "teardown", replace_by(teardown))

    @override
    def _undo(self) -> None:
        quantized, self._quantized = self._quantized, None
        while self._patches:
            self._patches.pop().remove()
        if quantized is not None and not self.keep:
            quantized.remove()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_quantized": None, "_patches": []}  # a copy is not part of any run


def _report(quantized: QuantizedLayers, module: nn.Module, *, is_fit: bool) -> None:
    weights = list(quantized.weights())
    if weights:
        before = sum(weight.form.shape.numel() * weight.form.dtype.itemsize for weight in weights)
        now = sum(weight.packed.nbytes for weight in weights)
        rank_zero_info(
            f"QuantizeFrozenWeights keeps {len(weights)} frozen weights in {weights[0].form.packing.bits} bits: "
            f"{format_bytes(now)} instead of {format_bytes(before)}."
        )
    elif is_fit:
        rank_zero_warn(
            f"QuantizeFrozenWeights does nothing: {type(module).__name__} has no frozen Linear, Conv or Embedding with "
            "4096 weights or more. Freeze with requires_grad_(False) in __init__, setup or configure_model."
        )
