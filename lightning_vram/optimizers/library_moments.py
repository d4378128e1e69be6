"""Moments in the form of torchao or bitsandbytes, whose kernels step them on CUDA.

They stay until the compiled step of our own forms is measured next to them on a GPU (``tests.benchmarks.gpu_day``).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from typing_extensions import override

from lightning_vram.core.tensors.codecs import LowBitTensor, decoded
from lightning_vram.core.tensors.properties import is_shard
from lightning_vram.optimizers import step_round as rounds
from lightning_vram.optimizers.moment_forms import DIVISORS, StateForm
from lightning_vram.private_names.dispatcher import FakeTensor, current_dispatch_mode
from lightning_vram.private_names.torch import make_wrapper

Library = Literal["auto", "own", "torchao", "bitsandbytes"]
_UNKNOWN = ("amsgrad", "maximize", "fused", "capturable")  # settings that no library knows
_KEYS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class CodeMap:
    """The values of 256 codes (or 16, the first of two in a byte's upper half) at scale 1, ascending; the last is 1."""

    values: Tensor
    block_size: int

    @lru_cache  # noqa: B019
    def on(self, device: torch.device) -> Tensor:
        """Return the values on a device, which stay: there are a few maps for the life of the process."""
        return self.values.to(device)


class MappedTensor(LowBitTensor):
    """Codes: numbers of a map of 256 or 16, times the float32 scale of their block; always contiguous.

    torchao and bitsandbytes keep moments so (arXiv 2110.02861, 2309.01507); their kernels write to this memory.
    """

    scales: Tensor
    code_map: CodeMap

    def __new__(cls, records: Tensor, scales: Tensor, shape: Sequence[int], code_map: CodeMap) -> "MappedTensor":
        """Make a tensor that has no memory but ``records`` and ``scales``, both flat."""
        made: MappedTensor = make_wrapper(cls, shape, dtype=torch.float32, device=records.device)
        made.records, made.scales, made.code_map = records, scales, code_map
        made.bits, made.is_positive = 4 if len(code_map.values) == 16 else 8, bool(code_map.values[0] >= 0)
        return made

    @override
    def decode(self) -> Tensor:
        codes = self.records
        if self.bits == 4:
            codes = torch.stack([codes >> 4, codes & 15], dim=-1)
        numbers = self.code_map.on(self.device)[codes.flatten().int()]
        numbers *= self.scales.repeat_interleave(self.code_map.block_size)[: numbers.numel()]
        return numbers.view(self.shape)

    @override
    def take_over(self, numbers: Tensor) -> None:
        """Set the values from a float32 tensor; what :meth:`decode` returned to the same codes."""
        flat = decoded(numbers).detach().to(self.device, torch.float32).flatten()
        size, values = self.code_map.block_size, self.code_map.on(self.device)
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)
        middles = (values[1:] + values[:-1]) / 2
        scales = blocks.abs().amax(1, keepdim=True)
        codes = torch.bucketize(blocks / scales.masked_fill(scales == 0, 1), middles, out_int32=True)
        if not self.is_positive:
            # The map has 1, but not -1. Where that was nearest, decoded numbers tell a smaller scale than there was.
            guess = scales / -values[0]
            for likely in (guess, guess.nextafter(guess * 2), guess.nextafter(guess / 2)):
                others = torch.bucketize(blocks / likely.masked_fill(likely == 0, 1), middles, out_int32=True)
                is_it = (values[others] * likely == blocks).all(1, keepdim=True)
                codes, scales = torch.where(is_it, others, codes), torch.where(is_it, likely, scales)
        codes = codes.flatten()[: flat.numel()]
        self.records.copy_(codes[::2] << 4 | codes[1::2] if self.bits == 4 else codes)
        self.scales.copy_(scales.view(-1))

    @property
    @override
    def kind(self) -> tuple[Any, ...]:
        return self.code_map, self.shape

    @override
    def each(
        self, change: Callable[[Tensor], Tensor], shape: torch.Size | None = None, stride: Any = None
    ) -> LowBitTensor:
        shape = self.shape if shape is None else shape
        return MappedTensor(change(self.records), change(self.scales), shape, self.code_map)

    @override
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["records", "scales"], self.code_map

    @classmethod
    @override
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "MappedTensor":
        return cls(inner["records"], inner["scales"], size, context)


def empty_mapped(like: Tensor, code_map: CodeMap) -> MappedTensor:
    """Return one of zeros, of the shape and device of a contiguous tensor."""
    num_bytes = like.numel() // 2 if len(code_map.values) == 16 else like.numel()
    records = torch.zeros(num_bytes, dtype=torch.uint8, device=like.device)
    scales = torch.zeros(-(-like.numel() // code_map.block_size), device=like.device)
    return MappedTensor(records, scales, like.shape, code_map)


class LibraryForm(StateForm):
    """Moments in the form of a library, whose kernels step them.

    bitsandbytes has blocks of 256, of which the last one of a parameter may be smaller. torchao has blocks of 256 in 8
    bits and of 128 in 4, for parameters of whole blocks; amsgrad fails in torchao 0.18.
    """

    def __init__(self, library: Library, bits: int) -> None:
        super().__init__("8bit" if bits == 8 else "4bit", f"LowBitOptimizer(bits={bits})", bits)
        self.library = library

    def why_not(self, optimizer: Optimizer) -> str | None:
        """Return what it cannot step; ``None``: it can."""
        name, groups, is_ao = type(optimizer).__name__, optimizer.param_groups, self.library == "torchao"
        parameters = list(rounds.iterate_parameters(optimizer))
        reasons = {
            f"moments of {self.bits} bits": not is_ao and self.bits != 8,
            f"{name} whose betas a schedule moves, as each value would be compiled": (
                is_ao and any("max_momentum" in group for group in groups)  # of OneCycleLR and CyclicLR
            ),
            "sharded parameters": any(map(is_shard, parameters)),
            name: not rounds.steps_like(type(optimizer), (Adam, AdamW))
            or not (is_ao or all(group.get("decoupled_weight_decay") for group in groups)),
        }
        reasons |= {f"{name}({key}={group[key]!r})": True for group in groups for key in _UNKNOWN if group.get(key)}
        reasons |= {f"parameters on {p.device}, only on CUDA": True for p in parameters if p.device.type != "cuda"}
        return next((reason for reason, is_so in reasons.items() if is_so), None)

    @override
    def takes(self, parameter: nn.Parameter) -> bool:
        is_whole = self.library == "bitsandbytes" or parameter.numel() % self._map_for("exp_avg").block_size == 0
        return super().takes(parameter) and is_whole

    @override
    def holds(self, parameter: nn.Parameter) -> bool:
        return super().holds(parameter) and parameter.is_contiguous()

    @override
    def has(self, key: str, value: Tensor) -> bool:
        return isinstance(value, MappedTensor) and value.code_map is self._map_for(key)

    @override
    def empty(self, key: str, like: Tensor) -> MappedTensor:
        return empty_mapped(like, self._map_for(key))

    def _map_for(self, key: str) -> CodeMap:
        return _map_of(self.library, self.bits, key in DIVISORS)

    @torch.no_grad()
    def step(self, step_round: rounds.StepRound, members: Sequence[rounds.Member]) -> None:
        """Step members with moments in this form."""
        step_round.scale(members)
        step = _step_as_torchao if self.library == "torchao" else _step_as_bitsandbytes
        for member in members:
            state = dict(member.local_state)
            if not state:
                state = {"step": torch.tensor(0.0)} | {key: self.empty(key, member.shard) for key in _KEYS}
            step(member, state, step_round.settings_of(member.group))
            rounds.publish_state(member, state)


def _step_as_bitsandbytes(member: rounds.Member, state: rounds.State, settings: dict[str, Any]) -> None:
    state["step"] += 1
    moments, step = [state[key] for key in _KEYS], int(state["step"])
    tensors = member.gradient.contiguous().view(-1), member.shard.view(-1), *(one.records for one in moments)
    maps, scales = [one.code_map.on(one.device) for one in moments], [one.scales for one in moments]
    lr, eps, decay = (float(settings[key]) for key in ("lr", "eps", "weight_decay"))
    betas = *map(float, settings["betas"]), 0.0, 0.0
    update = import_module("bitsandbytes.functional").optimizer_update_8bit_blockwise
    update("adam", *tensors, *betas, eps, step, lr, *maps, *scales, decay)


def _step_as_torchao(member: rounds.Member, state: rounds.State, settings: dict[str, Any]) -> None:
    proxy = rounds.make_proxy(member.shard, member.gradient)
    group = {**settings, "lr": torch.as_tensor(settings["lr"], dtype=torch.float32), "params": [proxy]}
    kind, attributes = _optimizer_of_torchao(state[_KEYS[0]].bits)
    theirs = state | {key: _as_of_torchao(state[key]) for key in _KEYS}
    attributes = {**attributes, "is_adamw": settings.get("decoupled_weight_decay", True)}
    twin = rounds.make_twin(kind, attributes, [group], {proxy: theirs})
    # Compiled code refuses to run under a dispatch mode, such as one that counts memory.
    is_watched = current_dispatch_mode() is not None
    with torch.compiler.set_stance("force_eager") if is_watched else nullcontext():
        rounds.unhooked_step(kind)(twin)


def _as_of_torchao(moment: MappedTensor) -> Any:
    """Return a tensor of torchao over the same memory."""
    values, is_signed = moment.code_map.on(moment.device), not moment.is_positive
    kind = import_module(f"torchao.optim.subclass_{moment.bits}bit")
    if moment.bits == 8:
        return kind.OptimState8bit(moment.records.view(moment.shape), moment.scales, values, is_signed, torch.float32)
    return kind.OptimState4bit(moment.records, moment.scales, values, is_signed, moment.shape, torch.float32)


@lru_cache
def _map_of(library: Library, bits: int, is_positive: bool) -> CodeMap:  # noqa: FBT001
    if library == "bitsandbytes":
        return CodeMap(import_module("bitsandbytes.functional").create_dynamic_map(signed=not is_positive), 256)
    states, size = import_module(f"torchao.optim.subclass_{bits}bit"), 256 if bits == 8 else 128
    return CodeMap(getattr(states, f"OptimState{bits}bit").zeros((size,), not is_positive, size).qmap, size)


@lru_cache
def _optimizer_of_torchao(bits: int) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return a class, and the attributes of its optimizers."""
    kind = getattr(import_module("torchao.optim"), f"AdamW{bits}bit")
    return kind, vars(kind([nn.Parameter(torch.empty(1, device="cpu"))]))


def why_not_installed(library: Library) -> str | None:
    """Return what to install; ``None``: nothing."""
    if library in ("auto", "own") or find_spec(library) is not None:
        return None
    return f"LowBitOptimizer(library={library!r}) needs {library}: pip install {library}."


def form_of(library: Library, form: StateForm, optimizer: Optimizer) -> StateForm:
    """Return the form of a library; ``"auto"``: bitsandbytes or torchao, if installed and able; or ours."""
    is_fake = any(isinstance(parameter, FakeTensor) for parameter in rounds.iterate_parameters(optimizer))
    if library == "own" or form.bits == 16 or is_fake:  # estimates have no memory for kernels
        return form
    if library == "auto":
        names: tuple[Library, ...] = ("bitsandbytes", "torchao")
        installed = (LibraryForm(name, form.bits) for name in names if find_spec(name) is not None)
        return next((one for one in installed if one.why_not(optimizer) is None), form)
    named = LibraryForm(library, form.bits)
    why = named.why_not(optimizer)
    if why is not None:
        raise ValueError(f"LowBitOptimizer(library={library!r}) cannot step {why}: use library='own' or 'auto'.")
    return named
