"""Run modules that treat tokens alone (MLPs, norms) some tokens at a time, forward and backward.

The intermediates of an MLP are several times its input. In tiles only its input and result are whole: each tile runs in
the forward without gradients, and again in the backward (TiledMLP of ALST, https://arxiv.org/abs/2506.13996).

That a module treats tokens alone is proven by running it on some tokens of its first input.

* On some of them in another order: the output must be the same for each token, exactly or up to rounding, and so must
  the gradient of the input. This finds positions, and whatever depends on the number of tokens.
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
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, Literal, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from typing_extensions import override

from lightning_vram.core.hooks import exact_only, is_in_backward, is_in_selective_checkpoint, is_transformed
from lightning_vram.core.layers import LayerPattern, has_no_forward, name_layers, select_layers
from lightning_vram.core.patching import Swaps
from lightning_vram.core.recomputed_saves import SavedSamples, divergence_error, is_due
from lightning_vram.core.rollback import ForwardFacts, ForwardState
from lightning_vram.core.tensors.properties import PLAIN_TYPES, REAL_TYPES, is_strided
from lightning_vram.memory.storages import version_of
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber
from lightning_vram.private_names import torch as private
from lightning_vram.private_names.dispatcher import TO_COPY, without_modes

# Each tile runs twice: in the forward without gradients, and in the backward, where gradients are summed.

_VALUES = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_FEWEST_ROWS = 1024
_T = TypeVar("_T")
_LOW = (torch.float16, torch.bfloat16)
_is_inside: ContextVar[bool] = ContextVar("_is_inside", default=False)
"""Whether a module runs on a tile, or is asked: what is inside of it runs plain."""


class Body(nn.Module):
    """A call of a module that gets one tensor ``hidden``, with other parameters in the places of its own.

    Tokens are along the last dimension but one: [B, T, D], or [T, D]. Whatever is called batch and token does not
    matter, as independence along this dimension is what is proven. The body holds none of the call's tensors.
    """

    def __init__(
        self, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__()
        self.module = module
        self.original = original
        self.num_args, self.names = len(args), tuple(kwargs)
        values = (*args, *kwargs.values())
        self.place = next(place for place, one in enumerate(values) if isinstance(one, Tensor))
        self.values = (*values[: self.place], None, *values[self.place + 1 :])
        self.parameters_by_name = {f"module.{name}": one for name, one in module.named_parameters()}

    def forward(self, work: Callable[[], _T]) -> _T:
        """Do some work: ``functional_call`` replaces parameters only in a forward."""
        return work()

    def having(self, parameters: dict[str, Tensor], work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns, which calls :meth:`run` with these parameters: a millisecond for all tiles."""
        token = _is_inside.set(True)
        try:
            return torch.func.functional_call(self, parameters, (work,))  # type: ignore[no-any-return]
        finally:
            _is_inside.reset(token)

    def run(self, hidden: Tensor) -> Any:
        """Return what the module returns, past its hooks."""
        values = [*self.values]
        values[self.place] = hidden
        return self.original(*values[: self.num_args], **dict(zip(self.names, values[self.num_args :], strict=True)))


def find_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the only tensor among arguments, if it has tokens, and no other argument could hold one."""
    tensors = [one for one in (*args, *kwargs.values()) if not isinstance(one, _VALUES)]
    if len(tensors) != 1 or type(tensors[0]) not in PLAIN_TYPES:
        return None
    hidden: Tensor = tensors[0]
    has_tokens = is_strided(hidden) and hidden.is_floating_point() and hidden.dim() >= 2 and hidden.numel() > 0
    return hidden if has_tokens else None


def tile_length(hidden: Tensor, tile: int | Literal["auto"]) -> int:
    """Return the tokens of a tile. ``"auto"``: at least 1,024 rows, and as many as a token has numbers (ALST)."""
    if tile != "auto":
        return tile
    num_rows, width = hidden.shape[:-1].numel(), hidden.shape[-1]
    return -(-hidden.shape[-2] // -(-num_rows // max(width, _FEWEST_ROWS)))


_Window = Callable[[Tensor], Tensor]  # returns the tile's part of a tensor
_Take = Callable[[list[Tensor], list[Tensor], _Window], None]  # gets input and parameters of a tile, and its result


@dataclass
class TiledCall:
    """Runs a call tile by tile, twice. Holds none of its tensors, but the module's state until the backward."""

    body: Body
    tile: int
    name: str  # of the module, for messages
    state: ForwardState | None = None  # from which each run goes tile by tile; ``None`` without gradients
    samples: SavedSamples | None = None  # of what the forward saves for backward; ``None`` in calls not compared

    def run(
        self, tensors: tuple[Tensor, ...], needs: Sequence[bool], samples: SavedSamples | None, take: _Take
    ) -> None:
        """Call ``take`` for each tile. Parameters are others, lest autocast keeps casts of these."""
        hidden, pairs = tensors[0], zip(tensors[1:], needs[1:], strict=True)
        parameters = [one.detach().requires_grad_(need) for one, need in pairs]
        dim, num_tokens = hidden.dim() - 2, hidden.shape[-2]

        def pack(tensor: Tensor) -> Tensor:
            if samples is not None:
                samples.take(tensor)
            return tensor.detach()  # else a result would hold its own node

        def run() -> None:
            for start in range(0, num_tokens, self.tile):
                window = partial(torch.narrow, dim=dim, start=start, length=min(self.tile, num_tokens - start))
                whole = window(hidden).contiguous()  # in one piece: modules make views of it
                part = whole.detach().requires_grad_(needs[0])
                with nullcontext() if samples is None else saved_tensors_hooks(pack, Tensor.detach):
                    results = [self.body.run(part)]
                take([part, *parameters], results, window)
                del part, whole, results  # lest they are there while the next tile runs

        self.body.having(dict(zip(self.body.parameters_by_name, parameters, strict=True)), run)


def _add_gradients(
    found: list[Any], gradient: Tensor, leaves: list[Tensor], results: list[Tensor], window: _Window
) -> None:
    """Put the gradient of a tile's input in its place, and add up those of parameters: in float32 what is in 16 bit."""
    if not results[0].requires_grad:
        return
    end = get_gradient_edge(results.pop())  # nobody reads the result
    wanted = {place: leaf for place, leaf in enumerate(leaves) if leaf.requires_grad}
    with private.without_autocast():  # as backwards run, also of an fp32 region
        parts: Sequence[Tensor | None] = torch.autograd.grad(
            [end], [*wanted.values()], [window(gradient)], allow_unused=True
        )
    for place, part in zip(wanted, parts, strict=True):
        if part is None:
            continue
        if place == 0:
            window(found[0]).copy_(part)
        elif found[place] is not None:
            found[place].add_(part)
        else:  # a copy: what autograd returns may be shared
            dtype = torch.float32 if part.dtype in _LOW else part.dtype
            found[place] = part.to(dtype, copy=True, memory_format=torch.contiguous_format)


class _Tiled(torch.autograd.Function):
    """One node for all tiles: the hooks of DDP and FSDP2 see one gradient of each parameter."""

    @staticmethod
    def forward(ctx: Any, call: TiledCall, *tensors: Tensor) -> Tensor:
        """Run each tile without a gradient; or with one, of which samples are taken and nothing is kept."""
        ctx.call = call
        ctx.save_for_backward(*tensors)
        dim = tensors[0].dim() - 2
        outputs: list[Tensor] = []

        def take(leaves: list[Tensor], results: list[Tensor], window: _Window) -> None:
            result = results[0].detach()
            if not outputs:
                outputs.append(result.new_zeros((*result.shape[:dim], tensors[0].shape[dim], *result.shape[dim + 1 :])))
            window(outputs[0]).copy_(result)

        # Autocast keeps casts of what needs a gradient, which would serve nobody else.
        needs = [need and call.samples is not None for need in ctx.needs_input_grad[1:]]
        with torch.set_grad_enabled(call.samples is not None):
            call.run(tensors, needs, call.samples, take)
        if call.state is not None:
            call.state.settle()
        if call.samples is not None:
            call.samples.settle()
            torch.clear_autocast_cache()
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("TokenTiling does not support gradients of gradients (create_graph=True). Leave it out.")
        tensors, call, needs = ctx.saved_tensors, ctx.call, ctx.needs_input_grad[1:]
        if not private.retains_graph():
            ctx.call = None  # its state holds what the module held
        samples = SavedSamples(first=call.samples) if call.samples is not None else None
        found: list[Any] = [torch.zeros_like(tensors[0]) if needs[0] else None, *[None] * (len(tensors) - 1)]
        with exact_only, torch.enable_grad():
            call.state.run(partial(call.run, tensors, needs, samples, partial(_add_gradients, found, gradient)))
        if samples is not None and (difference := samples.difference()) is not None:
            raise divergence_error(call.name, difference, "Leave it out with TokenTiling(layers=...).")
        return None, *(sum_ if sum_ is None else sum_.to(one.dtype) for sum_, one in zip(found, tensors, strict=True))


_KEY = "_token_tiling"
_MIXING = (private.BatchNormBase, private.InstanceNormBase, nn.MultiheadAttention, nn.RNNBase)

_SETTINGS = frozenset((bool, int, str, type(None)))
_MAX_VERDICTS = 32
"""A proof takes several runs: for further settings, such as a counter, a module runs plain."""
_in_estimates: dict[Any, tuple[bool, str]] = {}


@dataclass
class _State:
    name: str
    tile: int | Literal["auto"]
    error: type[Exception] | None
    verdicts: dict[Any, tuple[bool, str]] = field(default_factory=dict)  # by the kind of a call, and settings
    learned: ForwardFacts = field(default_factory=ForwardFacts)
    num_calls: Counter[bool] = field(default_factory=Counter)  # with gradients; in a backward, of a checkpoint, or not


class TilingHandle(Swaps):
    """Undoes :func:`apply_token_tiling`."""

    def __init__(self) -> None:
        super().__init__(_KEY)

    def verdicts(self) -> dict[str, tuple[bool, str]]:
        """Whether each module that was asked runs in tiles, and why not, or how exactly."""
        states = [vars(module)[_KEY] for module in self.modules]
        return {state.name: verdict for state in states for verdict in state.verdicts.values()}


def apply_token_tiling(
    model: nn.Module,
    layers: LayerPattern | Sequence[LayerPattern] = "auto",
    tile: int | Literal["auto"] = "auto",  # tokens of each sequence at a time; see ``tile_length``
    *,
    error: type[Exception] | None = None,  # raised in the first call of a layer that was named and cannot run in tiles
) -> TilingHandle:
    """Let modules of ``model`` that treat tokens alone run in tiles.

    ``"auto"`` takes the outermost modules that are proven to treat tokens alone and compute in several operations.
    """
    if isinstance(layers, str) and layers == "auto":
        modules = name_layers(model)
        names = {module: name for name, module in reversed(modules.items())}  # the first ones
        chosen = {names[module]: module for module in modules.values() if _is_candidate(module)}
        error = None
    else:
        chosen = {layer.name: layer.module for layer in select_layers(model, layers).layers}
    handle = TilingHandle()
    with handle.all_or_none():
        for name, module in chosen.items():
            handle.add(module, _State(name, tile, error), _run)
    return handle


def _is_candidate(module: nn.Module) -> bool:
    is_composite = any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")
    has_weights = next(module.parameters(), None) is not None  # else a metric, a loss, a part of what is asked itself
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return is_composite and has_weights and not has_no_forward(module) and not is_scripted


def _run(module: nn.Module, state: _State, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    is_left_alone = _is_inside.get() or is_transformed() or is_in_selective_checkpoint()
    # In parametrize.cached() tiles would share weights.
    if torch.compiler.is_compiling() or is_left_alone or private.is_parametrization_cached():
        return original(*args, **kwargs)
    hidden, is_alone, reason = find_hidden(args, kwargs), False, "does not get one floating-point tensor of tokens"
    if hidden is not None:
        tile = tile_length(hidden, state.tile)
        if tile >= hidden.shape[-2]:
            return original(*args, **kwargs)
        body = Body(module, original, args, kwargs)
        is_alone, reason = _ask(module, state, body, hidden)
    if hidden is None or not is_alone:
        if state.error is not None and reason:
            way_out = "Leave it out, or use layers='auto'."
            raise state.error(f"TokenTiling(layers): {state.name} cannot be tiled: it {reason}. {way_out}")
        return original(*args, **kwargs)
    tiled = TiledCall(body, tile, state.name)
    if torch.is_grad_enabled():
        state.num_calls[is_in_backward()] += 1
        tiled.state = ForwardState((module,), state.learned, (hidden.device,))
        tiled.samples = SavedSamples(module.buffers()) if is_due(state.num_calls[is_in_backward()]) else None
    del args, kwargs
    return _Tiled.apply(tiled, hidden, *body.parameters_by_name.values())  # type: ignore[no-untyped-call]


def _ask(module: nn.Module, state: _State, body: Body, hidden: Tensor) -> tuple[bool, str]:
    if reason := _structural_reason(module):
        state.verdicts[reason] = False, reason
        return state.verdicts[reason]
    values = (value for part in module.modules() for value in (part, *vars(part).values()))
    # What may decide whether it mixes tokens: classes, modes, flags, functions, the adapter in use.
    key = (torch.is_grad_enabled(), hidden.dim(), body.place, *map(_setting, body.values), *map(_setting, values))
    known: dict[Any, tuple[bool, str]] = state.verdicts
    if not have_values(hidden):  # in an estimate: layers of one kind, in this and other estimates, are asked once
        key += tuple(one.shape for one in (*module.parameters(), *module.buffers()))
        known = _in_estimates
    if len(state.verdicts) >= _MAX_VERDICTS and key not in state.verdicts:
        return False, f"has more than {_MAX_VERDICTS} settings, such as a counter"
    if key not in known:
        known[key] = prove(module, body, hidden)
    state.verdicts[key] = known[key]
    return known[key]


def _setting(value: Any) -> Any:
    kind = type(value)
    if kind in _SETTINGS:
        return value
    return bool(value) if kind is float else value.__code__ if kind is FunctionType else kind


def _structural_reason(module: nn.Module) -> str:
    """What values need not be asked for. Hooks come and go."""
    for name, part in module.named_modules():
        if isinstance(part, _MIXING):
            return f"has a {type(part).__name__}"
        if name and private.has_hooks(part, private.SEE_INPUT):
            return f"has a hook on {name} (of FSDP2, or yours), which would see tiles"
    return ""


DRAWS = frozenset(["bernoulli_", "bernoulli", "rand", "rand_like", "randn", "randn_like", "uniform_", "normal_"])
_NUM_TOKENS = 64  # that are looked at
_NUM_RANDOM_TOKENS = 8  # in estimates
_MOST_RANDOM_NUMBERS = 1 << 28  # of a tensor: 1 GiB
_DROPOUT = torch.ops.aten.native_dropout.default
_MAY_REACH_FAR = frozenset(["convolution", "conv1d", "conv2d", "conv3d", "roll"])
_FEW_BITS = 1e-4  # machine epsilons above are of 16 bit


class NotAlone(Exception):  # noqa: N818 - a reason
    """Says why a module does not treat tokens alone."""


def have_values(tensor: Tensor) -> bool:
    """Whether this is no tensor of an estimate."""
    return type(tensor) in REAL_TYPES and not tensor.is_meta


def prove(module: nn.Module, body: Body, hidden: Tensor) -> tuple[bool, str]:
    """Return whether ``module`` treats tokens alone, and why not, or how exactly; ``""`` if random numbers failed."""
    try:
        with without_modes():  # who counts operators sees none of these
            return True, _compare(_Runs(module, body, hidden))
    except NotAlone as why:
        return False, str(why)
    except Exception as error:  # code of others, on fewer tokens than it may know
        return False, f"fails on a sample of its tokens ({type(error).__name__})" if have_values(hidden) else ""


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
        if name in _MAY_REACH_FAR or name.startswith("_scaled_dot_product"):  # beyond the sampled tokens
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
    """Runs of a module on some of its tokens, each from the state it has now. They leave no trace."""

    def __init__(self, module: nn.Module, body: Body, hidden: Tensor) -> None:
        self._module, self._body = module, body
        self._devices = {one.device for one in (hidden, *module.parameters())}
        self.dim, num_tokens = hidden.dim() - 2, hidden.shape[-2]
        replaced: dict[str, Tensor] = {**body.parameters_by_name}
        if have_values(hidden):
            chosen = torch.linspace(0, num_tokens - 1, min(num_tokens, _NUM_TOKENS) // 2 * 2, device=hidden.device)
            self.hidden = hidden.detach().index_select(self.dim, chosen.long())
            values = [one.detach() if one.any() else _randomized([one])[0].to(one) for one in replaced.values()]
        else:
            replaced |= dict(body.named_buffers())
            few = hidden.narrow(self.dim, 0, min(num_tokens, _NUM_RANDOM_TOKENS) // 2 * 2)
            self.hidden, *values = _randomized([few, *replaced.values()])
        self._replaced = dict(zip(replaced, values, strict=True))  # parameters, and buffers in estimates

    def run(self, order: Tensor, nan_at: int | None = None) -> tuple[list[Tensor], list[int]]:
        """Return the result for the tokens at ``order`` and the input's gradient, and how much randomness was drawn.

        Both begin with tokens. With a token that is NaN nothing needs a gradient.
        """
        state = ForwardState((self._module,), ForwardFacts(), self._devices)
        work = partial(self._body.having, self._replaced, partial(self._run, state, order, nan_at))
        # Of a graph, a checkpoint around it knows nothing; and a result would hold itself.
        with saved_tensors_hooks(Tensor.detach, Tensor.detach), _RandomNumberWatch() as watch:
            found, leaf = state.run(work)
        if leaf() is not None:
            gc.collect()  # it may be no more than a cycle
        if leaf() is not None:
            raise NotAlone("stores something of its call outside itself, such as a loss")
        return [one.movedim(self.dim, 0) for one in found], watch.num_drawn

    def _run(self, state: ForwardState, order: Tensor, nan_at: int | None) -> tuple[list[Tensor], "ref[Tensor]"]:
        """Return result and gradient, and the input, which lives as long as the graph."""
        leaf = self.hidden.index_select(self.dim, order)
        if nan_at is not None:
            leaf.select(self.dim, nan_at).fill_(torch.nan)
        leaf.requires_grad_(torch.is_grad_enabled() and nan_at is None)
        before = {key: [(one, _copy(one)) for one in leaves] for key, leaves in _contents(self._module).items()}
        result = self._call(leaf)
        found = [result.detach()]
        if result.requires_grad:  # of gradients that differ from token to token
            gradients: Sequence[Tensor | None] = torch.autograd.grad(result, leaf, found, allow_unused=True)
            found += [one for one in gradients if one is not None]
        for key, leaves in _contents(self._module).items():
            olds = before.get(key, [])
            if len(leaves) != len(olds) or any(map(_is_changed, leaves, olds)):
                raise NotAlone(f"stores something of its call in {key[0]!r}")
        if state.settle():
            raise NotAlone("draws random numbers from Python or NumPy")
        return found, ref(leaf)

    def _call(self, leaf: Tensor) -> Tensor:
        hidden = leaf.clone()  # which may be written, unlike a leaf
        held = [hidden, *self._replaced.values()]
        versions = [*map(version_of, held)]
        result = self._body.run(hidden)
        if versions != [*map(version_of, held)] or not _is_same(hidden.detach(), leaf.detach()):
            raise NotAlone("writes to its input")
        if not isinstance(result, Tensor) or not result.is_floating_point():
            raise NotAlone("returns something other than one floating-point tensor")
        if result.dim() <= self.dim or result.shape[self.dim] != leaf.shape[self.dim]:
            raise NotAlone("returns a tensor with another number of tokens than its input")
        if result.requires_grad and not leaf.requires_grad:
            raise NotAlone("uses a tensor that requires a gradient and is neither its parameter nor its input")
        return result


def _contents(module: nn.Module) -> dict[tuple[str, int], list[Any]]:
    """What attributes hold, by name and submodule. Parameters are looked at elsewhere."""
    members = ((part, name, value) for part in module.modules() for name, value in vars(part).items())
    return {(name, id(part)): private.tree_leaves(value) for part, name, value in members if name != private.PARAMETERS}


def _copy(leaf: Any) -> Tensor | None:
    return leaf.detach().clone() if type(leaf) is Tensor and not leaf.is_meta else None


def _is_changed(leaf: Any, old: tuple[Any, Tensor | None]) -> bool:
    return leaf is not old[0] or (old[1] is not None and not _is_same(leaf.detach(), old[1]))


def _randomized(tensors: Collection[Tensor]) -> list[Tensor]:
    """Return others of these shapes, all of one piece of random numbers: as large as the largest tensor."""
    most = max((one.numel() for one in tensors), default=0)
    if most > _MOST_RANDOM_NUMBERS:
        raise MemoryError
    numbers = torch.randn(most, device="cpu", generator=torch.Generator().manual_seed(0))
    pairs = [(numbers[: one.numel()].view(one.shape), one) for one in tensors]
    return [made if one.is_floating_point() else (made > 0).to(one.dtype) for made, one in pairs]


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are bitwise identical, with NaN in the same places."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _compare(runs: _Runs) -> str:
    num, device = runs.hidden.shape[runs.dim], runs.hidden.device
    every = torch.arange(num, device=device)
    fewer = torch.randperm(num, generator=torch.Generator().manual_seed(0))[: num // 2].to(device)
    (whole, *gradient), num_drawn = runs.run(every)
    (part, *gradient_of_part), num_drawn_of_part = runs.run(fewer)
    if [2 * one for one in num_drawn_of_part] != num_drawn:
        raise NotAlone("draws random numbers for all tokens at once")
    is_exact = _agree(whole[fewer], part, "mixes tokens, or depends on their positions")
    place = num // 2 - 1
    (other,), _ = runs.run(every, place)
    if (other.isnan() != whole.isnan())[every != place].any():
        raise NotAlone("mixes tokens")
    for one, of_part in zip(gradient, gradient_of_part, strict=True):
        _agree(one[fewer], of_part, "mixes tokens in its backward", slack=10)
    return "exact" if is_exact else "lossless"


def _agree(one: Tensor, other: Tensor, why: str, slack: int = 1) -> bool:
    """Return whether both are bitwise identical; raise ``NotAlone`` if they differ by more than rounding."""
    if _is_same(one, other):
        return True
    kind = one.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    epsilon = max(torch.finfo(one.dtype).eps, torch.finfo(torch.get_autocast_dtype(kind)).eps if is_cast else 0)
    tolerance = slack * epsilon * (2 if epsilon > _FEW_BITS else 100)
    if kind == "mps":  # which has no float64
        one, other = one.cpu(), other.cpu()
    if one.shape != other.shape or not (one.double() - other.double()).norm() <= tolerance * other.double().norm():
        raise NotAlone(why)
    return False
