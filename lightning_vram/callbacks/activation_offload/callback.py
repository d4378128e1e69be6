"""Keep activations in host memory, or on disk, between the forward and the backward.

See :mod:`lightning_vram.techniques.activation_offload.stage` for the mechanism and where it does not help.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_vram.argument_checks import check_bool
from lightning_vram.callbacks.hook_points import AroundStep, Depth, FitTechnique, refuse_moved_parameters
from lightning_vram.core.host.arena import OffloadError
from lightning_vram.memory.units import format_bytes, parse_bytes
from lightning_vram.techniques.activation_offload import (
    ActivationOffloading,
    OffloadMeasures,
    OffloadReport,
    check_max_slowdown,
)

_NUM_STEPS_TO_KNOW = 2  # what stays on the device is known from the second step on


class ActivationOffload(FitTechnique):
    """Move what training steps save for their backward to the host, for any LightningModule; its code stays as it is.

    With the defaults weights, gradients, buffers and random numbers are those of the plain run, to the bit. Copies run
    on a stream of their own, beside the computation; what the backward needs next is fetched ahead. Together with
    :class:`ActivationCheckpointing` what the layers keep travels: their inputs, and results named by ``save``; together
    with ``InPlaceFusion`` or ``ActivationCompression`` what is left by them. Parameters, buffers, batches and small
    tensors never travel. Host memory is taken in the first step, used again in each, and given back after the fit.

    Args:
        min_offload_bytes: Smaller tensors stay: an ``int``, or text such as ``"256KiB"``.
        window_bytes: Bytes of the device for the traffic: what is saved last and is needed again at once, copies on
            their way out, and what is fetched ahead. ``"auto"``: a sixteenth of what a step saves, at least its
            largest tensor.
        most_bytes: At most so many bytes of one forward travel, those that are saved first: an ``int``, or text such
            as ``"3GiB"``. What is saved after them stays. ``None``: no limit; 0: nothing travels.
        max_slowdown: How many times what it takes without waiting for copies a step may take, such as 1.05. The second
            and the third batch are measured; then what cannot travel in that time stays on the device, and one line
            says how much travels. Each rank decides for itself. ``None``: nothing is measured. Not with ``disk_path``.
        compress: ``"bf16"``: float32 travels and waits in bfloat16; gradients are then approximate.
        disk_path: Folder on a fast local disk that takes the place of host memory. The file has no name and is gone
            when the process is, however it ends.
        pin_memory: Whether host memory is pinned where there is a GPU. Without, the computation waits for copies.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument has a value that is not allowed.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import ActivationOffload
        >>> trainer = pl.Trainer(callbacks=[ActivationOffload(min_offload_bytes="4MiB")], logger=False)
    """

    def __init__(  # noqa: PLR0913 - set by name in configuration files
        self,
        min_offload_bytes: int | str = "1MiB",
        window_bytes: int | str = "auto",
        compress: Literal["none", "bf16"] = "none",
        disk_path: str | os.PathLike[str] | None = None,
        pin_memory: bool = True,  # noqa: FBT001, FBT002
        most_bytes: int | str | None = None,
        max_slowdown: float | None = None,
    ) -> None:
        self.min_offload_bytes = parse_bytes(min_offload_bytes, "ActivationOffload(min_offload_bytes)")
        self.window_bytes = (
            window_bytes if window_bytes == "auto" else parse_bytes(window_bytes, "ActivationOffload(window_bytes)")
        )
        self.most_bytes = None if most_bytes is None else parse_bytes(most_bytes, "ActivationOffload(most_bytes)")
        if compress not in ("none", "bf16"):
            raise ValueError(f"ActivationOffload(compress) must be 'none' or 'bf16', got {compress!r}.")
        if disk_path is not None and not isinstance(disk_path, str | os.PathLike):
            raise TypeError(
                "ActivationOffload(disk_path) must be a folder or None, "
                f"got {disk_path!r} of type {type(disk_path).__name__}."
            )
        check_bool("ActivationOffload(pin_memory)", pin_memory)
        check_max_slowdown("ActivationOffload(max_slowdown)", max_slowdown, disk_path)
        self.compress = compress
        self.max_slowdown = max_slowdown
        self.disk_path = disk_path
        self.pin_memory = pin_memory
        self._offloading: ActivationOffloading | None = None
        self._context: AroundStep | None = None
        self._num_steps = 0
        self._said_limit: list[int | None] = []

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        refuse_moved_parameters("ActivationOffload", trainer, "saved tensors are views of")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if self._offloading is not None:
            self._offloading.keep_in_place(batch)

    def __getstate__(self) -> dict[str, object]:
        of_a_run: dict[str, object] = {"_offloading": None, "_context": None, "_num_steps": 0, "_said_limit": []}
        return {**vars(self), **of_a_run}  # a copy is not part of any run

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        try:
            self._offloading = ActivationOffloading(
                trainer.lightning_module,
                min_offload_bytes=self.min_offload_bytes,
                window_bytes=self.window_bytes,  # type: ignore[arg-type]
                most_bytes=self.most_bytes,
                max_slowdown=self.max_slowdown,
                compress=self.compress,
                disk_path=self.disk_path,
                pin_memory=self.pin_memory,
            )
        except (OffloadError, ValueError) as error:
            raise MisconfigurationException(f"ActivationOffload: {error}") from None
        if trainer.strategy.root_device.type == "cpu" and self.disk_path is None:
            rank_zero_warn(
                "ActivationOffload moves activations from the device to the host, but the model is on the host: "
                "nothing is gained. disk_path= moves them to disk."
            )
        self._context = AroundStep(trainer.strategy, "training_step", Depth.OFFLOAD, lambda *_, **__: self._step())

    @contextmanager
    def _step(self) -> Iterator[None]:
        assert self._offloading is not None
        try:
            with self._offloading:
                yield
        except OffloadError as error:
            raise MisconfigurationException(f"ActivationOffload: {error}") from None
        self._num_steps += 1
        if self._num_steps == _NUM_STEPS_TO_KNOW:
            rank_zero_info(f"ActivationOffload {_describe(self._offloading.report)}")
        measures, limit = self._offloading.measures, self._offloading.most_bytes
        if measures is not None and self._said_limit != [limit]:
            self._said_limit = [limit]
            rank_zero_info(f"ActivationOffload: {_describe_measures(measures, limit)}")

    @override
    def _undo(self) -> None:
        if self._context is not None:
            self._context.remove()
        if self._offloading is not None:
            self._offloading.close()
        self._context = self._offloading = None
        self._num_steps = 0
        self._said_limit = []


def _describe(report: OffloadReport) -> str:
    place = (
        f"{format_bytes(report.disk_bytes)} on disk"
        if report.disk_bytes
        else f"{format_bytes(report.host_bytes)} of host memory"
    )
    return (
        f"moves {format_bytes(report.offloaded_bytes)} per step off the device in {report.num_offloaded} tensors, "
        f"keeps {format_bytes(report.kept_bytes)} there, and uses {place}."
    )


def _describe_measures(measures: OffloadMeasures, limit: int | None) -> str:
    carried = round(measures.to_host_bytes_per_second * measures.forward_seconds / measures.travelling_share)
    travelling = measures.saved_bytes if limit is None else min(limit, measures.saved_bytes)
    return (
        f"the bus carries {format_bytes(carried)} in the forward's {1e3 * measures.forward_seconds:.3g} ms: "
        f"of {format_bytes(measures.saved_bytes)} saved, {format_bytes(travelling)} travel."
    )
