"""What a step may change: taken at one moment, and given back if the step has to run again; and what it logs, once.

Nothing of a try that is dropped stays: its gradients, what it wrote into buffers, metrics and attributes, what it
logged and drew from the generators. Of one that counts, metrics accumulate each micro-batch as they would a batch: what
they compute at the end of the epoch is the same, up to the rounding of sums. The value of the batch, which
``self.log("accuracy", self.accuracy)`` shows, is the weighted mean of the micro-batches' values if they are floating
tensors, else the last one.

Different from a run without micro-batches: counts of updates (``update_count``, windows of ``Running``), states that
are means over updates, and metrics that average something per batch. A metric that is no submodule (in a list, say) is
not found.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import torch
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_vram.core.batches.micro_batches import weighted_mean
from lightning_vram.core.batches.splitting import take_apart
from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.core.random_state import global_sources
from lightning_vram.core.rollback import ALWAYS_COPIED_BYTES, AttributeState, differs, iterate_members
from lightning_vram.core.tensors.properties import is_strided, num_bytes_of
from lightning_vram.memory.device.accelerators import has_streams
from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.memory.storages import NO_VERSION, storage_address, version_of
from lightning_vram.private_names.dispatcher import copy_each
from lightning_vram.private_names.fsdp2 import local_shard
from lightning_vram.private_names.lightning import Metadata, ResultCollection, default_dtype
from lightning_vram.private_names.metrics import show_value, shown_value
from lightning_vram.private_names.torch import num_writes, own_buffers, own_parameters


class StepState:
    """The state of a module, its gradients, the global generators and the batch before a step that may run again.

    :meth:`take` it before the step, :meth:`restore` it as often as the step has failed, :meth:`settle` when it counts.
    Restored are attributes of all modules (:class:`AttributeState`), ``requires_grad``, generators, buffers, the states
    of metrics, and other plain tensor attributes of up to 1 MiB. It blocks on no device and copies small tensors only,
    except for its first two times. Not restored: parameters' values, objects of other kinds that change inside, tensors
    in containers that are written in place, and parameters under FSDP1.

    The step gets its batch, and cannot run again if it wrote into it; of tensors that count no writes it gets copies.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._buffers = BufferCopies()  # held over the run, so that constants are copied once
        self.settle()

    def settle(self) -> None:
        """Free what was taken: the step counts, and the optimizer needs the memory."""
        self._parameters: Sequence[Tensor] = ()
        self._gradients: GradientState | None = None
        self._attributes: list[AttributeState] = []
        self._copies: list[BufferCopy] = []
        self._states: list[tuple[Tensor, Tensor]] = []  # of metrics, which make new ones in every step
        self._requires_grad: list[tuple[Tensor, bool]] = []
        self._generators: list[tuple[Callable[[Any], object], Any]] = []
        self._versions: list[tuple[Tensor, int]] = []  # of the batch
        self._lends_copies = False

    def take(self, batch: Any = None, parameters: Sequence[Tensor] = ()) -> "StepState":
        """Copy all but gradients, which :meth:`take_gradients` copies later. May run out of memory."""
        self.settle()
        self._parameters = parameters
        members = iterate_members(self._module)
        # Not isinstance: it takes as long as all the rest, Metric being an abstract class.
        self._attributes = [AttributeState(one) for one in members]
        metrics = [one for one in self._attributes if Metric in type(one.module).__mro__]
        others = [one for one in self._attributes if Metric not in type(one.module).__mro__]
        buffers = [one for member in members for one in own_buffers(member).values() if one is not None]
        small = [one for state in others for one in _plain(state) if num_bytes_of(one) <= ALWAYS_COPIED_BYTES]
        self._copies = self._buffers.take([*buffers, *small])
        self._states = [(one, one.detach().clone()) for state in metrics for one in _plain(state)]
        self._requires_grad = [
            (parameter, parameter.requires_grad)
            for member in members
            for parameter in own_parameters(member).values()
            if parameter is not None
        ]
        self._generators = [(write, read()) for read, write in global_sources(self._device).values()]
        tensors = list(_iterate_tensors(batch))
        self._lends_copies = any(one.is_inference() for one in tensors)  # in evaluation
        self._versions = [(one, num_writes(one)) for one in tensors if not one.is_inference()]
        return self

    def take_gradients(self) -> None:
        """Copy gradients once per step: before the first backward and after zeroing, when there are none to copy."""
        if self._gradients is None:
            self._gradients = GradientState(self._parameters)

    def lend(self, part: Any) -> Any:
        """Return this part of the batch as the step gets it."""
        return _copy(part) if self._lends_copies else part

    def restore(self) -> None:
        """Go back. May be called again, after each further try."""
        self._check_batch()
        for attributes in self._attributes:  # first, since they may hold graphs
            attributes.restore()
        if self._gradients is not None:
            self._gradients.restore()
        for copy in self._copies:
            copy.restore()
        for tensor, value in self._states:
            with torch.inference_mode(mode=tensor.is_inference()), torch.no_grad():
                tensor.copy_(value)
        for parameter, requires_grad in self._requires_grad:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        for write, state in self._generators:
            write(state)

    def _check_batch(self) -> None:
        if any(num_writes(tensor) != version for tensor, version in self._versions):
            raise RuntimeError(
                "MicroBatching cannot retry this batch: training_step modified it in place. Write into a copy, or give "
                "a fixed size."
            )


def _plain(state: AttributeState) -> list[Tensor]:
    # Results of the last step have a past: they are replaced, not written.
    return [one for one in state.tensors.values() if type(one) is Tensor and not one.requires_grad]


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif (parts := take_apart(value)) is not None:
        for part in parts.values:
            yield from _iterate_tensors(part)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    parts = take_apart(value)
    try:
        return value if parts is None else parts.build([_copy(part) for part in parts.values])
    except Exception as error:  # a container of the user's that cannot be built anew is lent itself
        if is_out_of_memory(error):
            raise
        return value


_PLAIN_KINDS = (Tensor, nn.Parameter, nn.Buffer)


class BufferCopy:
    """One tensor, and its value at one time."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.is_plain = type(tensor) in _PLAIN_KINDS and is_strided(tensor)
        self.is_small = self.is_plain and tensor.nbytes <= ALWAYS_COPIED_BYTES
        self._is_counted: bool | None = None if self.is_plain else False  # whether the version tells of all writes
        self.value = tensor.detach().clone() if self.is_small or not self.is_plain else tensor.detach().cpu().clone()
        self._stamp = _stamp(tensor)

    def is_replaced(self) -> bool:
        """Whether the tensor has another shape, type or device than the copy was made for."""
        return _stamp(self.tensor)[:3] != self._stamp[:3]

    def is_changed(self) -> bool:
        """Whether the tensor may have been written since the copy was made."""
        return not self._is_counted or _stamp(self.tensor) != self._stamp

    def refresh(self) -> None:
        """Copy a tensor that is not small again, if it may have been written."""
        stamp = _stamp(self.tensor)
        if self._is_counted is None and stamp == self._stamp:
            is_same = not differs(self.tensor.detach().to(self.value.device), self.value)
            self._is_counted = is_same and stamp[-1] != NO_VERSION
        if self.is_changed():
            if self.is_plain and has_streams(self.tensor.device.type) and not self.value.is_pinned():
                self.value = torch.empty_like(self.value, pin_memory=True)
            self.value.copy_(self.tensor.detach(), non_blocking=self.value.is_pinned())
            self._stamp = stamp

    def restore(self) -> None:
        """Write the value back, in place."""
        if not self.is_changed():
            return
        with torch.inference_mode(mode=self.tensor.is_inference()), torch.no_grad():
            if self.is_replaced():
                self.tensor.data = self.value.to(self._stamp[2], copy=True)
            else:
                # The copy back is ordered before the next refresh: both run on the current stream.
                self.tensor.copy_(self.value, non_blocking=self.value.is_pinned())
        self._stamp = _stamp(self.tensor)


def _stamp(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, int, int, int]:
    """Return what differs after a write that autograd counts, and after other memory was put in: shape to version."""
    offset = int(tensor.storage_offset()) if is_strided(tensor) else 0
    return tensor.shape, tensor.dtype, tensor.device, storage_address(tensor), offset, version_of(tensor)


class BufferCopies:
    """Copies of a model's tensors, held over many steps.

    Autograd counts writes, so large constants (masks, rotary tables) are copied once. Up to 1 MiB is copied in every
    step: kernels such as those of batch normalization write uncounted. A large tensor that is written uncounted is
    found in the second step, and copied in every step from then on. Copies of large tensors are on the host, pinned.
    """

    def __init__(self) -> None:
        self._copies: dict[int, BufferCopy] = {}
        self._small: list[BufferCopy] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []

    def take(self, tensors: Iterable[Tensor]) -> list[BufferCopy]:
        """Return up-to-date copies of tensors with memory, good until the next call; drop those of others."""
        before, self._copies = self._copies, {}
        small: list[BufferCopy] = []
        with torch.inference_mode(mode=False), torch.no_grad():  # a copy made for an evaluation serves training as well
            for place, tensor in {id(tensor): tensor for tensor in tensors}.items():
                copy = before.get(place)
                if copy is None or copy.is_replaced():
                    if tensor.is_meta or is_lazy(tensor):
                        continue
                    copy = BufferCopy(tensor)
                elif copy.is_small:
                    small.append(copy)
                else:
                    copy.refresh()
                self._copies[place] = copy
            if small != self._small:
                self._small, self._groups = small, _group(small)
            for values, originals in self._groups:
                copy_each(values, originals)
        return list(self._copies.values())


def _group(copies: list[BufferCopy]) -> list[tuple[list[Tensor], list[Tensor]]]:
    groups: dict[tuple[torch.dtype, torch.device], list[BufferCopy]] = defaultdict(list)
    for copy in copies:
        groups[copy.tensor.dtype, copy.tensor.device].append(copy)
    return [([copy.value for copy in group], [copy.tensor for copy in group]) for group in groups.values()]


class GradientState:
    """Gradients to restore in the same tensors. Copies are on their device, or on the host if its memory is short."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(dict.fromkeys(parameters))
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._copies = _copy_all([gradient for gradient in self._gradients if gradient is not None])

    def restore(self) -> None:
        """Go back. May be called again, after each further try."""
        with torch.no_grad():
            copies = iter(self._copies)
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
                if gradient is not None:
                    local_shard(gradient).copy_(next(copies))


def _copy_all(gradients: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        try:
            return [local_shard(gradient).detach().clone() for gradient in gradients]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the handler: the error holds on to the copies made so far.
        return [local_shard(gradient).detach().to("cpu", copy=True) for gradient in gradients]


class ShownValues:
    """After the context, each metric shows the mean over the micro-batches of one batch; their graphs are dropped."""

    def __init__(self, module: nn.Module) -> None:
        metrics: Any = [member for member in iterate_members(module) if Metric in type(member).__mro__]
        self._before: list[tuple[Metric, Any]] = [(metric, shown_value(metric)) for metric in metrics]
        self._shown: dict[int, list[tuple[Any, float]]] = defaultdict(list)
        self._share = 1.0

    def __enter__(self) -> Self:
        for metric, _ in self._before:
            show_value(metric, None)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._collect()
        for metric, before in self._before:
            shown = self._shown.get(id(metric)) if kind is None else None
            show_value(metric, _mean(*zip(*shown, strict=True)) if shown else before)

    def begin_part(self, size: int, share: float) -> None:
        """Call before each micro-batch; ``share`` is its weight in the batch."""
        self._collect()
        self._share = share

    def _collect(self) -> None:
        for metric, _ in self._before:
            value = shown_value(metric)
            if value is not None:
                self._shown[id(metric)].append((recursive_detach(value), self._share))
                show_value(metric, None)


def _mean(values: Sequence[Any], shares: Sequence[float]) -> Any:
    are_floating = all(isinstance(value, Tensor) and value.is_floating_point() for value in values)
    if len(values) == 1 or not are_floating or len({value.shape for value in values}) > 1:
        return values[-1]
    return weighted_mean(values, shares, [1] * len(shares))


@dataclass
class _Entry:
    """One call of ``log`` in one micro-batch."""

    value: Any  # detached, unless its graph was asked for
    size: int
    share: float
    options: dict[str, Any]  # all other arguments by name


class BatchLogging:
    """Inside the context, ``log`` calls of one attempt are recorded; :meth:`replay` makes them, once per batch."""

    # Lightning would treat each micro-batch as a batch: the step's value would be that of the last one, and the epoch's
    # mean would weigh each of them like the whole batch. Processes exchange values (``sync_dist=True``) once per name.
    # Lightning resets the values of the epoch before when the first batch logs, in each attempt; a second time it
    # changes nothing.

    def __init__(self, results: ResultCollection) -> None:
        self._results = results
        self._entries: dict[tuple[str, str, int], list[_Entry]] = {}
        self._num_micro_batches = 0
        self._size = 1
        self._share = 1.0
        self._occurrences: Counter[tuple[str, str]] = Counter()
        self._log: Callable[..., None] = results.log
        self._patch: MethodPatch | None = None

    def __enter__(self) -> Self:
        self._patch = MethodPatch(self._results, "log", replace_by(self._record))
        return self

    def __exit__(self, *error: object) -> None:
        assert self._patch is not None
        self._patch.remove()

    def begin_part(self, size: int, share: float) -> None:
        """Call before each micro-batch. ``share`` is its weight in means, ``size`` where all shares are 0."""
        self._num_micro_batches += 1
        self._size, self._share = size, share
        self._occurrences.clear()

    def replay(self) -> None:
        """Log the batch, once. A name counts over the micro-batches that logged it."""
        entries, self._entries = self._entries, {}
        for (fx, name, _), calls in entries.items():
            value, options = calls[0].value, calls[0].options
            if self._num_micro_batches > 1 and isinstance(value, Tensor):
                value, options = _combine(fx, name, calls)
            self._log(fx, name, value, **options)

    def _record(self, fx: str, name: str, value: Tensor | Metric, **options: Any) -> None:
        occurrence = self._occurrences[fx, name]
        self._occurrences[fx, name] += 1
        saved = value if options.get("enable_graph") else recursive_detach(value)
        self._entries.setdefault((fx, name, occurrence), []).append(_Entry(saved, self._size, self._share, options))


def _combine(fx: str, name: str, calls: Sequence[_Entry]) -> tuple[Tensor, dict[str, Any]]:
    options = dict(calls[0].options)
    batch_sizes: list[Any] = [call.options.get("batch_size") for call in calls]
    weights = [call.share for call in calls]
    # Else it is a constant of the module: the size of the whole batch, which it is.
    if None not in batch_sizes and set(batch_sizes) != {sum(call.size for call in calls)}:
        if batch_sizes != [call.size for call in calls]:  # else it says nothing new, and the share knows of tokens
            weights = batch_sizes
        options["batch_size"] = sum(batch_sizes)
    values: list[Tensor] = [call.value for call in calls]
    meta = Metadata(fx, name, reduce_fx=options.get("reduce_fx", torch.mean))  # knows all ways to name a reduction
    if meta.is_mean_reduction:
        floats = torch.float32, torch.float64  # Lightning converts others
        values = [value if value.dtype in floats else value.to(default_dtype()) for value in values]
        return weighted_mean(values, weights, [call.size for call in calls]), options
    if meta.is_sum_reduction:
        return reduce(torch.add, [value.long() if value.dtype is torch.bool else value for value in values]), options
    return reduce(torch.maximum if meta.is_max_reduction else torch.minimum, values), options
