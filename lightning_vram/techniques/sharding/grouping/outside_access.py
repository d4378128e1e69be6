"""Find modules whose parameters somebody uses without calling the module.

FSDP2 gathers the parameters of a module when the module is called. A weight that is read past the call
(``hidden @ self.embedding.weight.T``) would be a shard still. The code of the forward methods tells most such reads:
it is looked through once, and nothing of it is run. Reads by an index (``self.layers[0].weight``) or by ``getattr``
are not seen.
"""

import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_vram.private_names.torch.modules import own_children, own_parameters

if dist.is_available():
    from torch.distributed.fsdp import FSDPModule  # absent from builds without torch.distributed

_ENTRIES = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_ATTRIBUTE_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_HARMLESS = ("dtype", "is_meta", "ndim", "requires_grad", "shape")  # a shard gives the same answer

Chain = tuple[str, ...]


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called: containers such as ``ModuleList`` cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_sharded_itself(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on ``module``."""
    return dist.is_available() and isinstance(module, FSDPModule)


def find_read_modules(root: nn.Module) -> set[nn.Module]:
    """Find the modules that are not called, or not before their parameters are used.

    These are modules without a forward, parts of an ``nn.MultiheadAttention`` and of parametrizations, and modules
    whose parameters the forward or step of an outer module names.
    """
    read = {module for module in root.modules() if not has_forward(module)}
    for module, chain in _iterate_chains(root):
        path, rest = _follow(module, chain)
        if path and rest and _is_parameter(path[-1], rest[0]) and rest[1:2] not in {(name,) for name in _HARMLESS}:
            read.update(path)
    for module in root.modules():
        if isinstance(module, nn.MultiheadAttention):
            read.update(part for part in module.modules() if part is not module)
        elif is_parametrized(module):
            read.update(module.parametrizations.modules())  # type: ignore[union-attr]
    return read


def find_entered_modules(root: nn.Module) -> set[nn.Module]:
    """Find modules of which an outer module's forward or step calls another method than ``forward``."""
    entered = set()
    for module, chain in _iterate_chains(root):
        path, rest = _follow(module, chain)
        if (
            path
            and rest
            and not hasattr(nn.Module, rest[0])
            and inspect.isfunction(getattr(type(path[-1]), rest[0], 0))
        ):
            entered.add(path[-1])
    return entered


def _iterate_chains(root: nn.Module) -> Iterator[tuple[nn.Module, Chain]]:
    """Yield modules with the attributes that their code reads: ``self.a.b`` is read as ``("a", "b")``."""
    known: dict[type, set[Chain]] = {}
    for module in root.modules():
        kind = type(module)
        if kind not in known:
            known[kind] = _read_chains(kind)
        for chain in known[kind]:
            yield from ((module, chain[start:]) for start, name in enumerate(chain) if name in own_children(module))


def _read_chains(kind: type) -> set[Chain]:
    """Chains in the entries of a class, and in those of its methods that they name."""
    chains: set[Chain] = set()
    waiting, seen = list(_ENTRIES), set(_ENTRIES)
    while waiting:
        attribute: Any = getattr(kind, waiting.pop(), None)
        function = inspect.unwrap(attribute) if callable(attribute) else None
        found = set(_chains_of(function.__code__)) if inspect.isfunction(function) else set()
        chains |= found
        called = {name for chain in found for name in chain if not hasattr(nn.Module, name)} - seen
        called = {name for name in called if callable(inspect.getattr_static(kind, name, None))}
        seen |= called
        waiting += called
    return chains


def _chains_of(code: CodeType) -> Iterator[Chain]:
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in _ATTRIBUTE_LOADS:
            chain.append(instruction.argval)
            continue
        if chain:
            yield tuple(chain)
        chain = []
    for inner in code.co_consts:  # functions within, comprehensions
        if isinstance(inner, CodeType):
            yield from _chains_of(inner)


def _follow(module: nn.Module, chain: Chain) -> tuple[list[nn.Module], Chain]:
    """Return the modules along a chain, and what of it is left."""
    path: list[nn.Module] = []
    for position, name in enumerate(chain):
        child = own_children(module).get(name)
        if child is None:
            return path, chain[position:]
        module = child
        path.append(module)
    return path, ()


def _is_parameter(module: nn.Module, name: str) -> bool:
    return name in own_parameters(module) or is_parametrized(module, name)
