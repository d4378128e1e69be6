"""Offload activations to host memory or disk between the forward and the backward."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_choice, check_kind
from lightning_vram.callbacks.hook_points import (
    AroundStep,
    Depth,
    FitTechnique,
    offload_is_useless,
    refuse_moved_parameters,
)
from lightning_vram.core.host.memory import OffloadError
from lightning_vram.memory.units import format_bytes, parse_bytes
from lightning_vram.techniques.activation_offload import ActivationOffloading


class ActivationOffload(FitTechnique):
    """Offload saved activations to host memory or disk until the backward needs them.

    Weights, gradients, buffers and random numbers are bitwise identical to the baseline, unless ``compress`` is set.
    Copies run on a side stream; the backward prefetches. With :class:`ActivationCheckpointing`, only layer inputs and
    the results named in its ``save`` are offloaded; with ``InPlaceFusion`` or ``ActivationCompression``, what these
    leave. Parameters, buffers, batches and small tensors stay on the device. Host memory is allocated in the first
    step, reused in each, and released after ``fit``. On a GPU that shares memory with the CPU
    (Apple, GB10, Jetson) it works only with ``disk_path``; otherwise it warns and has no effect.

    Args:
        min_offload_bytes: Smaller tensors stay on the device: an ``int``, or text such as ``"256KiB"``.
        window_bytes: Device memory for transfers, in bytes: tensors saved last, which the backward needs first, copies
            to the host in flight, and prefetched tensors. ``"auto"``: 1/16 of the bytes that a step saves, at least
            its largest tensor.
        most_bytes: Most bytes to offload per forward, those saved first: an ``int``, or text such as ``"3GiB"``. The
            rest stays on the device. If steps wait for copies: half of the bytes that the second step logs, or less.
            ``None``: no limit; 0: nothing is offloaded.
        compress: ``"bf16"``: float32 is copied and stored in bfloat16; gradients are then approximate. ``"none"``: off.
        disk_path: Folder on a fast local disk, used instead of host memory. The file is unnamed and vanishes with the
            process. ``None``: host memory.
        pin_memory: Whether host memory is pinned if there is a GPU. Without, the computation waits for copies.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that is not allowed.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import ActivationOffload
        >>> trainer = pl.Trainer(callbacks=[ActivationOffload(min_offload_bytes="4MiB")], logger=False)
    """

    def __init__(
        self,
        min_offload_bytes: int | str = "1MiB",
        window_bytes: int | str = "auto",
        compress: Literal["none", "bf16"] = "none",
        disk_path: str | os.PathLike[str] | None = None,
        pin_memory: bool = True,  # noqa: FBT001, FBT002
        most_bytes: int | str | None = None,
    ) -> None:
        self.min_offload_bytes = parse_bytes(min_offload_bytes, "ActivationOffload(min_offload_bytes)")
        self.window_bytes = (
            window_bytes if window_bytes == "auto" else parse_bytes(window_bytes, "ActivationOffload(window_bytes)")
        )
        self.most_bytes = None if most_bytes is None else parse_bytes(most_bytes, "ActivationOffload(most_bytes)")
        check_choice("ActivationOffload(compress)", compress, ("none", "bf16"))
        check_kind("ActivationOffload(disk_path)", disk_path, str | os.PathLike | None, "a folder or None")
        check_bool("ActivationOffload(pin_memory)", pin_memory)
        self.compress = compress
        self.disk_path = disk_path
        self.pin_memory = pin_memory
        self._offloading: ActivationOffloading | None = None
        self._context: AroundStep | None = None
        self._num_steps = 0

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
        return vars(self) | self._between_runs()  # a copy is not part of any run

    def _between_runs(self) -> dict[str, object]:
        return {"_offloading": None, "_context": None, "_num_steps": 0}

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        way_out = "Use ActivationCheckpointing(), or ActivationOffload(disk_path=...)."
        device, result = trainer.strategy.root_device, "ActivationOffload has no effect"
        if self.disk_path is None and offload_is_useless(device, result, way_out):
            return
        try:
            self._offloading = ActivationOffloading(
                trainer.lightning_module,
                min_offload_bytes=self.min_offload_bytes,
                window_bytes=self.window_bytes,
                most_bytes=self.most_bytes,
                compress=self.compress,
                disk_path=self.disk_path,
                pin_memory=self.pin_memory,
            )
        except (OffloadError, ValueError) as error:
            raise MisconfigurationException(f"ActivationOffload: {error}") from None
        if trainer.strategy.root_device.type == "cpu" and self.disk_path is None:
            rank_zero_warn(
                "ActivationOffload offloads to host memory, but the model is on the CPU: nothing is saved. Set "
                "disk_path to offload to disk."
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
        if self._num_steps == 2:  # the first in which it is known what stays on the device
            report = self._offloading.report
            place = f"{format_bytes(report.host_bytes)} of host memory"
            if report.disk_bytes:
                place = f"{format_bytes(report.disk_bytes)} on disk"
            rank_zero_info(
                f"ActivationOffload offloads {format_bytes(report.offloaded_bytes)} per step in {report.num_offloaded} "
                f"tensors, leaves {format_bytes(report.kept_bytes)} on the device, and uses {place}."
            )

    @override
    def _undo(self) -> None:
        if self._context is not None:
            self._context.remove()
        if self._offloading is not None:
            self._offloading.close()
        vars(self).update(self._between_runs())
