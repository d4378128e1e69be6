"""Make sure that all ranks train the same model."""

import ctypes
import hashlib
from collections.abc import Sequence
from itertools import chain, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_vram.core.processes.rank_errors import gather_objects, num_ranks
from lightning_vram.private_names.torch.dispatch import detect_fake_mode, is_traceable_wrapper_subclass

_MISSING = "is missing"

Entry = tuple[str, str]  # name, and what is to be the same


def check_same_modules(module: nn.Module, group: "dist.ProcessGroup | None" = None) -> None:
    """Raise ``ValueError`` on every rank if the model is not the same on all of them. A collective.

    Compared are names, shapes, dtypes, ``requires_grad`` and sharing of tensors, not values. Sharded training combines
    the shards of all ranks to one parameter: if models differ, it fails far from the cause, hangs, or trains a mixture
    of two. ``group`` needs a backend for the host.
    """
    if num_ranks(group) == 1:
        return
    entries = _describe(module)
    if len(set(gather_objects(hashlib.sha256(repr(entries).encode()).hexdigest(), group))) == 1:
        return
    raise ValueError(
        f"The model differs between ranks: {_tell_difference(gather_objects(entries, group))}. "
        "Build it from the same arguments in the same order on every rank."
    )


def spread_values(module: nn.Module, group: "dist.ProcessGroup | None" = None) -> bool:
    """Copy parameters and buffers from the first rank to all; return whether any differed. A collective.

    Checksums are sent first, and then only the tensors that differ. Shards and meta tensors are left alone.
    ``ValueError`` on every rank if a tensor is on the host on some ranks only. ``group`` needs a backend for the host.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    if num_ranks(group) == 1 or not named or detect_fake_mode() is not None:  # fake tensors have no values
        return False
    plain = [_is_plain(tensor) for _, tensor in named]
    sums = [_checksum(tensor) if is_plain else 0 for (_, tensor), is_plain in zip(named, plain, strict=True)]
    gathered = [torch.empty(2, len(named), dtype=torch.int64) for _ in range(num_ranks(group))]
    dist.all_gather(gathered, torch.tensor([plain, sums], dtype=torch.int64), group)
    lacking, differing = (torch.stack(gathered) != gathered[0]).any(dim=0).tolist()
    if any(lacking):
        name = next(name for (name, _), is_lacking in zip(named, lacking, strict=True) if is_lacking)
        raise ValueError(
            f"{name!r} is an ordinary tensor on the host on some ranks only: build the same model on all ranks."
        )
    for (_, tensor), differs in zip(named, differing, strict=True):
        if differs:
            _broadcast(tensor, group)
    return any(differing)


def _describe(module: nn.Module) -> list[Entry]:
    """Return all names with what must be equal, tensors that have several names included."""
    first_names: dict[int, str] = {}
    entries = []
    parameters = (("parameter", *one) for one in module.named_parameters(remove_duplicate=False))
    buffers = (("buffer", *one) for one in module.named_buffers(remove_duplicate=False))
    for kind, name, tensor in chain(parameters, buffers):
        first_name = first_names.setdefault(id(tensor), name)
        shape = "no shape yet" if is_lazy(tensor) else f"shape {tuple(tensor.shape)}"
        text = f"has {shape}, {str(tensor.dtype).removeprefix('torch.')}, requires_grad={tensor.requires_grad}"
        entries.append((f"{kind} {name!r}", text if first_name == name else f"is the same as {first_name!r}"))
    return entries


def _tell_difference(described: Sequence[list[Entry]]) -> str:
    """Describe the first difference, and on which ranks it is."""
    by_name = [dict(entries) for entries in described]
    at_once = next(row for row in zip_longest(*described) if len(set(row)) > 1)
    for entry in filter(None, at_once):
        difference = _join([names.get(entry[0], _MISSING) for names in by_name])
        if difference:
            return f"{entry[0]} {difference}"
    return f"the order, {_join([f'first comes {entry[0]}' for entry in at_once if entry])}"


def _join(texts: list[str]) -> str:
    """Return which ranks have which text; nothing if all have the same."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    if len(ranks) == 1:
        return ""
    where = (f"{text} on rank{'s' * (len(own) > 1)} {', '.join(own)}" for text, own in ranks.items())
    return " but ".join(where)


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not is_lazy(tensor)
        and not is_traceable_wrapper_subclass(tensor)
    )


def _checksum(tensor: Tensor) -> int:
    """Return 64 bits that depend on every bit of ``tensor`` and its place; some 1.5 GB/s."""
    data = tensor.detach().contiguous()
    num_bytes = data.numel() * data.element_size()
    memory = (ctypes.c_char * num_bytes).from_address(data.data_ptr()) if num_bytes else b""
    return int.from_bytes(hashlib.sha256(memory).digest()[:8], signed=True)


def _broadcast(tensor: Tensor, group: "dist.ProcessGroup | None") -> None:
    values = tensor.detach()
    whole = values.contiguous()
    dist.broadcast(whole, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    if whole is not values:
        values.copy_(whole)
    else:
        torch.autograd.graph.increment_version(values)  # a collective does not count as a write
