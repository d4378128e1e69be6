"""From a traced run to the memory of its stages: live bytes, the allocator's, the host's."""

from collections.abc import Mapping

from lightning_vram.estimation.traced_fit import TracedFit
from lightning_vram.memory.estimate.caching_allocator.replay import AllocatorReplay, replay
from lightning_vram.memory.estimate.caching_allocator.settings import AllocatorSettings, read_settings
from lightning_vram.memory.estimate.result import StageEstimate
from lightning_vram.memory.estimate.workspaces import Workspaces
from lightning_vram.memory.tracking.timeline import MemoryTimeline


def estimate_stages(traced: TracedFit, workspaces: Workspaces | None) -> Mapping[str, StageEstimate]:
    """Replay the allocator over the whole run, and read off each stage."""
    if workspaces is None:
        return {name: _on_host(traced, name) for name in traced.spans}
    settings, growing = read_settings(), AllocatorSettings(expandable_segments=True)
    expandable = _replay(traced, workspaces, growing)
    own = expandable if settings == growing else _replay(traced, workspaces, settings)
    return {name: _on_card(traced, name, own, expandable) for name in traced.spans}


def needed_bytes(traced: TracedFit, workspaces: Workspaces | None) -> int:
    """Return what a run needs of the device, and nothing else: reserved bytes and context."""
    if workspaces is None:
        return max(traced.stage(name).peak_bytes for name in traced.spans)
    reserved = _replay(traced, workspaces, read_settings()).reserved  # not in the end of the run, which undoes things
    return max(max(reserved[slice(*span)], default=0) for span in traced.spans.values()) + workspaces.context_bytes


def _replay(traced: TracedFit, workspaces: Workspaces, settings: AllocatorSettings) -> AllocatorReplay:
    timeline, persistent, scratch = traced.timeline, workspaces.persistent_bytes, workspaces.scratch_bytes
    return replay(timeline, timeline.device, settings=settings, persistent=persistent, scratch=scratch)


def _on_host(traced: TracedFit, name: str) -> StageEstimate:
    timeline, num_held = _stage(traced, name)
    return StageEstimate(timeline, *3 * (timeline.peak_bytes,), first_event=num_held)


def _on_card(traced: TracedFit, name: str, own: AllocatorReplay, expandable: AllocatorReplay) -> StageEstimate:
    timeline, num_held = _stage(traced, name)
    part = slice(*traced.spans[name])
    return StageEstimate(
        timeline=timeline,
        allocated_bytes=max(own.allocated[part], default=0),
        reserved_bytes=max(own.reserved[part], default=0),
        expandable_reserved_bytes=max(expandable.reserved[part], default=0),
        workspace_bytes=own.workspace_bytes,
        host_bytes=timeline.host_peak_bytes,
        pinned_bytes=timeline.pinned_peak_bytes,
        first_event=num_held,
    )


def _stage(traced: TracedFit, name: str) -> tuple[MemoryTimeline, int]:
    """Return the timeline of a stage, and how many events at its start stand for what the stage found."""
    timeline, (start, stop) = traced.stage(name), traced.spans[name]
    return timeline, len(timeline.events) - (stop - start)
