"""Undo FSDP2 on a module, or reset it after a failed iteration: PyTorch has nothing, or not enough, for it."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.tensors.properties import WHOLE_LAYOUT, sharded_modules, stored_as
from lightning_vram.private_names.fsdp2 import MARKS, discard_step, groups_of, is_root, place_of, put_back
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
        self.shards: dict[nn.Parameter, nn.Parameter] = {}
        self._originals = {(id(part), key): p for part, key, p in _iterate_owned([module])}
        self._as_was = {p: (type(p), p.device, p.shape, p.stride()) for p in self._originals.values()}
        buffers = ((part, key, b) for part in parts for key, b in own_buffers(part).items())
        self._buffers = [(part, key, b.device) for part, key, b in buffers if b is not None]
        self._marks = [(part, set(vars(part))) for part in parts]
        self._hooks: list[RemovableHandle] = []

    @torch.no_grad()
    def make_contiguous(self, modules: Iterable[nn.Module]) -> None:
        """Make parameters contiguous, as FSDP2 needs them; a hook converts inputs of ``channels_last`` convolutions."""
        for part, key, parameter in _iterate_owned(modules):
            if parameter not in self._as_was:  # sharded already
                continue
            _, _, shape, stride = self._as_was[parameter]
            order = _CHANNELS_LAST.get(len(shape)) if key == "weight" and isinstance(part, ConvBase) else None
            if order is not None and stride[1] == 1 != stride[0] and stride[-1] == shape[1]:
                self._hooks.append(part.register_forward_pre_hook(partial(_arrange, order)))
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()

    def release(self, modules: Iterable[nn.Module]) -> None:
        """Free the memory of sharded parameters; the objects stay."""
        for part, key, shard in _iterate_owned(modules):
            original = self._originals.get((id(part), key), shard)
            if shard is original or original in self.shards:
                continue
            _hand_over(original, shard)
            _, _, shape, stride = self._as_was[original]
            if original.stride() != stride:
                vars(shard)[WHOLE_LAYOUT] = torch.empty_strided(shape, stride, device="meta")
            self.shards[original] = shard
            if self.can_restore:
                original.data = original.data.new_empty(0)
                original.__class__ = ReleasedParameter

    @torch.no_grad()
    def restore(self, group: ShardedGroup) -> dict[nn.Parameter, nn.Parameter]:
        """Restore parameters of ``group`` with the values of its shards; return them by shard. A collective."""
        restored: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in group.fsdp_params:
            (module, key), shard = place_of(parameter), parameter.sharded_param
            original = self._originals[id(module), key]
            original.__class__ = self._as_was[original][0]
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
        for parameter, (_, device, _, stride) in self._as_was.items():
            if (parameter.device, parameter.stride()) != (device, stride):
                gradient, parameter.grad = parameter.grad, None
                parameter.data = self._placed(parameter.data, parameter)
                parameter.grad = None if gradient is None else self._placed(gradient, parameter)
        for part, before in self._marks:
            for mark in [mark for mark in vars(part) if mark not in before and mark.startswith(MARKS)]:
                del vars(part)[mark]  # not with delattr, which a compiled module forwards
        for hook in self._hooks:
            hook.remove()

    def _placed(self, values: Tensor, original: nn.Parameter) -> Tensor:
        """Return values on a parameter's original device, and in its memory layout."""
        _, device, shape, stride = self._as_was[original]
        values = values.to(device)
        return stored_as(values, stride) if values.shape == shape and 0 not in stride else values  # 0: expanded


def _iterate_owned(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for part in (part for module in modules for part in module.modules()):
        yield from ((part, key, parameter) for key, parameter in own_parameters(part).items() if parameter is not None)


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


def discard_failed_iteration(module: nn.Module) -> None:
    """Reset all FSDP2 models in ``module`` after a failed forward or backward; needs :func:`can_reset`.

    Call it outside the ``except`` block, when nothing holds the graph, on every rank: all must have failed or given up
    at the same collective. Afterwards parameters are sharded. Gradients accumulated unreduced
    (``set_requires_gradient_sync(False)``) are lost; gradients of shards stay, some with those of the failed backward:
    save them before and put them back. ``module`` must not be a part of an FSDP2 model.
    """
    parts = list(sharded_modules(module))
    inner = {part for outer in parts for part in sharded_modules(outer) if part is not outer}
    for part in parts:
        if part not in inner and is_root(part) is not None:  # it ran
            part.reset_iter_state()
    # PyTorch up to 2.14 keeps unreduced gradients, and the buffers of a layer whose all-gather ran out of memory.
    for parameter in (p for part in parts for group in groups_of(part) for p in group.fsdp_params):
        discard_step(parameter)
