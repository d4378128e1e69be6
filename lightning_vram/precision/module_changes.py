"""What the plugin changes on a module, from the time before it is wrapped until the run ends."""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_vram.core.layers.patterns import LayerPattern
from lightning_vram.core.layers.selection import select_layers
from lightning_vram.core.surgery.class_swap import Swaps, has_own_forward, plain_class_forward
from lightning_vram.core.surgery.held_setting import compiled_backward_without_autocast
from lightning_vram.core.surgery.shadow import Shadow
from lightning_vram.core.tensors.nests import cast_where
from lightning_vram.optimizers.lean import LeanParameters, iterate_computing, refuse_lost_updates
from lightning_vram.private_names.torch.compiled import COMPILED_PART
from lightning_vram.private_names.torch.modules import NormBase
from lightning_vram.techniques.mixed_precision import Float32Islands, WeightCasts, keep_norms_low, run_in_fp32
from lightning_vram.techniques.quantize_frozen_weights import read_weights_as


class CallsBetweenSteps(Swaps):
    """Runs calls of a module and its direct children between steps under autocast, until :meth:`remove`."""

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__("_lightning_vram_between_steps")
        self.device_type, self.dtype = device_type, dtype
        self.is_in_step = False
        with self.all_or_none():
            for part in (module, *module.children()):
                is_called = plain_class_forward(part) is not nn.Module.forward or has_own_forward(part)
                if is_called and not isinstance(part, torch.jit.ScriptModule):
                    self.add(part, self, _forward_between_steps)

    @contextmanager
    def in_step(self) -> Generator[None, None, None]:
        """While a step controls autocast itself."""
        outer, self.is_in_step = self.is_in_step, True
        try:
            yield
        finally:
            self.is_in_step = outer


def _forward_between_steps(
    module: nn.Module, calls: CallsBetweenSteps, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``module.forward``, which is ``forward``."""
    if calls.is_in_step or torch.is_autocast_enabled(calls.device_type):
        return forward(*args, **kwargs)
    with torch.autocast(calls.device_type, dtype=calls.dtype, cache_enabled=False):
        output = forward(*args, **kwargs)
    return cast_where(lambda leaf: isinstance(leaf, Tensor) and leaf.dtype == calls.dtype, torch.float32, output)


@dataclass(frozen=True)
class Settings:
    """Arguments of the plugin that change the module."""

    fp32_modules: tuple[LayerPattern, ...] = ()
    low_precision_norms: bool = False  # whether outputs of norms stay in 16 bits
    recast_in_backward: bool = False  # whether weights are cast again in the backward
    parameters: str = "fp32"  # how they are stored
    check_updates: bool = False  # whether to count lost updates

    @property
    def is_lean(self) -> bool:
        """Whether parameters are stored in 16 bits."""
        return self.parameters != "fp32"


@dataclass
class ModuleChanges:
    """All changes of a module, with their undo. If one of them cannot be made, nothing is changed."""

    module: pl.LightningModule
    device_type: str
    settings: Settings
    is_training: bool  # otherwise only what changes results is done
    lean: LeanParameters | None = None
    calls: CallsBetweenSteps | None = None
    _islands: Float32Islands = field(init=False)
    _island_names: dict[nn.Module, str] = field(init=False)
    _inside: set[nn.Module] = field(init=False)  # the islands, and what is in them
    _undo: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        with ExitStack() as undo:
            islands = _find_islands(self.module, self.settings.fp32_modules)
            self._islands, self._island_names = run_in_fp32(islands, self.device_type), islands
            undo.callback(self._islands.remove)
            self._inside = {part for island in islands for part in island.modules()}
            if self.settings.low_precision_norms:
                undo.callback(keep_norms_low(self.module, self.device_type, skip=self._inside).remove)
            if self.is_training and self.settings.is_lean:
                parameters = _lean_parameters(self.module, self._inside)
                self.lean = LeanParameters(parameters, self.settings.parameters, self._named_parameters())
                undo.callback(self.lean.restore)
                undo.callback(read_weights_as(self.module, torch.bfloat16, skip=self._inside))
                self.calls = CallsBetweenSteps(self.module, self.device_type, torch.bfloat16)
                undo.callback(self.calls.remove)
            if self.is_training:
                undo.enter_context(compiled_backward_without_autocast())
            self._undo = undo.pop_all()

    @property
    def idle_islands(self) -> list[str]:
        """Names of ``fp32_modules`` whose ``forward`` was not called so far: nothing of them is in float32."""
        return [self._island_names[module] for module in self._islands.idle]

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Let ``optimizers`` step the stored weights, or refuse those that cannot."""
        lean = self.lean
        if lean is None:
            refuse_lost_updates(optimizers)
        else:
            lean.attach(optimizers)
            self._broadcast_rests(lean)
            # The one place from which all checkpoints get weights, those of weights alone included.
            strategy, name = self.module.trainer.strategy, "lightning_module_state_dict"
            self._undo.callback(Shadow(strategy, name, lambda inner: lambda: lean.full_state(inner())).remove)
        # Swap classes only now: code that selects layers by their type has made its parameter groups.
        casts = WeightCasts(
            self.module, self.device_type, recast_in_backward=self.settings.recast_in_backward, skip=self._inside
        )
        self._undo.callback(casts.remove)
        # Of all optimizers: some are made in the midst of training, and steps do not all pass the plugin.
        hook = register_optimizer_step_post_hook(partial(_after_any_step, ref(casts)))
        self._undo.callback(hook.remove)

    def load_weights(self, state_dict: Mapping[str, Any]) -> None:
        """Load weights of a checkpoint exactly, which were rounded on loading. Weights changed by user code stay."""
        if self.lean is None:
            return
        named = self._named_parameters()
        lean = {name: parameter for name, parameter in named.items() if parameter.dtype is torch.bfloat16}
        found = {parameter: state_dict[name] for name, parameter in lean.items() if name in state_dict}
        self.lean.take({parameter: value for parameter, value in found.items() if _is_rounded(value, parameter)})

    def remove(self) -> None:
        """Undo all. Calling it again does nothing."""
        self._undo.close()

    def _broadcast_rests(self, lean: LeanParameters) -> None:
        """Give all replicas the exact weights of the first, of which DDP has broadcast the bfloat16 half."""
        trainer = self.module.trainer
        if trainer.world_size == 1:
            return
        for rest in lean.rests():
            on_device = rest.to(trainer.strategy.root_device)
            torch.distributed.broadcast(on_device.view(torch.uint8), 0)  # not all backends know all integers
            rest.copy_(on_device)

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters(remove_duplicate=False))


def _is_rounded(value: Tensor, parameter: Tensor) -> bool:
    """Whether ``parameter`` holds ``value``, but for the rounding to bfloat16."""
    if value.shape != parameter.shape:
        return False
    present = parameter.detach().float()
    exact = value.to(present)
    return torch.allclose(present, exact, rtol=torch.finfo(torch.bfloat16).eps, atol=0.0, equal_nan=True)


def _after_any_step(casts: "ref[WeightCasts]", optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    living = casts()
    if living is not None:  # parameters without a gradient were not stepped
        living.after_step(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def _find_islands(module: nn.Module, patterns: Sequence[LayerPattern]) -> dict[nn.Module, str]:
    """All that match, with their names. Those inside others count as well: the others may never be called."""
    if not patterns:
        return {}
    try:
        selection = select_layers(module, patterns)
    except ValueError as error:
        message = str(error).replace("layers=", "fp32_modules=", 1)
        raise ValueError(f"LeanMixedPrecision: {message}") from None
    # What is compiled has two names; the second is that of what was compiled.
    parts = {
        ".".join(part for part in name.split(".") if part != COMPILED_PART): module
        for name, module in module.named_modules(remove_duplicate=False)
    }
    found = {layer.module: layer.name for layer in selection.layers}
    return found | {parts[name]: name for name in reversed(selection.nested)}


def _lean_parameters(module: nn.Module, islands: Collection[nn.Module]) -> list[nn.Parameter]:
    """All but those of fp32 islands, computed weights, and kernels that need float32; bf16 ones are never exempt."""
    exempt = {*islands, *(part for part in module.modules() if _is_norm(part)), *iterate_computing(module)}
    in_float32 = {parameter for part in exempt for parameter in part.parameters(recurse=False)}
    return [p for p in module.parameters() if p not in in_float32 or p.dtype is torch.bfloat16]


def _is_norm(module: nn.Module) -> bool:
    kinds = (NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.Bilinear)
    return isinstance(module, kinds) or type(module).__name__.endswith("Norm")
