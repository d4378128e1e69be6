"""Waits that no mutation stands for, each with its reason."""

_ONE_STREAM = "read by a copy on the same stream only, or after a copy that the host waits for"
_FILES = "waits for files; nothing is on the device: tests/strategies/fsdp_offload/test_checkpoint_store.py"
_WAITED_FOR = "a copy, which is waited for: "
_SEVERAL = "several ranks, which the simulated device has not; one reads its shards with the computation's stream: "

_CALIBRATE = "memory.estimate.workspaces"
_TIMED = "what is copied is not read: the time it takes is measured"
_STEP_TIMED = "nothing is read: the time that the device takes is measured"
_TRANSFERS, _SHARDING = "core.host.transfers", "techniques.sharding"

EXCEPTIONS = {
    (_TRANSFERS, "piece.copy_(part, non_blocking=not is_blocking and _is_pinned(piece))"): (
        _WAITED_FOR + "by D2HCopy.wait, D2HCopy.precede and _let_go"
    ),
    (_TRANSFERS, "part.copy_(piece, non_blocking=not is_blocking and _is_pinned(piece))"): (
        _WAITED_FOR + "by _StreamH2DCopy.wait, finish and let_go"
    ),
    (_TRANSFERS, "while self._departures and self._departures[0].event.query():"): (
        "says when memory is let go of: _let_go asks again, and waits"
    ),
    ("callbacks.activation_checkpointing.callback", "torch.accelerator.synchronize(device)"): _STEP_TIMED,
    ("callbacks.auto_vram.decision", "torch.accelerator.synchronize(self._device)"): _STEP_TIMED,
    ("core.host.transfers", "started.wait()"): "sets the number of threads; nothing is on the device",
    ("core.host.transfers", "ticket._is_done.wait(PATIENCE_SECONDS)"): "the loop around it would go round without it",
    ("core.ranks", "work.wait()"): "several ranks, by gloo: tests/core/processes",
    (
        "callbacks.micro_batching.step_state",
        "self.value.copy_(self.tensor.detach(), non_blocking=self.value.is_pinned())",
    ): (_ONE_STREAM),
    (
        "callbacks.micro_batching.step_state",
        "self.tensor.copy_(self.value, non_blocking=self.value.is_pinned())",
    ): _ONE_STREAM,
    (
        "memory.estimate.workspaces",
        "_COPY_BYTES / _fastest(lambda: on_device.copy_(on_host, non_blocking=True)),",
    ): _TIMED,
    (
        "memory.estimate.workspaces",
        "_COPY_BYTES / _fastest(lambda: on_host.copy_(on_device, non_blocking=True)),",
    ): _TIMED,
    (_CALIBRATE, "torch.accelerator.synchronize()"): _TIMED,
    ("optimizers.in_backward", "work.wait()"): "several ranks: tests/callbacks/optimizer_in_backward",
    ("optimizers.on_host", "self._worker.submit(job).wait()"): (
        "the next line takes the result, and fails where there is none"
    ),
    ("optimizers.on_host", "group.steps.wait()"): (
        "what the next lines read of a pending step, its optimizer state, waits by itself"
    ),
    ("techniques.sharded_checkpoints.store", "self.wait()"): _FILES,
    ("strategies.fsdp_offload.checkpoints", "self._store.wait()"): _FILES,
    ("strategies.fsdp_offload.strategy", "self._store.wait()"): _FILES,
    ("techniques.activation_offload.items", "self.host_copy.fetch(sent, self._place.copies.mark()).wait(sent)"): (
        "on the host only; bytes that are not there yet look as if they were written, and are sent again"
    ),
    (f"{_SHARDING}.apply", "torch.accelerator.synchronize()"): (
        "memory that work under way still reads: no scenario has the allocator hand out such a block at that moment"
    ),
    (f"{_SHARDING}.group", "self.wait_for_gradients()"): (
        "several ranks, which the simulated device has not: a reduction sets aside what a thread may be landing"
    ),
    (f"{_SHARDING}.group", "self.copy_in_stream.wait_stream(self.device_handle.current_stream())"): (
        _SEVERAL + "show_writes"
    ),
    (
        f"{_SHARDING}.flat_shards",
        'return None if device.type == "cpu" else torch.accelerator.current_stream().record_event()',
    ): ("each call of _record has its mutation"),
    (f"{_SHARDING}.flat_shards", "flat = source.to(self.device, self.transfer_dtype, non_blocking=True)"): (
        _WAITED_FOR + "by wait_for_unshard and wait_for_copies"
    ),
    (
        f"{_SHARDING}.parameter",
        "sent = self.buffer[: sent.numel()].view(sent.shape).copy_(sent, non_blocking=True)",
    ): _WAITED_FOR + "by ShardedGroup._land, and by _call_hooks",
    (f"{_SHARDING}.parameter", "torch.accelerator.current_stream().synchronize()"): (
        _SEVERAL + "take_over_writes, of shards on the device"
    ),
}
