"""Ways to train with parts of this package, as a plain loop goes them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Literal

from torch import nn
from torch.optim import AdamW, Optimizer

from lightning_vram.optimizers.in_backward import BackwardSteps, Clipping
from lightning_vram.optimizers.low_precision import LowPrecisionMoments
from lightning_vram.optimizers.moment_forms import FORMS, HostState
from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing
from lightning_vram.techniques.activation_checkpointing.budget import BudgetedCheckpointing
from lightning_vram.techniques.activation_checkpointing.budget_solver import BudgetError
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_compression.stage import CompressionStage
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation
from lightning_vram.techniques.quantization_aware_training import apply_fake_quantization
from lightning_vram.techniques.quantize_frozen_weights import quantize_frozen_weights
from lightning_vram.techniques.token_tiling import apply_token_tiling
from tests.benchmarks.peers import pytorch
from tests.benchmarks.ways import PLAIN, Way


class Budget:
    """Checkpoints to a share of the plain peak: the first forward is watched, the others run by the plan."""

    def __init__(self, model: nn.Module, share: float) -> None:
        self._model = model
        self._share = share
        self._handle = apply_activation_checkpointing(model)
        self._is_planned = False
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if not self._is_planned:
            self._stack.enter_context(self._planning())

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def _planning(self) -> Iterator[None]:
        watched = BudgetedCheckpointing(self._model, self._handle, 1 << 62)
        with watched.observing():
            yield
        watched.budget_bytes = int(self._share * watched.plan().plain_peak_bytes)
        try:
            watched.apply(watched.plan().decisions)
        except BudgetError:
            watched.apply({})  # everything checkpointed
        self._is_planned = True


class _Several:
    """Contexts as one, entered again for each forward."""

    def __init__(self, *contexts: AbstractContextManager[object]) -> None:
        self._contexts = contexts
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _offload(model: nn.Module, **arguments: object) -> ActivationOffloading:
    return ActivationOffloading(model, min_offload_bytes=64 * 1024, **arguments)


def _checkpoint_and_offload(model: nn.Module, save: SavePolicy | None = None) -> ActivationOffloading:
    apply_activation_checkpointing(model, save=save)
    return _offload(model)


def _fuse_and_offload(model: nn.Module) -> _Several:
    return _Several(_offload(model), Recomputation(model))


def _checkpoint_and_tile(model: nn.Module) -> None:
    apply_activation_checkpointing(model)
    apply_token_tiling(model, tile=128)


def freeze_layers(model: nn.Module) -> None:
    """Leave norms and biases to be trained."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)


def _quantize(model: nn.Module, bits: Literal[8, 4]) -> None:
    freeze_layers(model)
    quantize_frozen_weights(model, bits)


def _checkpoint_and_quantize(model: nn.Module) -> None:
    quantize_frozen_weights(model, 4)
    apply_activation_checkpointing(model)


def _round(model: nn.Module) -> None:
    apply_fake_quantization(model).is_on = True


def _adamw_with(form: HostState, parameters: Iterable[nn.Parameter]) -> Optimizer:
    held = nn.ParameterList(parameters)
    optimizer = AdamW(held, lr=1e-4)
    LowPrecisionMoments(held, FORMS[form]).attach([optimizer])
    return optimizer


def _adamw_in_backward(parameters: Iterable[nn.Parameter]) -> Optimizer:
    held = nn.ParameterList(parameters)
    optimizer = AdamW(held, lr=1e-4)
    BackwardSteps(held, Clipping()).attach([optimizer])
    return optimizer


_EVERY_2ND = SavePolicy("matmuls", 2)
_CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "InPlaceFusion()": Recomputation,
    "ActivationCheckpointing()": apply_activation_checkpointing,
    "ActivationCheckpointing(every_n_layers=2)": partial(apply_activation_checkpointing, every_n_layers=2),
    'ActivationCheckpointing(save="matmuls")': partial(apply_activation_checkpointing, save=SavePolicy("matmuls")),
    'ActivationCheckpointing(save=SavePolicy("matmuls", 2))': partial(apply_activation_checkpointing, save=_EVERY_2ND),
    "ActivationCheckpointing(budget=...), 0.75 of plain": partial(Budget, share=0.75),
    "ActivationCheckpointing(budget=...), 0.5 of plain": partial(Budget, share=0.5),
    "ActivationCheckpointing(budget=...), 0.3 of plain": partial(Budget, share=0.3),
    'ActivationOffload("64KiB")': _offload,
    'ActivationCheckpointing(), ActivationOffload("64KiB")': _checkpoint_and_offload,
    'ActivationCheckpointing(save="matmuls"), ActivationOffload("64KiB")': partial(
        _checkpoint_and_offload, save=SavePolicy("matmuls")
    ),
    'InPlaceFusion(), ActivationOffload("64KiB")': _fuse_and_offload,
    "ActivationCheckpointing(), TokenTiling(tile=128)": _checkpoint_and_tile,
    "ActivationCompression()": CompressionStage,
    'ActivationCompression(lossy="int8")': partial(CompressionStage, lossy="int8"),
    "frozen layers": freeze_layers,
    "QuantizeFrozenWeights(bits=8), frozen layers": partial(_quantize, bits=8),
    "QuantizeFrozenWeights(bits=4), frozen layers": partial(_quantize, bits=4),
    "QuantizationAwareTraining()": _round,
}
OURS = (
    *(Way(name, "PyTorch" if change is freeze_layers else "ours", change) for name, change in _CHANGES.items()),
    Way("MomentsInBF16()", "ours", make_optimizer=partial(_adamw_with, "bf16")),
    Way("LowBitOptimizer(bits=8)", "ours", make_optimizer=partial(_adamw_with, "8bit")),
    Way("LowBitOptimizer(bits=4)", "ours", make_optimizer=partial(_adamw_with, "4bit")),
    Way("OptimizerInBackward()", "ours", make_optimizer=_adamw_in_backward, steps_in_backward=True),
    Way(
        "ActivationCheckpointing(), OptimizerInBackward()",
        "ours",
        apply_activation_checkpointing,
        _adamw_in_backward,
        steps_in_backward=True,
    ),
)
"""Names are what a Trainer would have among its callbacks."""

FROZEN = (
    Way("QuantizeFrozenWeights(bits=8)", "ours", partial(quantize_frozen_weights, bits=8)),
    Way("QuantizeFrozenWeights(bits=4)", "ours", partial(quantize_frozen_weights, bits=4)),
    Way("QuantizeFrozenWeights(bits=4), ActivationCheckpointing()", "ours", _checkpoint_and_quantize),
)
"""Of workloads that train adapters alone."""


def find_way(name: str) -> Way:
    """Return plain, one of ours, or one of PyTorch's ways, by its name."""
    return {way.name: way for way in (PLAIN, *OURS, *pytorch.ACTIVATIONS, *pytorch.COMPILED)}[name]
