"""PyTorch's databases: operators and modules as programs with arguments of their own; optimizers."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

NUM_SAMPLES = 4  # of each operator or module at most


@dataclass(frozen=True)
class Program:
    """A computation that can be run again."""

    name: str
    make: Callable[[], Any]  # new arguments of the same values
    call: Callable[[Any], Any]
    find_leaves: Callable[[Any], list[Tensor]]  # of the arguments, those that get gradients


def operator_programs(part: int, num_parts: int) -> Iterator[Program]:
    """Yield each sample of each ``num_parts``-th operator from number ``part`` on, and its in-place form."""
    with _flags_left_open():
        from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db[part::num_parts]:
        if not op.supports_autograd or torch.float32 not in op.supported_backward_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=True), NUM_SAMPLES):
            make = functools.partial(tree_map, _clone, (sample.input, sample.args, sample.kwargs))
            name, in_place = f"{op.name} {op.variant_test_name}".strip(), op.inplace_variant
            yield Program(name, make, functools.partial(_call, op.op), _find_leaves)
            if in_place is not None and not sample.broadcasts_input:
                yield Program(f"{name} in place", make, functools.partial(_call_in_place, in_place), _find_leaves)


def module_programs(part: int, num_parts: int) -> Iterator[Program]:
    """Yield each sample of each ``num_parts``-th module from number ``part`` on, in training and evaluation."""
    with _flags_left_open():
        from torch.testing._internal.common_modules import module_db

    for info, is_training in itertools.product(module_db[part::num_parts], (True, False)):
        torch.manual_seed(0)
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=is_training
        )
        for sample in itertools.islice((s for s in samples if s.forward_input is not None), NUM_SAMPLES):
            arguments, inputs = sample.constructor_input, sample.forward_input
            module = info.module_cls(*arguments.args, **arguments.kwargs).train(is_training)
            make = functools.partial(_copy_call, module, (inputs.args, inputs.kwargs))
            yield Program(f"{info.name} training={is_training}", make, _call_module, _find_leaves_of_call)


def optimizer_infos() -> list[Any]:
    with _flags_left_open():
        from torch.testing._internal.common_optimizers import optim_db

    return optim_db


def _call(function: Callable[..., Any], arguments: Any) -> Any:
    first, args, kwargs = arguments
    return function(first, *args, **kwargs)


def _call_in_place(function: Callable[..., Any], arguments: Any) -> Any:
    first, args, kwargs = arguments
    first = tree_map(lambda x: x * 1 if isinstance(x, Tensor) and x.requires_grad else x, first)  # leaves may not
    return function(first, *args, **kwargs)


def _copy_call(module: nn.Module, arguments: Any) -> Any:
    return copy.deepcopy(module), tree_map(_clone, arguments)


def _call_module(call: Any) -> Any:
    module, (args, kwargs) = call
    return module(*args, **kwargs)


def _find_leaves(arguments: Any) -> list[Tensor]:
    return [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]


def _find_leaves_of_call(call: Any) -> list[Tensor]:
    module, arguments = call
    return [*_find_leaves(arguments), *(p for p in module.parameters() if p.requires_grad)]


def _clone(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


@contextmanager
def _flags_left_open() -> Iterator[None]:
    """Importing PyTorch's own tests keeps everybody from setting the flags of backends, which a Trainer does."""
    name = "__allow_nonbracketed_mutation_flag"
    flags = torch.backends.disable_global_flags.__globals__  # what stands as torch.backends is a copy
    before = flags[name]
    try:
        yield
    finally:
        flags[name] = before
