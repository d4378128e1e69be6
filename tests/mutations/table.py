"""Each wait of the package, taken out, and a program that is wrong without it."""

from mutations import averaging, by_hand, offloading, sharding
from mutations.mutation import Mutation

_STREAM_COPIES = "core.host.transfers:StreamCopies"
_ARRIVAL = "core.host.transfers:_StreamH2DCopy"

TRANSFERS = [
    Mutation("core.host.transfers:D2HCopy.wait", "self.event.synchronize()", by_hand.read_on_the_host),
    Mutation(
        "core.host.transfers:D2HCopy.precede",
        "if self.event is not None and not self.event.query():\n    self.stream.wait_event(self.event)",
        by_hand.written_in_place,
    ),
    Mutation(f"{_STREAM_COPIES}.send", "self._side.wait_stream(compute)", by_hand.there_and_back),
    Mutation(
        f"{_STREAM_COPIES}.send",
        "scatter(source, pieces)\nevent = self._side.record_event()",
        by_hand.there_and_back,
        "event = self._side.record_event()\nscatter(source, pieces)",
    ),
    Mutation(
        f"{_STREAM_COPIES}.mark",
        "return stream, stream.record_event()",
        by_hand.there_and_back,
        "return stream, self._module.Event()",
    ),
    Mutation(
        f"{_STREAM_COPIES}.fetch",
        "self._side.wait_event(event)  # kernels that are queued may still use that memory for what it was before",
        by_hand.there_and_back,
    ),
    Mutation(
        f"{_STREAM_COPIES}.fetch",
        "gather(pieces, target)\narrival = _StreamH2DCopy(target, self._side.record_event(), stream, self._module)",
        by_hand.there_and_back,
        "arrival = _StreamH2DCopy(target, self._side.record_event(), stream, self._module)\ngather(pieces, target)",
    ),
    Mutation(
        f"{_STREAM_COPIES}.note_made",
        "stream, event = self.mark()",
        by_hand.made_for_another_stream,
        "stream, event = self._module.current_stream(), self._module.Event()",
    ),
    Mutation(f"{_ARRIVAL}.wait", "current.wait_event(self._event)", by_hand.there_and_back),
    Mutation(f"{_ARRIVAL}.wait", "note_use(target, current)", by_hand.fetched_for_another_stream),
    Mutation(f"{_ARRIVAL}.finish", "self._event.synchronize()", by_hand.staged),
    Mutation(
        f"{_ARRIVAL}.is_over",
        "return self.target is None or self._event.query()",
        by_hand.nobody_wants_it,
        "return True",
    ),
    Mutation(
        f"{_ARRIVAL}.let_go",
        "self._stream.wait_event(self._event)  # whoever gets the memory next is queued behind the copy",
        by_hand.nobody_wants_it,
    ),
    Mutation(
        "core.host.transfers:_let_go",
        "if not departure.event.query():\n"
        "    departure.stream.wait_event(departure.event)  # whoever gets the memory next is queued behind the copy",
        by_hand.there_and_back,
    ),
    Mutation(
        "core.host.transfers:_let_go", "note_use(departure.source, departure.stream)", by_hand.sent_for_another_stream
    ),
    Mutation("core.host.transfers:note_use", "tensor.record_stream(stream)", by_hand.sent_for_another_stream),
]

OFFLOAD = [
    Mutation("core.host.disk:DiskRing._write_part", "departure.wait()", offloading.by_disk),
    Mutation("core.host.disk:DiskBlock.read", "copied[0].finish()", offloading.by_disk),
    Mutation("core.host.disk:_DiskH2DCopy.wait", "self._ticket.wait()", offloading.by_disk),
    Mutation("core.host.disk:_DiskH2DCopy.wait", "part.wait(target)", offloading.from_disk_for_another_stream),
    Mutation(
        "techniques.activation_offload.items:OffloadedItem._hand_over",
        "self._arrival.wait(flat)",
        offloading.steps_offloaded,
    ),
    Mutation(
        "techniques.activation_offload.stage:OffloadHandle.before_write",
        "self._stage.send(self.item).departure.precede()",
        offloading.written_beside_its_copy,
    ),
]

_GROUP = "techniques.sharding.group:ShardedGroup"
_LANE = "techniques.sharding.flat_shards:FlatShard"
_PARAMETER = "techniques.sharding.parameter:ShardedParameter"

SHARDING = [
    Mutation(
        "techniques.mixed_precision.loss_scaling:_join",
        "found_inf = torch.maximum(found_inf, check.to(scale.device))",
        by_hand.overflow_with_the_scale_on_the_host,
        "found_inf = torch.maximum(found_inf, check.to(scale.device, non_blocking=True))",
    ),
    Mutation(
        "techniques.sharding.flat_shards:ShardSteps.touch", "flat.wait_for_copies()", sharding.written_between_forwards
    ),
    Mutation("techniques.sharding.flat_shards:ShardSteps.touch", "self.wait()", sharding.held_beside_a_step),
    Mutation(
        "techniques.sharding.apply:FullSharding.remove", "group.steps.wait()", sharding.removed_after_a_step_that_failed
    ),
    Mutation("private_names.fsdp2:discard_step", "parameter.grad_offload_event.synchronize()", sharding.discarded),
    Mutation(f"{_GROUP}.unshard", "self.steps.wait_for_writes()", sharding.on_the_host_with_late_threads),
    Mutation(
        f"{_GROUP}.wait_for_unshard",
        "self.device_handle.current_stream().wait_event(self._fetched)",
        sharding.on_the_host,
    ),
    Mutation(f"{_GROUP}.wait_for_unshard", "flat.note_read()", sharding.resident_evaluated_before_the_step),
    Mutation(
        f"{_GROUP}._fetch",
        "self._fetched = stream.record_event() if stream is not None and self.num_shards == 1 else None",
        sharding.on_the_host,
        "self._fetched = self.device_handle.Event()",
    ),
    Mutation(f"{_GROUP}.wait_for_gradients", "landing.wait()", sharding.on_the_host_with_late_threads),
    Mutation(f"{_GROUP}.finalize_backward", "self.wait_for_gradients()", sharding.on_the_host_with_late_threads),
    Mutation(f"{_GROUP}.post_backward", "self.await_reduce_stream()", sharding.on_the_device),
    Mutation(f"{_GROUP}._land", "event.synchronize()", sharding.on_the_host),
    Mutation(
        "private_names.fsdp2:GroupBase.await_reduce_stream",
        "self._post_reduce_event = stream.record_event()",
        sharding.on_the_device,
    ),
    Mutation(f"{_LANE}.refresh", "self.wait_for_copies()", sharding.fetched_twice),
    Mutation(
        f"{_LANE}.refresh",
        "self.resident.copy_(source, non_blocking=True)\nself._arrived = _record(self.device)",
        sharding.resident,
        "self._arrived = _record(self.device)\nself.resident.copy_(source, non_blocking=True)",
    ),
    Mutation(f"{_LANE}.note_read", "self._fetched = _record(self.device)", sharding.resident_evaluated_before_the_step),
    Mutation(f"{_LANE}.wait_for_copies", "event.synchronize()", sharding.evaluated_before_the_step),
    Mutation(f"{_LANE}.fetch", "torch.accelerator.current_stream().wait_event(self._arrived)", sharding.resident),
    Mutation(f"{_LANE}.fetch", "self._fetched = _record(self.device)", sharding.fetched_and_written),
    Mutation(
        "optimizers.on_host:StoredStates.step",
        "flat_shard.wait_for_copies()  # of a forward without gradients, after the backward",
        sharding.evaluated_before_the_step,
    ),
    Mutation(
        "techniques.sharding.flat_shards:ShardSteps._end", "ended[-1][0].wait()", sharding.on_the_host_with_late_threads
    ),
    Mutation("techniques.sharding.apply:FullSharding.wait_for_steps", "group.steps.wait()", sharding.finished),
    Mutation(
        f"{_PARAMETER}._call_hooks", "torch.accelerator.current_stream().synchronize()", sharding.hooks_on_gradients
    ),
    Mutation(
        f"{_PARAMETER}.send",
        "gradient.record_stream(torch.accelerator.current_stream())",
        sharding.on_the_host_with_late_threads,
    ),
    Mutation(f"{_GROUP}._send_alone", "stream.wait_stream(self.device_handle.current_stream())", sharding.on_the_host),
    Mutation(f"{_GROUP}._send_alone", "self.await_reduce_stream()", sharding.on_the_host),
    Mutation(
        "core.host.transfers:Ticket.wait",
        "while not self._is_done.wait(PATIENCE_SECONDS):\n    self._worker.check_alive()",
        sharding.on_the_host_with_late_threads,
    ),
]

_AVERAGE = "optimizers.averages:HostAverage"

AVERAGES = [
    Mutation(
        f"{_AVERAGE}.update",
        "watched = [*weights, *(self._averages[weight] for weight in weights)]",
        averaging.read_at_once,
        "watched = weights",
    ),
    Mutation(
        "optimizers.on_host:HostOptimizers.work_beside",
        "group.steps.begin(ticket, watched, is_reader=is_reader)",
        averaging.written_at_once,
    ),
]

MUTATIONS = TRANSFERS + OFFLOAD + SHARDING + AVERAGES
