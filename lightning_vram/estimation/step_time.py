"""How long a step takes on a GPU you do not have: for each operator, the slower of its arithmetic and its traffic.

A roofline (Williams et al., 2009, https://doi.org/10.1145/1498765.1498785), with the part of a maker's figures that
kernels reach, and the time a launch takes. Copies on other streams, and the host, overlap with the computation of the
same pass, forward or backward. The seconds rank configurations of one step on one GPU.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.core.host.transfers import TO_DEVICE
from lightning_vram.core.operators import BALANCE, OperatorWork, operator_work
from lightning_vram.memory.device.accelerators import stream_id
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.private_names.dispatcher import ASK_DEVICE, UnwrappedMode
from lightning_vram.private_names.torch import current_graph_task_id, tensors_in

_REACHED_FLOPS, _REACHED_BANDWIDTH = 0.6, 0.85  # of the makers' figures: see core.operators.BALANCE
_LAUNCH_SECONDS = 4e-6
_USUAL_BANDWIDTH = 1e12
_USUAL_BUS = 25e9
_HOST_BANDWIDTH = 30e9  # of a process with some threads; nominal
_FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_WITH_TF32 = (8, 0)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what takes them."""

    compute: float  # kernels on the card, and copies that they wait for
    to_card: float = 0.0  # copies from the host, on another stream
    to_host: float = 0.0  # copies to the host, on another stream
    host: float = 0.0  # operators on the host
    backward: "StepTime | None" = None  # what of that is within backwards; ``None``: nothing

    @property
    def seconds(self) -> float:
        """All of it, if what can run at the same time does."""
        backward = self.backward or _NOTHING
        passes = (replace(self, backward=None) - backward, backward)
        return max(self.host, sum(max(one.compute, one.to_card, one.to_host) for one in passes))

    def computed_slower(self, factor: float) -> "StepTime":
        """Return what it would be if all that computes took ``factor`` times as long, and copies as long as now."""
        backward = self.backward and self.backward.computed_slower(factor)
        return replace(self, compute=self.compute * factor, host=self.host * factor, backward=backward)

    def __sub__(self, other: "StepTime") -> "StepTime":
        names = ("compute", "to_card", "to_host", "host")
        differences = {name: getattr(self, name) - getattr(other, name) for name in names}
        return StepTime(**differences, backward=self.backward and self.backward - (other.backward or _NOTHING))


_NOTHING = StepTime(0.0)


class StepClock(UnwrappedMode):
    """Adds up what operators inside would take on a card; rates that are unknown are in usual proportions."""

    def __init__(self, card: DeviceSpec, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._card = card
        bandwidth, is_measured = card.bandwidth_bytes_per_s or _USUAL_BANDWIDTH, card.memory_source == "measured"
        self._bandwidth = bandwidth * (1 if is_measured else _REACHED_BANDWIDTH)
        self._share = 1 if is_measured else _REACHED_FLOPS
        self._usual_flops = BALANCE * bandwidth
        self._has_tf32 = card.capability is not None and card.capability >= _WITH_TF32
        self._seconds: defaultdict[str, float] = defaultdict(float, compute=0.0)
        self._in_backward: defaultdict[str, float] = defaultdict(float, compute=0.0)

    @property
    def now(self) -> StepTime:
        """What was added up so far."""
        return replace(StepTime(**self._seconds), backward=StepTime(**self._in_backward))  # type: ignore[arg-type]

    def note_copy(self, way: str, num_bytes: int) -> None:
        """Count a copy that no operator makes."""
        self._add("to_card" if way == TO_DEVICE else "to_host", num_bytes / bus_bytes_per_s(self._card))

    def _add(self, place: str, seconds: float) -> None:
        self._seconds[place] += seconds
        if current_graph_task_id() != -1:
            self._in_backward[place] += seconds

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASK_DEVICE:
            return args[0].device
        result = func(*args, **(kwargs or {}))
        work = operator_work(func, args, kwargs or {}, result)
        if work.num_bytes:
            self._add(*self._take(work, args, kwargs or {}, result))
        return result

    def _take(self, work: OperatorWork, args: Any, kwargs: Mapping[str, Any], result: Any) -> tuple[str, float]:
        results = list(tensors_in(result))
        written = _kinds(results)
        kinds = written | _kinds(tensors_in((args, kwargs)))
        if self._device.type not in kinds:
            return "host", work.num_bytes / _HOST_BANDWIDTH
        if len(kinds) > 1:
            is_beside = stream_id(self._device) != 0
            way = "to_card" if self._device.type in written else "to_host"
            return way if is_beside else "compute", work.num_bytes / 2 / bus_bytes_per_s(self._card)
        name = _FORMATS.get(next((one.dtype for one in results if one.is_floating_point()), torch.float32), "fp32")
        if name == "fp32" and self._has_tf32 and torch.get_float32_matmul_precision() != "highest":
            name = "tf32"
        rates = self._card.flops_per_s
        flops_per_s = (rates.get(name) or rates.get("fp32") or self._usual_flops) * self._share
        seconds = max(work.flops / flops_per_s, work.num_bytes / self._bandwidth)
        return "compute", _LAUNCH_SECONDS * work.num_calls + seconds


def bus_bytes_per_s(card: DeviceSpec) -> float:
    """Return what a card's bus carries one way; a usual rate if unknown."""
    return card.bus_bytes_per_s or _USUAL_BUS


def _kinds(tensors: Iterable[Tensor]) -> set[str]:
    return {tensor.device.type for tensor in tensors if tensor.dim()}  # numbers on the host are arguments of kernels
