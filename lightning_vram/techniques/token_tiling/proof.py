"""Prove that a module treats tokens alone, by running it on some tokens of its first input.

* On some of them in another order: the output must be the same for each token, exactly or up to rounding. This finds
  positions, and whatever depends on the number of tokens. So must gradients be, of inputs.
* With one token that is NaN: only the output of this token may be NaN. This finds whatever mixes tokens, however
  little: behind weights that are still zero, or a scale of 1e-6.
* Random numbers must be drawn for each token: one mask for all would become one per tile. Runs draw ones.
* Buffers, parameters, attributes with their contents, and inputs must stay unchanged; no graph may be stored elsewhere
  (a loss in another module's list), and no gradients but those of inputs and parameters may be needed.

Parameters that are zero are replaced by random numbers, so that a table of positions that is not trained yet is found.
In estimates, whose tensors have no values, random numbers on the host replace them and buffers. The proof leaves no
trace.
"""

import gc
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.core.rollback import ForwardFacts, ForwardState
from lightning_vram.core.tensors.properties import REAL_TYPES
from lightning_vram.memory.storages import version_of
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber
from lightning_vram.private_names.dispatcher import TO_COPY, without_modes
from lightning_vram.private_names.torch import tree_leaves
from lightning_vram.techniques.token_tiling.tiled_call import Body, CutCall

DRAWS = frozenset(["bernoulli_", "bernoulli", "rand", "rand_like", "randn", "randn_like", "uniform_", "normal_"])
_NUM_TOKENS = 64  # that are looked at
_NUM_RANDOM_TOKENS = 8  # in estimates
_MOST_RANDOM_NUMBERS = 1 << 28  # of a tensor: 1 GiB
_DROPOUT = torch.ops.aten.native_dropout.default
_MAY_REACH_FAR = frozenset(["convolution", "conv1d", "conv2d", "conv3d", "roll"])
_FEW_BITS = 1e-4  # machine epsilons above are of 16 bit


class NotAlone(Exception):  # noqa: N818 - a reason
    """Says why a module does not treat tokens alone."""


def have_values(tensors: list[Tensor]) -> bool:
    """Whether these are no tensors of an estimate."""
    return all(type(one) in REAL_TYPES and not one.is_meta for one in tensors)


def prove(module: nn.Module, body: Body, call: CutCall, tensors: list[Tensor]) -> tuple[bool, str]:
    """Return whether ``module`` treats tokens alone, and why not, or how exactly; ``""`` if random numbers failed."""
    has_gradients = torch.is_grad_enabled()
    state = ForwardState((module,), ForwardFacts(), (one.device for one in (*tensors, *module.parameters())))
    try:
        with torch.no_grad(), without_modes():  # who counts operators sees none of these
            runs = state.run(lambda: _Runs(module, body, call, tensors))  # draws random numbers
            if has_gradients:
                runs.look_for_graphs(state)  # first: what keeps a loss somewhere gets but one of these runs
            ask = partial(_compare, runs, has_gradients)
            return True, state.run(partial(_check_no_traces, module, state, ask))
    except NotAlone as why:
        return False, str(why)
    except Exception as error:  # code of others, on fewer tokens than it may know
        return False, f"fails on a sample of its tokens ({type(error).__name__})" if have_values(tensors) else ""


class _RandomNumberWatch(OperatorSubscriber):
    """Replaces random numbers by ones, and counts them; lets no index come of what is no number."""

    def __init__(self) -> None:
        self.num_drawn: list[int] = []

    @override
    def on_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        kwargs = kwargs or {}
        if func is TO_COPY and not kwargs.get("dtype", torch.float32).is_floating_point:
            args = (args[0].nan_to_num(0, 0, 0) if args[0].is_floating_point() else args[0], *args[1:])
        name = func.overloadpacket.__name__
        if "attention" in name:  # of which some say that they draw
            raise NotAlone("has attention inside")
        if name in _MAY_REACH_FAR:  # further than the tokens that are looked at
            raise NotAlone(f"may mix distant tokens in {name}")
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return self.run(func, types, args, kwargs)
        if func is _DROPOUT:
            self.num_drawn.append(args[0].numel())
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name not in DRAWS:
            raise NotAlone(f"draws random numbers in {name}")
        result = self.run(func, types, args, kwargs)
        self.num_drawn.append(result.numel())
        return result.fill_(1)


class _Runs:
    def __init__(self, module: nn.Module, body: Body, call: CutCall, tensors: list[Tensor]) -> None:
        self._body, self._call = body, call
        plain, has_values = [one.detach() for one in tensors], have_values(tensors)
        self.num_tokens = min(call.num_tokens, _NUM_TOKENS if has_values else _NUM_RANDOM_TOKENS) // 2 * 2
        if has_values:
            chosen = torch.linspace(0, call.num_tokens - 1, self.num_tokens).long()
            self._tensors = call.cut(plain, lambda one: one.index_select(call.dim, chosen.to(one.device)))
            replaced: dict[str, Tensor] = {**body.parameters_by_name}
            values = [one.detach() if one.any() else torch.randn_like(one) for one in replaced.values()]
        else:
            self._tensors = _randomized(call.cut(plain, lambda one: one.narrow(call.dim, 0, self.num_tokens)))
            replaced = {**body.parameters_by_name, **dict(body.named_buffers())}
            values = _randomized(replaced.values())
        self._parameters = dict(zip(replaced, values, strict=True))  # and buffers in estimates
        self.device = next(one.device for one, is_cut in zip(self._tensors, call.is_cut, strict=True) if is_cut)

    def run(self, order: Tensor, nan_at: int | None = None) -> tuple[list[Tensor], list[int]]:
        """Return results for the tokens at ``order``, tokens first, and how many random numbers were drawn."""
        dim, num = self._call.dim, len(order)
        tensors = [one.clone() for one in self._in_order(order)]
        if nan_at is not None:
            for one, is_cut in zip(tensors, self._call.is_cut, strict=True):
                if is_cut and one.is_floating_point():
                    one.select(dim, nan_at).fill_(torch.nan)
        copies, held = [one.clone() for one in tensors], [*tensors, *self._parameters.values()]
        versions = [*map(version_of, held)]
        with _RandomNumberWatch() as watch:
            results, _ = self._run(tensors)
        if versions != [*map(version_of, held)] or not all(map(_is_same, tensors, copies)):
            raise NotAlone("writes to its input")
        if not results or not all(isinstance(one, Tensor) for one in results):
            raise NotAlone("returns values other than tensors")
        if any(one.dim() <= dim or one.shape[dim] != num for one in results):
            raise NotAlone("returns a tensor with another number of tokens than its input")
        return [one.movedim(dim, 0) for one in results], watch.num_drawn

    def gradients(self, order: Tensor) -> list[Tensor | None]:
        """Return the gradients of what has tokens, tokens first."""
        dim, tensors = self._call.dim, self._in_order(order)
        chosen = [one for one, is_cut in zip(tensors, self._call.is_cut, strict=True) if is_cut and _has_gradient(one)]
        with self._grad():
            inputs = [one.requires_grad_() for one in chosen]
            ends = [one for one in self._run(tensors)[0] if one.requires_grad]
            gradients = [one.detach() for one in ends]  # which differ from token to token
            found = torch.autograd.grad(ends, inputs, gradients, allow_unused=True) if ends else [None] * len(inputs)
        return [None if one is None else one.movedim(dim, 0) for one in found]

    def look_for_graphs(self, state: ForwardState) -> None:
        """Refuse what keeps a graph of its call somewhere, and what computes with one of others."""
        inputs, _ = state.run(partial(self._run_with_graph, needs_gradient=True))
        if any(one() is not None for one in inputs):
            gc.collect()  # it may be no more than a cycle
        if any(one() is not None for one in inputs):
            raise NotAlone("stores something of its call outside itself, such as a loss")
        if state.run(partial(self._run_with_graph, needs_gradient=False))[1]:
            raise NotAlone("uses a tensor that requires a gradient and is neither its parameter nor its input")

    def _run_with_graph(self, *, needs_gradient: bool) -> tuple[list[weakref.ref[Tensor]], bool]:
        """Return inputs, which live as long as the graph of a run, and whether a result requires a gradient."""
        tensors = [one.clone().requires_grad_(needs_gradient and _has_gradient(one)) for one in self._tensors]
        results: list[Any] = []
        with suppress(RuntimeError), self._grad():  # of the next runs the reason can be told
            results, _ = self._run(tensors)
        return [*map(weakref.ref, tensors)], any(isinstance(one, Tensor) and one.requires_grad for one in results)

    def _in_order(self, order: Tensor) -> list[Tensor]:
        return self._call.cut(self._tensors, lambda one: one.index_select(self._call.dim, order))

    def _run(self, tensors: list[Tensor]) -> Any:
        return self._body.having(self._parameters, partial(self._run_body, tensors))

    def _run_body(self, tensors: list[Tensor]) -> Any:
        found = self._body.run(self._call.arguments(tensors))
        if any(one is not self._parameters.get(name, one) for name, one in self._body.named_buffers()):
            raise NotAlone("stores something of its call in a tensor")
        return found

    @contextmanager
    def _grad(self) -> Iterator[None]:
        """Make a graph of the run, of which a checkpoint around it knows nothing."""
        inner = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)  # else results hold themselves
        with torch.enable_grad(), inner, _RandomNumberWatch():
            yield


def _randomized(tensors: Collection[Tensor]) -> list[Tensor]:
    """Return others of these shapes, all of one piece of random numbers: as large as the largest tensor."""
    most = max((one.numel() for one in tensors), default=0)
    if most > _MOST_RANDOM_NUMBERS:
        raise MemoryError
    numbers = torch.randn(most, device="cpu")
    pairs = [(numbers[: one.numel()].view(one.shape), one) for one in tensors]
    return [made if one.is_floating_point() else (made > 0).to(one.dtype) for made, one in pairs]


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are bitwise identical, with NaN in the same places."""
    if torch.equal(one, other) or one.shape != other.shape:
        return one.shape == other.shape
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _check_no_traces(module: nn.Module, state: ForwardState, ask: Callable[[], str]) -> str:
    """Return what ``ask`` returns, if the module keeps nothing of the runs and draws no numbers of the host."""
    held = [*module.named_buffers(), *(pair for part in module.modules() for pair in vars(part).items())]
    copies = [one.detach().clone() if type(one) is Tensor and not one.is_meta else None for _, one in held]
    before = _contents(module)
    reason = ask()
    now = _contents(module)
    changed = [
        name
        for (name, one), copy in zip(held, copies, strict=True)
        if copy is not None and not _is_same(one.detach(), copy)
    ]
    changed += [key[0] for key in now if now[key] != before.get(key)]
    if changed:
        raise NotAlone(f"stores something of its call in {changed[0]!r}")
    if state.settle():
        raise NotAlone("draws random numbers from Python or NumPy")
    return reason


def _contents(module: nn.Module) -> dict[tuple[str, int], Any]:
    """What tells of an attribute that it was replaced or filled, by name and submodule."""
    members = ((part, name, value) for part in module.modules() for name, value in vars(part).items())
    return {(name, id(part)): (id(value), [*map(_mark, tree_leaves(value))]) for part, name, value in members}


def _mark(leaf: Any) -> tuple[int, int]:
    return id(leaf), version_of(leaf) if isinstance(leaf, Tensor) else len(leaf) if isinstance(leaf, set) else 0


def _compare(runs: _Runs, has_gradients: bool) -> str:  # noqa: FBT001
    num = runs.num_tokens
    every = torch.arange(num, device=runs.device)
    fewer = torch.randperm(num, generator=torch.Generator().manual_seed(0))[: num // 2].to(runs.device)
    whole, num_drawn = runs.run(every)
    part, num_drawn_of_part = runs.run(fewer)
    if [2 * one for one in num_drawn_of_part] != num_drawn:
        raise NotAlone("draws random numbers for all tokens at once")
    is_exact = _agree([one[fewer] for one in whole], part, "mixes tokens, or depends on their positions")
    place = num // 2 - 1
    for one, other in zip(runs.run(every, place)[0], whole, strict=True):
        if (one.isnan() != other.isnan())[every != place].any():
            raise NotAlone("mixes tokens")
    if has_gradients:
        pairs = zip(runs.gradients(every), runs.gradients(fewer), strict=True)
        both = [(one[fewer], other) for one, other in pairs if one is not None and other is not None]
        _agree([one for one, _ in both], [other for _, other in both], "mixes tokens in its backward", 10)
    return "exact" if is_exact else "lossless"


def _agree(ones: list[Tensor], others: list[Tensor], why: str, slack: int = 1) -> bool:
    """Return whether all are bitwise identical; raise ``NotAlone`` if they differ by more than rounding."""
    differing = [pair for pair in zip(ones, others, strict=True) if not _is_same(*pair)]
    for one, other in differing:
        if not one.is_floating_point() or one.shape != other.shape:
            raise NotAlone(why)
        kind = one.device.type
        is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        epsilon = max(torch.finfo(one.dtype).eps, torch.finfo(torch.get_autocast_dtype(kind)).eps if is_cast else 0)
        tolerance = slack * epsilon * (2 if epsilon > _FEW_BITS else 100)
        if not (one.double() - other.double()).norm() <= tolerance * other.double().norm():
            raise NotAlone(why)
    return not differing
