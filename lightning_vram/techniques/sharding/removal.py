"""Undo FSDP2 on a module, or reset it after a failed iteration: PyTorch has nothing, or not enough, for it."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.tensors.properties import WHOLE_LAYOUT, sharded_modules, stored_as
from lightning_vram.private_names.fsdp2 import (
    MARKS,
    can_reset,
    discard_step,
    groups_of,
    is_root,
    place_of,
    put_back,
)
from lightning_vram.private_names.torch import ConvBase, local_shard_of, own_buffers, own_parameters
from lightning_vram.techniques.sharding.group import ShardedGroup

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the dimensions of a weight


class ReleasedParameter(nn.Parameter):
    """Class of a parameter while its shard replaces it: it has no values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: most computations accept an empty tensor without an error."""
        raise RuntimeError(
            "A parameter stored before the module was sharded is empty now. Read it from the module when you need "
            "it, for example self.layer.weight, instead of from a list made earlier."
        )


class WholeParameters:
    """The parameters of a module before sharding, to restore them."""

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        self.can_restore = not any(p.is_meta for p in module.parameters())
        self._marks = [(part, set(vars(part))) for part in parts]
        self._places = [(part, key, p) for part in parts for key, p in own_parameters(part).items() if p is not None]
        self._originals = {(id(part), key): p for part, key, p in self._places}
        self.shards: dict[nn.Parameter, nn.Parameter] = {}
        self._classes: dict[int, type] = {}
        self._hooks: list[RemovableHandle] = []
        self._as_was = {id(p): (p.device, p.shape, p.stride()) for _, _, p in self._places}
        buffers = [(part, key, b) for part in parts for key, b in own_buffers(part).items() if b is not None]
        self._buffers = [(part, key, buffer.device) for part, key, buffer in buffers]

    @torch.no_grad()
    def make_contiguous(self, modules: Iterable[nn.Module]) -> None:
        """Make parameters of ``modules`` contiguous, as FSDP2 needs them.

        Convolutions run in ``channels_last`` if weight or input is: a hook converts the input.
        """
        for part in {part: None for module in modules for part in module.modules()}:
            for key, parameter in own_parameters(part).items():
                if parameter is None or id(parameter) not in self._as_was:
                    continue
                _, shape, stride = self._as_was[id(parameter)]
                is_last = len(shape) in _CHANNELS_LAST and stride[1] == 1 != stride[0] and stride[-1] == shape[1]
                if is_last and key == "weight" and isinstance(part, ConvBase):
                    arrange = partial(_arrange, _CHANNELS_LAST[len(shape)])
                    self._hooks.append(part.register_forward_pre_hook(arrange))
                if not parameter.is_contiguous():
                    parameter.data = parameter.data.contiguous()

    def release(self, modules: Iterable[nn.Module]) -> None:
        """Free the memory of sharded parameters; the objects stay."""
        for part in (part for module in modules for part in module.modules()):
            for key, now in own_parameters(part).items():
                original = self._originals.get((id(part), key))
                if original is None or now is None or now is original or original in self.shards:
                    continue
                _hand_over(original, now)
                _, shape, stride = self._as_was[id(original)]
                if original.stride() != stride:
                    vars(now)[WHOLE_LAYOUT] = torch.empty_strided(shape, stride, device="meta")
                self.shards[original] = now
                if self.can_restore:
                    original.data = original.data.new_empty(0)
                    self._classes[id(original)] = type(original)
                    original.__class__ = ReleasedParameter

    @torch.no_grad()
    def restore(self, group: ShardedGroup) -> dict[nn.Parameter, nn.Parameter]:
        """Restore parameters of ``group`` with the values of its shards; return them by shard. A collective."""
        restored: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in group.fsdp_params:
            (module, key), shard = place_of(parameter), parameter.sharded_param
            original = self._originals[id(module), key]
            original.__class__ = self._classes.pop(id(original), type(original))
            original.grad = None
            is_alone = shard.device_mesh.size() == 1
            values = local_shard_of(shard).clone() if is_alone else shard.full_tensor()
            original.data = self._placed(values.detach(), original)
            original.requires_grad_(shard.requires_grad)
            if is_alone and shard.grad is not None:
                original.grad = self._placed(local_shard_of(shard.grad), original)
            put_back(parameter, original)
            restored[shard] = original
        return restored

    @torch.no_grad()
    def restore_rest(self) -> None:
        """Restore scalars and buffers, which were not sharded."""
        for part, key, device in self._buffers:
            buffer = own_buffers(part).get(key)
            if buffer is not None and buffer.device != device:
                own_buffers(part)[key] = buffer.to(device)
        for _, _, parameter in self._places:
            if (parameter.device, parameter.shape, parameter.stride()) != self._as_was[id(parameter)]:
                gradient, parameter.grad = parameter.grad, None
                parameter.data = self._placed(parameter.data, parameter)
                parameter.grad = None if gradient is None else self._placed(gradient, parameter)
        marks = [(part, mark) for part, before in self._marks for mark in set(vars(part)) - before]
        for part, mark in marks:
            if mark.startswith(MARKS):
                del vars(part)[mark]  # not with delattr, which a compiled module forwards
        for hook in self._hooks:
            hook.remove()

    def _placed(self, values: Tensor, original: nn.Parameter) -> Tensor:
        """Return values on a parameter's original device, and in its memory layout."""
        device, shape, stride = self._as_was[id(original)]
        values = values.to(device)
        return stored_as(values, stride) if values.shape == shape else values


def _arrange(order: torch.memory_format, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    is_input = bool(args) and isinstance(args[0], Tensor) and args[0].dim() == module.get_parameter("weight").dim()
    return (args[0].contiguous(memory_format=order), *args[1:]) if is_input else args


def _hand_over(original: nn.Parameter, shard: nn.Parameter) -> None:
    """Move attributes and hooks to the shard; handles of hooks stay valid."""
    for name, value in vars(original).items():
        vars(shard).setdefault(name, value)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(original, hooks, None):
            setattr(shard, hooks, getattr(original, hooks))


can_recover = can_reset  # whether PyTorch is 2.13 or newer


def discard_failed_iteration(module: nn.Module) -> None:
    """Reset all FSDP2 models in ``module`` after a failed forward or backward.

    Call it outside the ``except`` block, when nothing holds the graph, on every rank: all must have failed or given up
    at the same collective. Afterwards parameters are sharded. Gradients accumulated unreduced
    (``set_requires_gradient_sync(False)``) are lost; gradients of shards stay, some with those of the failed backward:
    save them before and put them back.

    Raises:
        RuntimeError: If this PyTorch cannot do it, or ``module`` is only a part of an FSDP2 model.
    """
    parts = list(sharded_modules(module))
    if not parts:
        return
    if not can_recover():
        raise RuntimeError(
            "An FSDP2 model cannot continue after a failed forward or backward before PyTorch 2.13: "
            "upgrade, or choose a size that fits from the start."
        )
    roots = [part for part in parts if is_root(part)]
    if not roots and any(is_root(part) is False for part in parts):
        raise RuntimeError(
            f"discard_failed_iteration(module) needs the whole FSDP2 model, got a submodule: {type(module).__name__}."
        )
    for root in roots:
        root.reset_iter_state()
    # PyTorch up to 2.14 keeps unreduced gradients, and the buffers of a layer whose all-gather ran out of memory.
    for parameter in (p for part in parts for group in groups_of(part) for p in group.fsdp_params):
        discard_step(parameter)
