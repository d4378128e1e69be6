"""Find how many samples a batch holds, and the layout of its lists."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from lightning_vram.core.batches.leaves import count_rows, describe
from lightning_vram.core.batches.path import BatchPath, BatchSplitError, SharedKeys, is_plain, iterate
from lightning_vram.core.batches.reading import (
    Misfit,
    Reading,
    Role,
    are_pictures,
    are_too_many_for_columns,
    is_uniform,
)
from lightning_vram.core.batches.structure import take_apart

HOOK = "define split_batch(batch, size) on the LightningModule"
WAY_OUT = f"pass split= to MicroBatching, or {HOOK}"
_ROOT = BatchPath()


def find_reading(batch: object, shared: SharedKeys, known: Mapping[BatchPath, Role]) -> Reading:
    """Return the only layout of a batch that fits; lists inside may stay ambiguous, which matters only if it is cut.

    Every size that some entry suggests is tried; exactly one must fit all of the batch. A wrong guess would silently
    train on wrong pairs, so an ambiguous batch raises ``BatchSplitError``.
    """
    samples = _read_as_samples(batch, shared, known)
    role = known.get(_ROOT)
    if samples is not None and role == "samples":
        return samples
    fits, misfits = _try_sizes(batch, shared, known)
    if len(fits) > 1:
        evidence = ", but ".join(_find_evidence(batch, shared, layout.size) for layout in fits)
        raise BatchSplitError(f"The batch size is ambiguous: {evidence}. To split it, {WAY_OUT}.")
    if not fits and samples is None:
        raise _explain(batch, shared, misfits)
    if not fits:
        assert samples is not None
        _refuse_two_batches(batch, shared)
        return samples
    if samples is not None and role is None and _look_like_samples(batch):
        raise BatchSplitError(
            f"The batch layout is ambiguous: {samples.size} samples, or {samples.size} columns of {fits[0].size}. "
            f"To split it, {WAY_OUT}."
        )
    return fits[0]


def _try_sizes(
    batch: object, shared: SharedKeys, known: Mapping[BatchPath, Role]
) -> tuple[list[Reading], dict[int, Misfit]]:
    """Read the batch by every size it suggests, an outermost list as one of columns."""
    fits, misfits = [], {}
    parts = take_apart(batch)
    for size in _suggest_sizes(batch, shared):
        layout = Reading(size, shared, known)
        try:
            is_cut = layout.read(batch, _ROOT) if parts is None else layout.read_columns(parts, _ROOT)
        except Misfit as misfit:
            misfits[size] = misfit
        else:
            fits += [layout] if is_cut and layout.is_sound else []
    return fits, misfits


def _suggest_sizes(batch: object, shared: SharedKeys) -> list[int]:
    """Return what may be the number of samples, the most frequent first; of texts only if there is nothing else."""
    strong, weak = Counter[int](), Counter[int]()
    for path, value in iterate(batch, _ROOT, shared):
        rows = count_rows(value)
        parts = take_apart(value) if rows is None else None
        if rows is not None:
            strong[rows] += 1
        elif parts is not None and parts.is_list and path != _ROOT:
            (weak if is_plain(parts.values) else strong)[len(parts.values)] += 1
    return [size for size, _ in (strong or weak).most_common() if size > 0]


def _read_as_samples(batch: Any, shared: SharedKeys, known: Mapping[BatchPath, Role]) -> Reading | None:
    """Read an outermost list as one of samples; entries of several kinds and a tuple of tensors never are."""
    parts = take_apart(batch)
    if parts is None or not parts.is_list or known.get(_ROOT) == "columns" or not is_uniform(parts.values):
        return None
    if isinstance(batch, tuple) and count_rows(batch[0]) is not None:
        return None
    layout = Reading(len(parts.values), shared, known)
    layout.read_samples(parts, _ROOT)
    return layout


def _look_like_samples(batch: Any) -> bool:
    """Return whether an outermost list that fits as columns may hold samples: records, pictures, waveforms."""
    if len(batch) == 1 or isinstance(batch, tuple):
        return False
    if count_rows(batch[0]) is None:
        return True
    if len({getattr(value, "shape", None) for value in batch}) > 1:
        return are_pictures(batch)
    return are_too_many_for_columns(batch)


def _refuse_two_batches(batch: Any, shared: SharedKeys) -> None:
    """Refuse two entries that are batches by themselves: of two loaders, or two columns of unequal size."""
    if len(batch) != 2:
        return
    sizes = [layout.size for value in batch for layout in _try_sizes(value, shared, {})[0][:1]]
    if len(sizes) == len(batch):
        raise BatchSplitError(
            f"batch[0] has {sizes[0]} rows, batch[1] has {sizes[1]}: two samples, or two batches of different "
            f"size. To split them, {WAY_OUT}."
        )


def _find_evidence(batch: object, shared: SharedKeys, size: int) -> str:
    for path, value in iterate(batch, _ROOT, shared):
        if count_rows(value) == size:
            return f"{path.code} has {size} rows"
    for path, value in iterate(batch, _ROOT, shared):
        parts = take_apart(value)
        if parts is not None and parts.is_list and len(parts.values) == size:
            return f"{path.code} is a list of {size}"
    return ""


def _explain(batch: object, shared: SharedKeys, misfits: Mapping[int, Misfit]) -> BatchSplitError:
    for size, misfit in misfits.items():
        return BatchSplitError(
            f"{misfit.path.code} {misfit.found}, but the batch has {size} samples "
            f"({_find_evidence(batch, shared, size)}). If it belongs to all samples, name it: "
            f'shared_keys=["{misfit.path.shared_key}"]; if not, {WAY_OUT}.'
        )
    return BatchSplitError(
        f"No entry of the batch shows how many samples it has: {describe(batch)}. To split it, {WAY_OUT}."
    )
