"""Each wait of the package, taken out, and a program that is wrong without it."""

from mutations import by_hand, offloading, sharding
from mutations.mutation import Mutation

_STREAM_COPIES = "core.host.transfers:StreamCopies"
_ARRIVAL = "core.host.transfers:_StreamArrival"

TRANSFERS = [
    Mutation(
        "core.host.transfers:Departure.wait",
        "self.event.synchronize()",
        "pass",
        by_hand.read_on_the_host,
    ),
    Mutation(
        "core.host.transfers:Departure.precede",
        "if self.event is not None and not self.event.query():\n    self.stream.wait_event(self.event)",
        "pass",
        by_hand.written_in_place,
    ),
    Mutation(f"{_STREAM_COPIES}.send", "self._side.wait_stream(compute)", "pass", by_hand.there_and_back),
    Mutation(
        f"{_STREAM_COPIES}.send",
        "scatter(source, pieces)\nevent = self._side.record_event()",
        "event = self._side.record_event()\nscatter(source, pieces)",
        by_hand.there_and_back,
    ),
    Mutation(
        f"{_STREAM_COPIES}.mark",
        "return stream, stream.record_event()",
        "return stream, self._module.Event()",
        by_hand.there_and_back,
    ),
    Mutation(
        f"{_STREAM_COPIES}.fetch",
        "self._side.wait_event(event)  # kernels that are queued may still use that memory for what it was before",
        "pass",
        by_hand.there_and_back,
    ),
    Mutation(
        f"{_STREAM_COPIES}.fetch",
        "gather(pieces, target)\narrival = _StreamArrival(target, self._side.record_event(), stream, self._module)",
        "arrival = _StreamArrival(target, self._side.record_event(), stream, self._module)\ngather(pieces, target)",
        by_hand.there_and_back,
    ),
    Mutation(f"{_STREAM_COPIES}.note_made", "stream, event = self.mark()", "stream, event = self._module.current_stream(), self._module.Event()", by_hand.made_for_another_stream),
    Mutation(f"{_ARRIVAL}.wait", "current.wait_event(self._event)", "pass", by_hand.there_and_back),
    Mutation(f"{_ARRIVAL}.wait", "note_use(target, current)", "pass", by_hand.fetched_for_another_stream),
    Mutation(f"{_ARRIVAL}.finish", "self._event.synchronize()", "pass", by_hand.staged),
    Mutation(
        f"{_ARRIVAL}.is_over",
        "return self.target is None or self._event.query()",
        "return True",
        by_hand.nobody_wants_it,
    ),
    Mutation(
        f"{_ARRIVAL}.let_go",
        "self._stream.wait_event(self._event)  # whoever gets the memory next is queued behind the copy",
        "pass",
        by_hand.nobody_wants_it,
    ),
    Mutation(
        "core.host.transfers:_let_go",
        "if not departure.event.query():\n"
        "    departure.stream.wait_event(departure.event)  # whoever gets the memory next is queued behind the copy",
        "pass",
        by_hand.there_and_back,
    ),
    Mutation(
        "core.host.transfers:_let_go",
        "note_use(departure.source, departure.stream)",
        "pass",
        by_hand.sent_for_another_stream,
    ),
    Mutation(
        "core.host.transfers:note_use",
        "tensor.record_stream(stream)",
        "pass",
        by_hand.sent_for_another_stream,
    ),
]

OFFLOAD = [
    Mutation(
        "core.host.disk_ring:DiskRing._write_part",
        "departure.wait()",
        "pass",
        offloading.by_disk,
    ),
    Mutation("core.host.disk_ring:DiskBlock.read", "copied[0].finish()", "pass", offloading.by_disk),
    Mutation("core.host.disk_ring:_DiskArrival.wait", "self._ticket.wait()", "pass", offloading.by_disk),
    Mutation(
        "core.host.disk_ring:_DiskArrival.wait",
        "part.wait(target)",
        "pass",
        offloading.from_disk_for_another_stream,
    ),
    Mutation(
        "techniques.activation_offload.items:OffloadedItem.hand_over",
        "self._arrival.wait(flat)",
        "pass",
        offloading.steps_offloaded,
    ),
    Mutation(
        "techniques.activation_offload.items:OffloadHandle.before_write",
        "self.item.parcel.departure.precede()",
        "pass",
        offloading.steps_with_a_window,
    ),
]

_GROUP = "techniques.sharding.group:ShardedGroup"
_LANE = "techniques.sharding.lanes:ShardLane"
_PARAMETER = "techniques.sharding.parameter:ShardedParameter"

SHARDING = [
    Mutation(
        f"{_GROUP}.wait_for_unshard",
        "self.device_handle.current_stream().wait_event(self._fetched)",
        "pass",
        sharding.weights_on_the_host,
    ),
    Mutation(
        f"{_GROUP}._fetch",
        "self._fetch_lanes()\nself._fetched = stream.record_event() if self.num_shards == 1 else None",
        "self._fetched = stream.record_event()\nself._fetch_lanes()",
        sharding.weights_on_the_host,
    ),
    Mutation(f"{_GROUP}._land", "event.synchronize()", "pass", sharding.weights_on_the_host),
    Mutation(
        f"{_GROUP}.wait_for_unshard",
        "lane.note_read()",
        "pass",
        sharding.weights_with_a_resident_copy,
    ),
    Mutation(
        f"{_LANE}.fetch",
        "torch.accelerator.current_stream().wait_event(self._arrived)",
        "pass",
        sharding.weights_with_a_resident_copy,
    ),
    Mutation(
        f"{_LANE}.wait_for_copies",
        "event.synchronize()",
        "pass",
        sharding.weights_with_a_resident_copy,
    ),
    Mutation(
        f"{_PARAMETER}._send",
        "gradient.record_stream(torch.accelerator.current_stream())",
        "pass",
        sharding.replicas,
    ),
    Mutation(
        f"{_GROUP}.post_backward",
        "self.await_reduce_stream()",
        "pass",
        sharding.weights_on_the_device,
    ),
]

MUTATIONS = TRANSFERS + OFFLOAD + SHARDING
