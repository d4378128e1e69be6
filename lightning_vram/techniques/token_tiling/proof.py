"""Prove that a module treats tokens alone, by running it on some tokens of its first input.

* In another order, and fewer of them: the output must be the same for each token, exactly or up to rounding. This
  finds positions, and anything that depends on the number of tokens.
* With one token that is NaN: only the output of this token may be NaN. This finds whatever mixes tokens, however
  little: behind weights that are still zero, or a scale of 1e-6.
* Random numbers must be drawn for each token: one mask for all tokens would become one per tile. They are replaced by
  ones, so that runs can be compared.
* Buffers and attributes must stay unchanged, with the contents of lists and dicts among them, and so must the inputs.
* With gradients: it must compute with no gradients but those of its inputs and parameters, and no graph may be stored
  elsewhere (a loss in another module's list). The gradient of each token must be the same for fewer tokens.

Fake tensors, as in estimates, are proven by their operators instead.

Parameters that are zero are replaced by random numbers, so that a table of positions that is not trained yet is found.
The proof leaves no trace: random generators continue from where they were.
"""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.operators import Family, base_name, family_of, is_pointwise, iterate_tensors, iterate_written
from lightning_vram.core.rollback import ForwardFacts, ForwardState
from lightning_vram.core.tensors.properties import REAL_TYPES, flatten_arguments, storage_address, version_of
from lightning_vram.private_names.dispatcher import (
    ASK_DEVICE,
    TO_COPY,
    UNSAFE_VIEW,
    TorchDispatchMode,
    detect_fake_mode,
    given_arguments,
    without_modes,
)
from lightning_vram.private_names.torch import BUFFERS
from lightning_vram.techniques.token_tiling.tiled_call import Body, CutCall

DRAWS = frozenset(["bernoulli_", "bernoulli", "rand", "rand_like", "randn", "randn_like", "uniform_", "normal_"])
_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033)
_KEEPING_ROWS = {  # if the dimension is there afterwards
    *("mm", "addmm", "bmm", "baddbmm", "linear", "matmul"),
    *("sum", "mean", "prod", "amax", "amin", "var", "var_mean", "std", "std_mean", "linalg_vector_norm", "logsumexp"),
    *("argmax", "argmin", "any", "all", "max", "min", "glu", "native_dropout"),
    *("empty_like", "new_empty", "zeros_like", "ones_like", "full_like"),
}
_OTHER_VIEWS = frozenset(["as_strided", "unfold", "diagonal"])
_NAMING_SIZES = frozenset(["view", "expand", "new_empty"])


class NotAlone(Exception):  # noqa: N818 - a reason
    """Says why a module does not treat tokens alone."""


def ask_operators(body: Body, call: CutCall, tensors: list[Tensor]) -> str:
    """Return how it was proven that a module treats tokens alone, or raise ``NotAlone``; reads shapes and types only.

    The number of tokens becomes a large prime, so that only the dimension of tokens is a multiple of it: operators must
    treat rows alone and keep it. Sums over tokens lose it, comparisons of tokens have two, a table of positions gets
    one out of nothing. A second prime finds computations with the number of tokens. What is refused here may still be
    proven by values: estimates are then too high.
    """
    parameters = {name: one.detach() for name, one in body.parameters_by_name.items()}
    sizes = {size for one in (*tensors, *parameters.values()) for size in one.shape}
    traces = []
    for prime in [one for one in _PRIMES if all(size % one for size in sizes)][:2]:

        def shortened(one: Tensor, length: int = prime) -> Tensor:
            return one.new_empty((*one.shape[: call.dim], length, *one.shape[call.dim + 1 :]))

        parts = call.cut(tensors, shortened)
        parts = [part if is_cut else part.detach() for part, is_cut in zip(parts, call.is_cut, strict=True)]
        with detect_fake_mode(parts) or nullcontext(), _OperatorCheck(prime, parts) as watch:
            results, _ = body.having(parameters, lambda parts=parts: body.run(call.arguments(parts)))  # type: ignore[misc]
        if not results or not all(isinstance(one, Tensor) for one in results):
            raise NotAlone("returns values other than tensors")
        if any(one.dim() <= call.dim or one.shape[call.dim] != prime for one in results):
            raise NotAlone("returns a tensor with another number of tokens than its input")
        traces.append(watch.trace)
    if len(traces) != 2 or traces[0] != traces[1]:
        raise NotAlone("depends on the number of tokens")
    return "by its operators"


class _OperatorCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that may not treat tokens alone; notes each, but for how many tokens there are."""

    def __init__(self, prime: int, inputs: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._prime = prime
        self._inputs = {storage_address(one) for one in inputs}
        self.trace: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASK_DEVICE:
            return args[0].device
        kwargs = kwargs or {}
        name, is_view = func.overloadpacket.__name__, func is UNSAFE_VIEW or base_name(func) == "view"
        before = {self._tokens(one, has_suffix=is_view) for one in iterate_tensors((*args, *kwargs.values()))} - {None}
        for one in iterate_written(func, args, kwargs):
            if self._tokens(one) is None or storage_address(one) in self._inputs:
                raise NotAlone(f"writes to its input in {name}")
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if not before and (is_drawn or name == "lift_fresh"):
            raise NotAlone(f"creates values in {name}")
        if before and not (self._keeps_rows(func, args, kwargs) or (is_drawn and name in DRAWS)):
            raise NotAlone(f"has {name}")
        result = func(*args, **kwargs)
        made = list(iterate_tensors((result,)))
        if len(before) > 1 or {self._tokens(one, has_suffix=is_view) for one in made} != (before or {None}):
            raise NotAlone(f"mixes tokens in {name}")
        leaves = () if is_view or name in _NAMING_SIZES else flatten_arguments((args, kwargs))[0]
        values = [repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
        sizes = [[-(size // self._prime) if size % self._prime == 0 else size for size in one.shape] for one in made]
        self.trace.append((func, values, sizes))
        return result

    def _tokens(self, one: Tensor, *, has_suffix: bool = False) -> int | None:
        """Return the size of the dimension of tokens; of a view, what is after it: so much may not change."""
        places = [place for place, size in enumerate(one.shape) if size % self._prime == 0]
        if len(places) > 1:
            raise NotAlone("mixes tokens")
        if not places:
            return None
        return prod(one.shape[places[0] + 1 :]) if has_suffix else one.shape[places[0]]

    def _keeps_rows(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = base_name(func)
        if name.endswith("softmax"):
            return bool(args[0].shape[given_arguments(func, args, kwargs)["dim"]] % self._prime)
        if func is TO_COPY or is_pointwise(func) or name in _KEEPING_ROWS:
            return True
        return family_of(func) in (Family.VIEW, Family.NORM) and name not in _OTHER_VIEWS


_NUM_TOKENS = 64  # that are looked at
_DROPOUT = torch.ops.aten.native_dropout.default
_CONVOLUTIONS = frozenset(["convolution", "conv1d", "conv2d", "conv3d"])


class _RandomNumberWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers by ones, and counts them; lets no index come of what is no number."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_drawn: list[int] = []
        self._num_tokens = num_tokens  # that are looked at. What reaches further would not be seen to mix them.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is TO_COPY and not kwargs.get("dtype", torch.float32).is_floating_point:
            args = (args[0].nan_to_num(0, 0, 0) if args[0].is_floating_point() else args[0], *args[1:])
        name = func.overloadpacket.__name__
        if "attention" in name:  # of which some say that they draw
            raise NotAlone("has attention inside")
        if (name in _CONVOLUTIONS or name == "roll") and 2 * _reach(name, args) > self._num_tokens:
            raise NotAlone(f"mixes distant tokens in {name}")
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is _DROPOUT:
            self.num_drawn.append(args[0].numel())
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name not in DRAWS:
            raise NotAlone(f"draws random numbers in {name}")
        result = func(*args, **kwargs)
        self.num_drawn.append(result.numel())
        return result.fill_(1)


class Runs:
    """Runs of a module on some tokens."""

    def __init__(self, body: Body, call: CutCall, tensors: list[Tensor]) -> None:
        self._body, self._call = body, call
        self.num_tokens = min(call.num_tokens, _NUM_TOKENS) // 2 * 2
        self.device = next(one.device for one, is_cut in zip(tensors, call.is_cut, strict=True) if is_cut)
        chosen = torch.linspace(0, call.num_tokens - 1, self.num_tokens, device=self.device).long()
        plain = [one.detach() for one in tensors]
        self._tensors = call.cut(plain, lambda one: one.index_select(call.dim, chosen.to(one.device)))
        self._parameters = {
            name: one.detach() if one.any() else torch.randn_like(one) for name, one in body.parameters_by_name.items()
        }

    def run(self, order: Tensor, nan_at: int | None = None) -> tuple[list[Tensor], list[int]]:
        """Return results for the tokens at ``order``, tokens first, and how many random numbers were drawn."""
        dim, num = self._call.dim, len(order)
        tensors = self._call.cut(self._tensors, lambda one: one.index_select(dim, order))
        tensors = [one.clone() for one in tensors]
        if nan_at is not None:
            for one in self._call.cut(tensors, lambda one: one.select(dim, nan_at)):
                if one.is_floating_point() and not any(one is whole for whole in tensors):
                    one.fill_(torch.nan)
        before = [(one.clone(), version_of(one)) for one in tensors]
        with _RandomNumberWatch(self.num_tokens) as watch:
            results, _ = self._run(self._call.arguments(tensors))
        pairs = zip(tensors, before, strict=True)
        if not all(version_of(one) == then and is_same(one, copy) for one, (copy, then) in pairs):
            raise NotAlone("writes to its input")
        if not results or not all(isinstance(one, Tensor) for one in results):
            raise NotAlone("returns values other than tensors")
        if any(one.dim() <= dim or one.shape[dim] != num for one in results):
            raise NotAlone("returns a tensor with another number of tokens than its input")
        return [one.movedim(dim, 0) for one in results], watch.num_drawn

    def _run(self, arguments: Any) -> Any:
        return self._body.having(self._parameters, lambda: self._body.run(arguments))

    def gradients(self, order: Tensor) -> list[Tensor | None]:
        """Return the gradients of what has tokens, tokens first, of some that the results have."""
        dim = self._call.dim
        tensors = self._call.cut(self._tensors, lambda one: one.index_select(dim, order))
        chosen = [one for one, is_cut in zip(tensors, self._call.is_cut, strict=True) if is_cut and _has_gradient(one)]
        with self._grad():
            inputs = [one.requires_grad_() for one in chosen]
            results, _ = self._run(self._call.arguments(tensors))
            ends = [one for one in results if one.requires_grad]
            gradients = [_numbers(one, self.num_tokens, dim, order) for one in ends]
            found = torch.autograd.grad(ends, inputs, gradients, allow_unused=True) if ends else [None] * len(inputs)
        return [None if one is None else one.movedim(dim, 0) for one in found]

    def look_for_graphs(self, state: ForwardState) -> None:
        """Refuse what keeps a graph of its call somewhere, and what computes with one of others."""
        is_kept = state.run(self._mark_and_run)
        if is_kept() is not None:
            gc.collect()  # it may be no more than a cycle
        if is_kept() is not None:
            raise NotAlone("stores something of its call outside itself, such as a loss")
        if state.run(self._needs_gradient):
            raise NotAlone("uses a tensor that requires a gradient and is neither its parameter nor its input")

    def _needs_gradient(self) -> bool:
        results: list[Any] = []
        with suppress(RuntimeError), self._grad():
            results, _ = self._run(self._call.arguments([one.clone() for one in self._tensors]))
        return any(isinstance(one, Tensor) and one.requires_grad for one in results)

    def _mark_and_run(self) -> weakref.ref[Any]:
        """Return what lives as long as the graph of a run."""
        token = _Token()
        with suppress(RuntimeError), self._grad():  # of the next runs the reason can be told
            tensors = self._tensors
            marked = [_mark(token, one.clone().requires_grad_()) if _has_gradient(one) else one for one in tensors]
            self._run(self._call.arguments(marked))
        return weakref.ref(token)

    @contextmanager
    def _grad(self) -> Iterator[None]:
        """Make a graph of the run, of which a checkpoint around it knows nothing."""
        inner = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)  # else results hold themselves
        with torch.enable_grad(), inner, _RandomNumberWatch(self.num_tokens):
            yield


class _Token:
    """Lives as long as a graph."""


class _Marked(torch.autograd.Function):
    """The same tensor, in a graph that holds a token."""

    @staticmethod
    def forward(ctx: Any, token: _Token, tensor: Tensor) -> Tensor:
        ctx.token = token
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *gradients


_mark: Any = _Marked.apply


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _numbers(like: Tensor, num_tokens: int, dim: int, order: Tensor) -> Tensor:
    """Return random numbers, the same for each token in any order."""
    shape = list(like.movedim(dim, 0).shape)
    made = torch.randn(num_tokens, *shape[1:], generator=torch.Generator().manual_seed(0))
    return made.to(like.device, like.dtype)[order].movedim(0, dim)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are bitwise identical, with NaN in the same places."""
    is_float = one.is_floating_point()
    return torch.equal(one, other) or (is_float and one.shape == other.shape and one.allclose(other, 0, 0, True))  # noqa: FBT003


def _reach(name: str, args: Any) -> Any:
    """Return how far a convolution looks, or a roll moves."""
    if name == "roll":
        return max(map(abs, args[1]))
    sizes, dilation = args[1].shape[2:], args[5] if len(args) > 5 else [1]
    return max((size - 1) * max(dilation) for size in sizes)


_FEW_BITS = 1e-4  # machine epsilons above are of 16 bit
_KINDS = (Tensor, nn.Buffer)
_MAX_ITEMS = 1000  # of a container that is looked into


def prove(module: nn.Module, body: Body, call: CutCall, tensors: list[Tensor]) -> tuple[bool, str]:
    """Return whether ``module`` treats tokens alone, and why not, or how exactly."""
    has_values = all(type(one) in REAL_TYPES and not one.is_meta for one in tensors)
    state = ForwardState((module,), ForwardFacts(), (one.device for one in (*tensors, *module.parameters())))
    has_gradients = torch.is_grad_enabled()
    try:
        with torch.no_grad(), without_modes():  # who counts operators sees none of these
            if has_values:
                runs = state.run(lambda: Runs(body, call, tensors))  # draws random numbers
                if has_gradients:
                    runs.look_for_graphs(state)  # first: what keeps a loss somewhere gets but one of these runs
                ask = partial(_compare, runs, has_gradients)
            else:
                ask = partial(ask_operators, body, call, tensors)
            return True, state.run(partial(_check_no_traces, module, state, has_values, ask))
    except NotAlone as why:
        return False, str(why)
    except Exception as error:  # code of others, on fewer tokens than it may know
        return False, f"fails on a sample of its tokens ({type(error).__name__})"


def _check_no_traces(module: nn.Module, state: ForwardState, has_values: bool, ask: Callable[[], str]) -> str:  # noqa: FBT001
    """Return what ``ask`` returns, if the module keeps nothing of the runs and draws no numbers of the host."""
    parts = [(one, _contents(one)) for one in module.modules()]
    held = [*module.named_buffers(), *(pair for one, _ in parts for pair in vars(one).items())]
    tensors = [(name, one.detach()) for name, one in held if has_values and type(one) in _KINDS and not one.is_meta]
    before = [one.clone() for _, one in tensors]
    reason = ask()
    changed = [name for (name, one), copy in zip(tensors, before, strict=True) if not is_same(one, copy)]
    changed += [name for one, then in parts for name in _changed(then, _contents(one))]
    if changed:
        raise NotAlone(f"stores something of its call in {changed[0]!r}")
    if state.settle():
        raise NotAlone("draws random numbers from Python or NumPy")
    return reason


def _compare(runs: Runs, has_gradients: bool) -> str:  # noqa: FBT001
    num = runs.num_tokens
    every = torch.arange(num, device=runs.device)
    mixed = torch.randperm(num, generator=torch.Generator().manual_seed(0)).to(runs.device)
    whole, num_drawn = runs.run(every)
    half, num_half_drawn = runs.run(every[num // 2 :])
    if [2 * one for one in num_half_drawn] != num_drawn:
        raise NotAlone("draws random numbers for all tokens at once")
    is_exact = _agree([one[num // 2 :] for one in whole], half)
    is_exact &= _agree([one[mixed] for one in whole], runs.run(mixed)[0])
    place = num // 2 - 1
    others = every != place
    for one, other in zip(runs.run(every, place)[0], whole, strict=True):
        if one.is_floating_point() and not torch.equal(one[others].isnan(), other[others].isnan()):
            raise NotAlone("mixes tokens")
    if has_gradients:
        pairs = zip(runs.gradients(every), runs.gradients(every[num // 2 :]), strict=True)
        both = [(one[num // 2 :], other) for one, other in pairs if one is not None and other is not None]
        _agree([one for one, _ in both], [other for _, other in both], "mixes tokens in its backward", 10)
    return "exact" if is_exact else "lossless"


def _agree(
    ones: list[Tensor], others: list[Tensor], why: str = "mixes tokens, or depends on their positions", slack: int = 1
) -> bool:
    """Whether they are the same to the bit."""
    is_exact = True
    for one, other in zip(ones, others, strict=True):
        if is_same(one, other):
            continue
        is_exact = False
        if not one.is_floating_point() or one.shape != other.shape:
            raise NotAlone(why)
        kind = one.device.type
        is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        epsilon = max(torch.finfo(one.dtype).eps, torch.finfo(torch.get_autocast_dtype(kind)).eps if is_cast else 0)
        tolerance = slack * epsilon * (2 if epsilon > _FEW_BITS else 100)
        difference, size = (one.double() - other.double()).norm(), other.double().norm()
        if not difference <= tolerance * size:
            raise NotAlone(why)
    return is_exact


def _contents(module: nn.Module) -> dict[str, Any]:
    """What tells of an attribute that it was replaced, written to or filled."""
    buffers = {name: id(one) for name, one in module.named_buffers(recurse=False)}  # their values are compared
    return buffers | {name: _content(value) for name, value in vars(module).items() if name != BUFFERS}


def _content(value: Any, depth: int = 3) -> Any:
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if depth and isinstance(value, dict | list | tuple | set | deque) and len(value) <= _MAX_ITEMS:
        items = value.values() if isinstance(value, dict) else value
        return id(value), [_content(item, depth - 1) for item in items]
    return id(value), len(value) if isinstance(value, dict | list | set | deque) else 0


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in now if name not in before or now[name] != before[name]]
