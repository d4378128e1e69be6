"""Will it fit: runs the step on a GPU you do not have, and searches for the largest batch that fits."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.estimation.batches import (
    batch_size_of,
    first_batch,
    sequence_length_of,
    with_batch_size,
    with_sequence_length,
)
from lightning_vram.estimation.fake_trainer import RunCallbacks, as_list, check_run_callbacks
from lightning_vram.estimation.limits import Limit, attempt, find_limit
from lightning_vram.estimation.stages import estimate_stages, needed_bytes
from lightning_vram.estimation.traced_fit import FitRun, TracedFit, run_whole, trace_fit
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.known_devices import find_device
from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.estimate.workspaces import workspaces_of
from lightning_vram.memory.host.available import available_host_bytes
from lightning_vram.private_names.torch.compiled import OptimizedModule

_HOST = "cpu"
_SHORTEST = 8
_COPIES = "Copies to the host are assumed to keep up with the computation; if they lag, the device needs more."
_KERNEL_WIDTH = 64  # kernels of attention round lengths up: those that differ by multiples follow one law
Progress = Callable[[str, float], None]


def estimate_memory(  # noqa: PLR0913 - by name
    module: pl.LightningModule,
    batch: Any = None,
    *,
    device: str | torch.device | DeviceSpec,
    trainer: Mapping[str, Any] | None = None,
    datamodule: pl.LightningDataModule | None = None,
    devices: int = 1,
    num_nodes: int = 1,
    find_limits: bool = True,
    run_callbacks: RunCallbacks = (),
    on_progress: Progress | None = None,
) -> MemoryEstimate:
    """Estimate the peak memory of training on a device that you do not need to have.

    Two steps of ``Trainer.fit`` and one batch of validation run on fake tensors, with the module's own code, its
    optimizers, plugins, strategy, the callbacks of this package and those of Lightning that change the step
    (finetuning, pruning, weight averaging, accumulation). A model of CUDA's caching allocator turns live bytes into
    reserved bytes. Module, weights and Trainer arguments are copied, never changed, and nothing is logged.

    Args:
        module: Any LightningModule, with weights or on the ``meta`` device.
        batch: A batch as its loader returns it: any nest of tensors, of which only shapes and dtypes count. ``None``:
            the first batch of ``datamodule``, or of the module's own loader.
        device: Name of a GPU, such as ``"rtx4090"``; a :class:`lightning_vram.DeviceSpec`; a file of ``lightning-vram
            calibrate``; ``"cpu"`` for the step as it would run on this host.
        trainer: Arguments of the Trainer.
        datamodule: Provides the batch.
        devices: Number of devices per node.
        num_nodes: Number of nodes.
        find_limits: Whether to search for the largest batch and the longest sequence that fit, by a few more steps.
        run_callbacks: Your own callbacks of ``trainer`` that change the module or the step, by class or name. Other
            callbacks of yours, loggers, checkpoints and progress bars are skipped.
        on_progress: Called with the current stage as text and the finished share of the work, 0 to 1. ``None`` shows
            both on a terminal.

    Returns:
        The estimate for one rank, in bytes. ``print`` shows it as a table, ``plot`` draws it.

    Raises:
        TypeError: If an argument has a wrong type, or ``trainer`` has a name that ``Trainer`` does not take.
        ValueError: If the device is unknown, there is no batch, no optimizer steps, ``run_callbacks`` names a callback
            that ``trainer`` does not have, or the step reads values of tensors and cannot run on the host to find them.
        Exception: Any exception that the module raises in its step.

    Example:
        >>> from lightning_vram.demos import ByteGPT
        >>> tokens = torch.zeros(8, 257, dtype=torch.int64)
        >>> estimate_memory(ByteGPT(), tokens, device="rtx4090", find_limits=False).fits
        True
    """
    check_positive_int("estimate_memory(devices)", devices)
    check_positive_int("estimate_memory(num_nodes)", num_nodes)
    progress = on_progress or (lambda stage, done: None)
    spec = spec_of(device)
    if batch is None:
        progress("making a batch", 0.0)
        batch = first_batch(module, datamodule)
    run = FitRun(
        trainer_arguments=trainer or {},
        card=None if spec.name == _HOST else spec,
        num_ranks=devices * num_nodes,
        run_callbacks=check_run_callbacks("estimate_memory(run_callbacks)", run_callbacks),
    )
    progress("tracing the step", 0.0)
    estimator = Estimator(module, batch, spec, run)
    estimate = estimator.estimate()
    if find_limits:
        progress("searching for the largest batch", 0.3)
        largest = estimator.max_batch_size()
        progress("searching for the longest sequence", 0.7)
        longest = estimator.max_sequence_length()
        named = (("a larger batch", largest), ("a longer sequence", longest))
        notes = (f"The model raises with {name}: {limit.refusal}." for name, limit in named if limit.refusal)
        estimate = replace(
            estimate,
            max_batch_size=largest.size,
            batch_size_refusal=largest.refusal,
            max_sequence_length=longest.size,
            sequence_length_refusal=longest.refusal,
            notes=(*estimate.notes, *notes),
        )
    progress("done", 1.0)
    return estimate


class Estimator:
    """Estimates a run, and the same with other batches."""

    def __init__(self, module: pl.LightningModule, batch: Any, spec: DeviceSpec, run: FitRun) -> None:
        self._module = module
        self._batch = batch
        self._spec = spec
        self._run = run
        self._workspaces = None if run.card is None else workspaces_of(spec)
        self._is_traced = True
        try:
            self._traced = trace_fit(module, batch, run)
        except RuntimeError as error:  # among it what fake tensors cannot do; a mistake is one with real ones, too
            if "device" in str(error).partition("\n")[0] and run.card is not None:
                raise  # tensors on two devices: on the host they would be on one
            self._is_traced = False
            self._traced = run_whole(module, batch, run, error)
        self._micro_batch_size: int | None = None
        self._cut_until_it_fits()

    def _cut_until_it_fits(self) -> None:
        """Do what callbacks that cut batches when memory runs out would find out: here it never does."""
        size, arguments = batch_size_of(self._batch) or 1, self._run.trainer_arguments
        callbacks = as_list(arguments.get("callbacks"))
        if not self._is_traced or not any(_cuts_when_full(callback) for callback in callbacks):
            return
        best_bytes = last_bytes = needed_bytes(self._traced, self._workspaces)
        while size > 1 and best_bytes > self._spec.memory_bytes:
            size = -(-size // 2)
            cut = [one.starting_with(size) if _cuts_when_full(one) else one for one in callbacks]
            run = replace(self._run, trainer_arguments={**arguments, "callbacks": cut})
            traced, _ = attempt(partial(trace_fit, self._module, self._batch, run))
            if traced is None:
                return  # batch norms refuse one sample
            num_bytes = needed_bytes(traced, self._workspaces)
            if num_bytes == last_bytes:
                return  # it runs whole, or needs the most elsewhere
            last_bytes = num_bytes
            if num_bytes < best_bytes:
                best_bytes, self._micro_batch_size, self._run, self._traced = num_bytes, size, run, traced

    def max_batch_size(self) -> Limit:
        """Return the largest batch; of no known size if nothing can be said of others."""
        size, module, batch, run = batch_size_of(self._batch), self._module, self._batch, self._run
        if not size or not self._is_traced:
            return Limit()
        # Twice the samples are the same samples twice, of which masks select twice as many.
        other = 2 * size if run.reads.runs else size // 2 or 2
        return self._largest((size, other), lambda new: trace_fit(module, with_batch_size(batch, size, new), run))

    def max_sequence_length(self) -> Limit:
        """Return the longest sequence; of no known length if there is none."""
        length, run = sequence_length_of(self._batch), replace(self._run, has_values=True)
        if length is None or length < _SHORTEST or not self._is_traced:
            return Limit()

        def trace(new: int) -> TracedFit:
            nonlocal run
            batch = with_sequence_length(self._batch, length, new)
            try:
                return trace_fit(self._module, batch, run)
            except IndexError:
                if new > length or not run.has_values:
                    raise
                run = self._run  # the batch was made for its shapes: shorter ones have such values as well
                return trace_fit(self._module, batch, run)

        step = length // 4 // _KERNEL_WIDTH * _KERNEL_WIDTH or length // 4
        return self._largest((length, length - step, length - 2 * step), trace)

    def _largest(self, sizes: tuple[int, ...], trace: Callable[[int], TracedFit]) -> Limit:
        needed = partial(needed_bytes, workspaces=self._workspaces)
        return find_limit(trace, needed, self._spec.memory_bytes, sizes, self._traced)

    def estimate(self) -> MemoryEstimate:
        """Return the estimate of the batch, without limits."""
        workspaces, traced = self._workspaces, self._traced
        notes = [*(workspaces.notes if workspaces is not None else ()), *traced.notes]
        if traced.timeline.pinned_peak_bytes:
            notes.append(_COPIES)
        if any(isinstance(part, OptimizedModule) for part in self._module.modules()):
            notes.append("Compiled modules are traced uncompiled, and often need less than estimated.")
        if self._micro_batch_size is not None:
            notes.append(f"MicroBatching will run {self._micro_batch_size} samples at once.")
        return MemoryEstimate(
            device=self._spec,
            stages=estimate_stages(traced, workspaces),
            batch_size=batch_size_of(self._batch) or 0,
            world_size=self._run.num_ranks,
            context_bytes=workspaces.context_bytes if workspaces is not None else 0,
            notes=tuple(notes),
        )


def _cuts_when_full(callback: Any) -> bool:
    return hasattr(callback, "starting_with") and callback.size == "auto"


def spec_of(device: str | torch.device | DeviceSpec) -> DeviceSpec:
    """Return the description of a device that the user named; an unknown name is a ``ValueError``."""
    given: Any = device
    if isinstance(device, DeviceSpec):
        return device
    if not isinstance(given, str | torch.device):
        kind = type(device).__name__
        raise TypeError(f"estimate_memory(device) must be a name or a DeviceSpec, got {device!r} of type {kind}.")
    name = str(device)
    if name != _HOST:
        return find_device(name)
    return DeviceSpec(name=_HOST, memory_bytes=available_host_bytes() or 1)
