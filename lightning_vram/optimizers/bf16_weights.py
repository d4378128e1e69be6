"""bf16 weights with the remainder that training needs, for any optimizer of ``torch.optim``.

A step of an optimizer runs in fp32, on one chunk of the parameters after another. The bytes per parameter, with AdamW:

==================  ======  ========  ====  =====  =====  ==================================================
scheme              weight  gradient  rest  state  total  result
==================  ======  ========  ====  =====  =====  ==================================================
fp32                4       4         0     8      16
bf16+master         2       2         4     8      16     bit-exact steps
bf16+split          2       2         2     8      14     bit-exact steps
bf16+kahan          2       2         2     4      10     weights of 16 significant bits, states of 8
bf16+stochastic     2       2         0     4      8      both of 8, stochastic rounding
==================  ======  ========  ====  =====  =====  ==================================================

Split flushes weights below 2^-134 to zero. Forward and backward see the nearest bf16 number. Between two, master shows
the even one, as autocast does, and split the one away from zero: a different one for one weight of 131072. So both take
the same bit-exact steps on the same gradients, while whole runs differ by roundings. A step needs 8 more bytes (16 with
Kahan and stochastic rounding) for each weight of the current chunk: four million weights, or one larger parameter.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from functools import partial
from itertools import chain, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Adagrad, Optimizer

from lightning_vram.argument_checks import check_choice
from lightning_vram.core.tensors import properties
from lightning_vram.core.tensors.codecs import add_compensation_, compensate_, join_, rounded_by_place, seed_of, split_
from lightning_vram.core.tensors.properties import is_strided
from lightning_vram.memory.storages import storage_address
from lightning_vram.memory.tracking.tracker import forget_optimizer_tensors, register_optimizer_tensors
from lightning_vram.optimizers import step_round as rounds
from lightning_vram.optimizers.moment_forms import HeldStates, Seed, UpdateCheck
from lightning_vram.private_names.dispatcher import copy_each, is_traceable_wrapper_subclass
from lightning_vram.private_names.torch import forward_pre_hooks

_LOW_PRECISION = (torch.bfloat16, torch.float16)
SCHEMES = ("bf16+master", "bf16+split", "bf16+kahan", "bf16+stochastic")
_NUM_WRITES, _NUM_LOOKS = 3, 8  # so many writes to a frozen parameter in fewer steps are refused
_KINDS = {kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)} - {Optimizer}


def check_parameter(parameter: nn.Parameter) -> None:
    """Refuse a parameter that cannot be converted in place without loss."""
    kind: Any = type(parameter)
    data: Any = parameter.data
    has_no_values = isinstance(parameter, UninitializedParameter) or parameter.is_meta
    if has_no_values or is_traceable_wrapper_subclass(data) or parameter.dtype not in (torch.float32, *_LOW_PRECISION):
        raise ValueError(
            f"A {parameter.dtype} parameter of type {kind.__name__} on {parameter.device} cannot be stored in "
            "bfloat16: only plain tensors of float32, float16 or bfloat16 can. Initialize lazy and meta parameters "
            "first, and leave quantized ones out. With FSDP2 give fully_shard(mp_policy=MixedPrecisionPolicy("
            "param_dtype=torch.bfloat16)) instead."
        )


def check_memory(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse different parameters that share memory: each would get its own."""
    spans: dict[Any, list[tuple[int, int, torch.Size]]] = defaultdict(list)
    for parameter in parameters:
        if is_strided(parameter) and parameter.numel() and properties.is_dense(parameter):
            start, end = int(parameter.storage_offset()), int(parameter.storage_offset()) + parameter.numel()
            spans[parameter.device, storage_address(parameter)].append((start, end, parameter.shape))
    for alike in spans.values():
        alike.sort(key=lambda span: span[:2])
        for (_, end, one), (start, _, other) in pairwise(alike):
            if start < end:
                raise ValueError(
                    f"Two parameters of shapes {tuple(one)} and {tuple(other)} that share memory cannot be stored in "
                    "bfloat16: each would get its own. Tie them as one parameter (head.weight = embedding.weight), not "
                    "by their data."
                )


def iterate_computing(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that compute a weight, as parametrizations do: that needs fp32, and their buffers are fp32."""
    for part in module.modules():
        if is_parametrized(part):
            yield part
            yield from part.get_submodule("parametrizations").modules()
        elif any(isinstance(hook, SpectralNorm | WeightNorm) for hook in forward_pre_hooks(part).values()):
            yield part


def refuse_lost_updates(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers of ``torch.optim`` that would step 16-bit weights; others are trusted."""
    for optimizer in optimizers:
        if not rounds.steps_like(type(optimizer), _KINDS):  # may have no defaults
            continue
        rounded = [p for p in rounds.iterate_parameters(optimizer) if p.requires_grad and p.dtype in _LOW_PRECISION]
        if rounded:
            dtypes = " and ".join(sorted({str(parameter.dtype) for parameter in rounded}))
            raise ValueError(
                f"{type(optimizer).__name__} would train {len(rounded)} parameters that are {dtypes}, and lose every "
                "update below half a unit in the last place (in a test the loss ended at .105 instead of .0266). Use "
                'LeanMixedPrecision("bf16", parameters="bf16+split"), one of its other schemes, or fp32 weights.'
            )


CHUNK_ELEMENTS = 2**22  # 16 MiB in fp32


class WeightChunk:
    """Stores parameters on one device, all frozen or none, as bf16 in place, until :meth:`restore`.

    ``rest`` is what they lack: flat, one element per weight, or ``None``. master: an fp32 copy, 4 bytes, exact. split:
    the lower half of the fp32 pattern, 2 bytes, exact. kahan: the rounding error in bf16, 2 bytes, 16 significant bits
    together. stochastic: nothing, weights are stochastically rounded.

    The rest of frozen parameters is in host memory, exact for every scheme. Once they are trained, it moves to the
    device at the first step. ``number`` seeds the rounding.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], scheme: str, number: int) -> None:
        self.parameters, self.number = tuple(parameters), number
        self.rest: Tensor | None = None
        self._trained_scheme = scheme
        # Split rounds ties differently from autocast, which master must not.
        self._resting_scheme = "bf16+master" if scheme == "bf16+master" else "bf16+split"
        self._dtypes = tuple(parameter.dtype for parameter in parameters)
        self._writes: list[int] = []  # to each parameter, once they are counted
        self.is_resting = not parameters[0].requires_grad
        exact = upcast_flat(parameters, "cpu" if self.is_resting else parameters[0].device)
        for parameter in parameters:
            _change_dtype(parameter, torch.bfloat16)
        self._set(exact)

    @property
    def scheme(self) -> str:
        """How the weights are stored now."""
        return self._resting_scheme if self.is_resting else self._trained_scheme

    def read(self) -> Tensor:
        """Return exact weights: flat fp32, on the device of the rest, read-only."""
        weights = upcast_flat(self.parameters, self.parameters[0].device if self.rest is None else self.rest.device)
        if self.rest is not None and self.scheme == "bf16+master":
            # A weight that differs from the rounded copy was written by user code.
            return torch.where(weights == self.rest.bfloat16(), self.rest, weights, out=self.rest)
        if self.rest is not None:
            (join_ if self.scheme == "bf16+split" else add_compensation_)(weights, self.rest)
        return weights

    def check(self) -> None:
        """Refuse parameters whose dtype was changed."""
        for parameter in self.parameters:
            if parameter.dtype is not torch.bfloat16:
                raise RuntimeError(
                    f"A parameter of shape {tuple(parameter.shape)} is {parameter.dtype} and no longer "
                    "torch.bfloat16: do not convert the module during the fit."
                )

    def read_for_step(self) -> Tensor:
        """Check, and return exact weights on the device of the parameters, to change in place for :meth:`write`."""
        self.check()
        device = self.parameters[0].device
        if self.is_resting:
            exact = self.read().to(device)
            self.rest, self.is_resting = None, False
            self._set(exact)
        elif self.rest is not None:
            self.rest = self.rest.to(device)  # the module may have been moved
        return self.read()

    def write(self, exact: Tensor, seed: int, stepped: Collection[nn.Parameter]) -> None:
        """Store stepped weights. Others are not written: a graph may need them."""
        views = views_like(self._split(exact, seed), self.parameters)
        pairs = [pair for pair in zip(self.parameters, views, strict=True) if pair[0] in stepped]
        copy_each([parameter.detach() for parameter, _ in pairs], [view for _, view in pairs])

    def take(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Set exact weights of some parameters."""
        self.check()
        exact = self.read()
        for parameter, view in zip(self.parameters, views_like(exact, self.parameters), strict=True):
            if parameter in values:
                view.copy_(values[parameter])
        self._set(exact)

    def lend(self, values: Sequence[Tensor]) -> Callable[[], None]:
        """Set exact values until the next step, or until the returned function restores the bits from before."""
        weights = [parameter.detach().to("cpu", copy=True) for parameter in self.parameters]
        before = self.rest, self.is_resting
        self.rest, self.is_resting = None, True
        self._set(upcast_flat(values, "cpu"))

        def take_back() -> None:
            self.rest, self.is_resting = before
            self._show(weights)

        return take_back

    def find_written(self) -> list[nn.Parameter]:
        """Return the frozen parameters that other code has written since the last call."""
        if not self.is_resting:
            return []
        for parameter in self.parameters:
            properties.count(parameter)
        before, self._writes = self._writes, [properties.count_writes(parameter) for parameter in self.parameters]
        changes = zip(self.parameters, before, self._writes, strict=bool(before))
        return [parameter for parameter, known, now in changes if now != known]

    def restore(self) -> None:
        """Restore dtype and exact weights of the parameters that are still bf16."""
        views = views_like(self.read(), self.parameters)
        for parameter, dtype, values in zip(self.parameters, self._dtypes, views, strict=True):
            properties.stop_counting(parameter)
            if parameter.dtype is torch.bfloat16:
                _change_dtype(parameter, dtype)
                parameter.copy_(values)
        self.rest = None

    def _split(self, exact: Tensor, seed: int | None = None) -> Tensor:
        """Store the rest of exact weights (flat fp32), and return bf16 weights; ``seed`` of rounding, if any."""
        if self.scheme == "bf16+master":
            self.rest = exact
        elif self.scheme == "bf16+split":
            self.rest = torch.empty_like(exact, dtype=torch.int16) if self.rest is None else self.rest
            split_(exact, self.rest)
        elif self.scheme == "bf16+kahan":
            self.rest = torch.empty_like(exact, dtype=torch.bfloat16) if self.rest is None else self.rest
            return compensate_(exact, self.rest)
        elif seed is not None:  # otherwise the copy to bf16 rounds to nearest
            return rounded_by_place(exact, 0, seed)
        return exact

    def _set(self, exact: Tensor) -> None:
        self._show(views_like(self._split(exact), self.parameters))

    def _show(self, values: Sequence[Tensor]) -> None:
        copy_each([parameter.detach() for parameter in self.parameters], values)
        if self._writes:
            self._writes = [properties.count_writes(parameter) for parameter in self.parameters]


def make_chunks(parameters: Iterable[nn.Parameter], scheme: str) -> list[WeightChunk]:
    """Convert floating parameters to bf16, in place, in chunks of ``CHUNK_ELEMENTS`` weights or one larger one."""

    def key(parameter: nn.Parameter) -> tuple[str, bool]:
        return str(parameter.device), parameter.requires_grad

    batches: list[list[nn.Parameter]] = []
    for _, alike in groupby(sorted(parameters, key=key), key):
        num_free = -1
        for parameter in alike:
            if parameter.numel() > num_free:
                batches.append([])
                num_free = CHUNK_ELEMENTS
            batches[-1].append(parameter)
            num_free -= parameter.numel()
    return [WeightChunk(batch, scheme, number) for number, batch in enumerate(batches)]


def _list_rests(chunks: Iterable[WeightChunk]) -> list[Tensor]:
    return [chunk.rest for chunk in chunks if chunk.rest is not None]


def upcast_flat(tensors: Sequence[Tensor], device: torch.device | str) -> Tensor:
    """Copy tensors into one flat fp32 tensor on ``device``."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=torch.float32, device=device)
    copy_each(views_like(flat, tensors), [tensor.detach() for tensor in tensors])
    return flat


def views_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of ``flat`` in the shapes of ``tensors``."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _change_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Give a parameter new, uninitialized memory, and convert its gradient."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    parameter.grad = None if gradient is None else gradient.to(dtype)


def floating(state: rounds.State, shape: torch.Size | None = None) -> list[str]:
    """Name the floating tensors of a state, of a ``shape`` or any but a scalar's: step counts keep their precision."""
    tensors = [key for key, value in state.items() if isinstance(value, Tensor) and value.dim()]
    return [key for key in tensors if state[key].is_floating_point() and shape in (None, state[key].shape)]


def convert_states(
    optimizer: Optimizer, parameters: Container[nn.Parameter], dtype: torch.dtype | None, full_dtype: torch.dtype | None
) -> None:
    """Change the dtype of floating state tensors, to ``full_dtype`` if elementwise; ``None``: as the parameter."""
    for parameter in rounds.iterate_parameters(optimizer):
        if parameter not in parameters or parameter not in optimizer.state:
            continue
        state: rounds.State = optimizer.state[parameter]
        full = floating(state, parameter.shape)
        for key in floating(state):
            value = state[key].to((full_dtype if key in full else dtype) or parameter.dtype)
            is_ordered = key in full and value.layout is torch.strided  # as the weights, for fused kernels
            state[key] = properties.stored_like(value, parameter) if is_ordered else value


class UpcastStates:
    """Replaces elementwise bf16 states by fp32 ones until :meth:`round`: to nearest, a decay of .999 would be lost."""

    def __init__(self, states: Iterable[tuple[torch.Size, rounds.State]]) -> None:
        slots = [(state, key) for shape, state in states for key in floating(state, shape)]
        self._bf16 = [state[key] for state, key in slots]
        self._flat = upcast_flat(self._bf16, self._bf16[0].device) if slots else torch.empty(0)
        self._fp32 = views_like(self._flat, self._bf16) if slots else []
        for (state, key), fp32 in zip(slots, self._fp32, strict=True):
            state[key] = fp32

    def round(self, states: Iterable[tuple[torch.Size, rounds.State]], seed: Seed) -> None:
        """Put the bf16 tensors back, stochastically rounded, and round new states, too."""
        if self._fp32:
            copy_each(self._bf16, views_like(rounded_by_place(self._flat, 0, seed_of(*seed, 1)), self._bf16))
        lent = {id(fp32): bf16 for fp32, bf16 in zip(self._fp32, self._bf16, strict=True)}
        slots = [(state, key) for shape, state in states for key in floating(state, shape)]
        for number, (state, key) in enumerate(slots):
            value = state[key]
            if id(value) not in lent:
                bf16 = torch.empty_like(value, dtype=torch.bfloat16)
                rounded_by_place(
                    properties.flat_as_stored(value), 0, seed_of(*seed, 2 + number), properties.flat_as_stored(bf16)
                )
                lent[id(value)] = bf16
            state[key] = lent[id(value)]


def _make_proxies(chunk: WeightChunk, exact: Tensor, members: Sequence[rounds.Member]) -> list[nn.Parameter]:
    """Return fp32 proxies with gradients, contiguous as they are, over the exact weights of a chunk."""
    views = dict(zip(chunk.parameters, views_like(exact, chunk.parameters), strict=True))
    dense = [one.gradient for one in members if one.gradient.layout is torch.strided]
    upcast = iter(views_like(upcast_flat(dense, exact.device), dense) if dense else ())
    gradients = (
        next(upcast) if one.gradient.layout is torch.strided else one.gradient.to(exact.device, torch.float32)
        for one in members
    )
    return [rounds.make_proxy(views[one.parameter], gradient) for one, gradient in zip(members, gradients, strict=True)]


class LeanParameters(rounds.StepTakeOver):
    """Stores floating parameters as bf16 until :meth:`restore`: the same objects, with other memory.

    The remainder of a frozen parameter is in host memory. Values that user code writes to a parameter are rounded:
    zeros and NaNs exact, others to half a unit in the last place of bf16, because split and Kahan add their remainder.
    Ranks with the same weights and gradients have the same weights after a step; the global random state is unused.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], scheme: str, names: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        check_choice("LeanParameters(scheme)", scheme, SCHEMES)
        unique = list(dict.fromkeys(parameters))
        unique = [p for p in unique if isinstance(p, UninitializedParameter) or p.is_floating_point()]
        for parameter in unique:
            check_parameter(parameter)
        check_memory(unique)
        with torch.no_grad():
            self._chunks = make_chunks(unique, scheme)
        self._places = places = {parameter: chunk for chunk in self._chunks for parameter in chunk.parameters}
        has_bf16_states = scheme in ("bf16+kahan", "bf16+stochastic")
        self._dtypes = torch.float32, torch.bfloat16 if has_bf16_states else torch.float32  # of states: all, full-sized
        self._names = dict(names or {})
        self.num_steps = 0  # of all optimizers: it seeds the rounding
        self.check = UpdateCheck()  # of updates that rounding undoes
        self._has_stepped: set[int] = set()  # optimizers, by id, since frozen parameters were looked at
        self._num_looks = 0
        self._writes: defaultdict[nn.Parameter, deque[int]] = defaultdict(lambda: deque(maxlen=_NUM_WRITES))
        self._held = HeldStates(lambda parameter, state: set(state) - {"step"} if parameter in places else ())
        super().__init__()

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Step optimizers in fp32 from now on; refuse all if one with bf16 weights cannot step in chunks."""
        fresh = {one: rounds.why_not_steppable(one) for one in optimizers if one not in self._taken}
        for optimizer, objection in fresh.items():
            if objection is not None and self._has_ours(optimizer):
                raise ValueError(objection)
        for optimizer in (one for one, objection in fresh.items() if objection is None):
            for parameter in rounds.iterate_parameters(optimizer) if isinstance(optimizer, Adagrad) else ():
                state = optimizer.state.get(parameter)
                if parameter in self._places and state and not state["step"]:  # created from bf16 weights
                    initial = optimizer.defaults["initial_accumulator_value"]
                    state["sum"] = torch.full_like(state["sum"], initial, dtype=torch.float32)
            convert_states(optimizer, self._places, *self._dtypes)
            self._take(optimizer)
            self._handles += self._held.begin(optimizer, self._after_load)
            register_optimizer_tensors(optimizer, partial(_list_rests, self._chunks))  # self would keep it alive

    @torch.no_grad()
    def full_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a ``state_dict`` that can be loaded anywhere: with exact fp32 weights, in host memory.

        Equal copies of bf16 weights under the parameter's name are replaced, too. Shared weights remain shared.
        """
        names: dict[Any, list[str]] = {}
        for name, value in state_dict.items():
            is_strided = isinstance(value, Tensor) and value.layout is torch.strided
            if is_strided and not is_traceable_wrapper_subclass(value) and value.dtype is torch.bfloat16:
                named = self._names.get(name)
                owner = value if named is None or not _is_copy(value, named) else named
                names.setdefault(_memory(owner), []).append(name)
        full = copy(state_dict)  # with its metadata
        for parameters, values in self.exact_weights():
            for parameter, value in zip(parameters, values, strict=True):
                if keys := names.get(_memory(parameter)):
                    full.update(dict.fromkeys(keys, value.to("cpu", copy=True)))
            del value, values  # frees the chunk before the next is read
        return full

    def parameters(self) -> set[nn.Parameter]:
        """Return the parameters that are stored as bf16."""
        return set(self._places)

    def exact_weights(self) -> Iterator[tuple[tuple[nn.Parameter, ...], list[Tensor]]]:
        """Yield some parameters at a time, with exact fp32 weights: read-only, valid until the next, frozen on host."""
        for chunk in self._chunks:
            yield chunk.parameters, views_like(chunk.read(), chunk.parameters)

    @torch.no_grad()
    def take(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Set exact weights of some parameters, such as those of a checkpoint."""
        for chunk in dict.fromkeys(self._places[parameter] for parameter in values):
            chunk.take(values)

    @torch.no_grad()
    def lend(self, values: Mapping[nn.Parameter, Tensor]) -> Callable[[], None]:
        """Set exact fp32 values until the returned function is called; takes 4 bytes of host memory per weight."""
        undo = ExitStack()
        for chunk in self._chunks:
            if chunk.parameters[0] in values:
                undo.callback(chunk.lend([values[parameter] for parameter in chunk.parameters]))
        return undo.close

    def rests(self) -> list[Tensor]:
        """Return the remainders of bf16 weights: flat int16, bf16 or fp32, in the same order on all ranks."""
        return _list_rests(self._chunks)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the dtype of the parameters that are still bf16, with exact weights, and detach the optimizers."""
        taken = self.release()
        for chunk in self._chunks:
            chunk.restore()
        for optimizer in taken:
            forget_optimizer_tensors(optimizer)
            convert_states(optimizer, self._places, None, None)
        self._chunks = []
        self._places.clear()

    def _has_ours(self, optimizer: Optimizer) -> bool:
        return any(parameter in self._places for parameter in rounds.iterate_parameters(optimizer))

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        loss = None if closure is None else closure()
        if id(optimizer) in self._has_stepped or not self._has_stepped:  # once per round of all optimizers
            self._has_stepped.clear()
            self._refuse_frozen_writes()
        self._has_stepped.add(id(optimizer))
        self.num_steps += 1
        self.check.begin()
        step_round = rounds.StepRound(optimizer, is_on_host=False, contiguous=self._places)
        by_chunk: dict[WeightChunk | None, list[rounds.Member]] = {}
        for member in step_round.take_rest():
            by_chunk.setdefault(self._places.get(member.parameter), []).append(member)
        for chunk, members in by_chunk.items():
            # A call per chunk frees all of it before the next one.
            if chunk is None:
                step_round.run(members)
            else:
                self._step_chunk(step_round, chunk, members)
        return loss

    @torch.no_grad()
    def _step_chunk(self, step_round: rounds.StepRound, chunk: WeightChunk, members: Sequence[rounds.Member]) -> None:
        exact = chunk.read_for_step()
        before = exact.clone() if self.check.is_counting else None
        states = [dict(member.local_state) for member in members]
        shaped = [(member.shard.shape, state) for member, state in zip(members, states, strict=True)]
        shaped = shaped if torch.bfloat16 in self._dtypes else []
        seed = self.num_steps, chunk.number
        upcast = UpcastStates(shaped)
        try:
            step_round.step_proxies([one.group for one in members], _make_proxies(chunk, exact, members), states)
        finally:
            upcast.round(shaped, seed)
            for member, state in zip(members, states, strict=True):
                rounds.publish_state(member, state)
            stepped = None if before is None else exact.clone()
            # As in fp32, a step that fails half-way leaves what it has done.
            chunk.write(exact, seed_of(*seed, 0), {member.parameter for member in members})
        if before is not None and stepped is not None:
            self.check.count(before, stepped, chunk.read())

    def _refuse_frozen_writes(self) -> None:
        """Refuse frozen parameters that user code moves a little at every step, as momentum encoders do.

        bf16 loses such updates. Rare writes (loading, copying) are allowed: less than three in eight steps.
        """
        self._num_looks += 1
        for parameter in chain.from_iterable(chunk.find_written() for chunk in self._chunks):
            writes = self._writes[parameter]
            writes.append(self._num_looks)
            if len(writes) == _NUM_WRITES and writes[-1] - writes[0] < _NUM_LOOKS:
                names = [name for name, known in self._names.items() if known is parameter]
                raise RuntimeError(
                    f"The frozen parameter {names[0] if names else f'of shape {tuple(parameter.shape)}'} is written at "
                    "almost every step, and bfloat16 loses small changes: name its module in fp32_modules=[...]."
                )

    def _after_load(self, optimizer: Optimizer) -> None:
        for parameter, state in self._held.take():
            for key, value in state.items():
                is_tensor = isinstance(value, Tensor)
                optimizer.state[parameter][key] = value.to(parameter.device, copy=True) if is_tensor else value
        convert_states(optimizer, self._places, *self._dtypes)


def _is_copy(value: Tensor, parameter: nn.Parameter) -> bool:
    is_alike = value.dtype is parameter.dtype and value.shape == parameter.shape
    return is_alike and torch.equal(value.to(parameter.device).view(torch.int16), parameter.detach().view(torch.int16))


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, storage_address(tensor), tensor.storage_offset(), tensor.shape
