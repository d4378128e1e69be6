"""Agree, after a backward, which parameters had a gradient on some rank.

FSDP2 reduces the gradients that are there: where ranks take different branches it adds those of different parameters,
without a word. Zeros in place of what is missing make that right, but an optimizer steps a parameter with a gradient
of zero, by its weight decay and its momentum, and leaves alone one that has none.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_vram.memory.device.accelerators import current_kind
from lightning_vram.techniques.sharding.group import ShardedGroup

_OTHER_ORDER = (
    "Another rank has called other sharded layers than this one, or in another order: FSDP2 gathers a layer on all "
    "ranks at once, and has mixed them up. Let every rank call the same layers (LayerDrop: from the same seed), or let "
    "`wrap` name the class of what holds the layers that ranks choose from."
)


class UsedParameters:
    """Of one sharded module. Of ``replicated`` parameters, which each rank has whole, gradients are averaged here."""

    def __init__(self, groups: Iterable[ShardedGroup], replicated: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
        self._groups = list(groups)
        self._sharded = [parameter for group in self._groups for parameter in group.fsdp_params]
        self._replicated = replicated
        self._num_ranks = mesh.size()
        self._place = {group: place for place, group in enumerate(self._groups)}
        self._order = 0  # a digest of which groups were gathered, one after the other

    def note(self, group: ShardedGroup) -> None:
        """Remember that a group was gathered for a forward."""
        self._order = (self._order * 1_000_003 + self._place[group] + 1) % 2**61

    def forget(self) -> None:
        """Begin anew."""
        self._order = 0

    def settle(self, noted: Sequence[bool] = ()) -> list[bool]:
        """Give every parameter the gradient it would have on one rank. A collective, but for a single rank.

        Args:
            noted: What else ranks tell one another, equally many on all.

        Returns:
            Of each of ``noted``, whether it is so on any rank.

        Raises:
            RuntimeError: If ranks have gathered other groups, or in another order; on all of them.
        """
        order, self._order = self._order, 0
        if self._num_ranks == 1:
            for group in self._groups:
                group.present = set()
            return list(noted)
        present = {parameter for group in self._groups for parameter in group.present}
        flags = [parameter in present for parameter in self._sharded]
        flags += [parameter.grad is not None for parameter in self._replicated]
        used = torch.tensor([order, -order, *noted, *flags], dtype=torch.int64, device=_device_for_flags())
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        largest, smallest, *rest = used.tolist()
        is_noted, is_used = rest[: len(noted)], rest[len(noted) :]
        if largest != -smallest:
            raise RuntimeError(_OTHER_ORDER)
        somewhere = {parameter for parameter, flag in zip(self._sharded, is_used, strict=False) if flag}
        for group in self._groups:
            group.settle(somewhere.__contains__)
        self._average(p for p, flag in zip(self._replicated, is_used[len(self._sharded) :], strict=True) if flag)
        return [bool(flag) for flag in is_noted]

    @torch.no_grad()
    def _average(self, parameters: Iterable[nn.Parameter]) -> None:
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        if not gradients:
            return
        flat = torch.cat([gradient.flatten().double() for gradient in gradients])
        dist.all_reduce(flat)
        means = torch.split(flat / self._num_ranks, [gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


def _device_for_flags() -> torch.device | None:
    has_host = any("cpu" in part or part == "gloo" for part in dist.get_backend_config().split(","))
    return torch.device("cpu") if has_host else torch.device(current_kind(), torch.accelerator.current_device_index())
