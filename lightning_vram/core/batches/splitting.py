"""Cut a batch into micro-batches: by the user's function if there is one, else by the contents of the batch.

Tensors are cut along dimension 0 into views, lists of samples into shorter lists; containers are built anew, so a step
that changes a container does not change the batch. Entries that are the same for all samples go into every part. An
ambiguous entry is refused, and the message names it.

The cost: some microseconds of Python for each entry; no memory, except for sparse tensors and packed sequences. A step
that writes into a tensor of its micro-batch writes into the batch.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from lightning_vram.core.batches.leaves import count_elements, count_rows, cut_rows, describe, is_constant
from lightning_vram.core.batches.path import BatchPath, BatchSplitError, SharedKeys, iterate
from lightning_vram.core.batches.reading import Reading, Role
from lightning_vram.core.batches.sizing import WAY_OUT, find_reading
from lightning_vram.core.batches.structure import refresh, take_apart
from lightning_vram.memory.device.out_of_memory import is_out_of_memory

__all__ = ["BatchSplitError", "BatchSplitter"]

_ROOT = BatchPath()
_MAX_LENGTH = 160  # of the name of a shape


class BatchSplitter:
    """Finds the samples of batches, and cuts batches between them.

    These follow the samples: tensors (also sparse and nested ones), NumPy arrays and packed sequences with a row for
    each, and lists with an entry for each, such as captions, pictures of different sizes or targets of a detector.
    These are for all samples: ``None``, numbers, texts, tensors without dimensions or with one row, and ``shared_keys``
    (such as ``"meta.weights"`` or ``"1.mask"``), which must be in every batch if ``has_all_keys``.

    A list may hold columns or samples. If a batch leaves that open, the layout of its lists in earlier batches decides.

    Example:
        >>> import torch
        >>> splitter = BatchSplitter(shared_keys=["weights"])
        >>> batch = {"x": torch.arange(3), "text": ["a", "b", "c"], "weights": torch.ones(7)}
        >>> splitter.batch_size(batch)
        3
        >>> [(part["x"].tolist(), part["text"]) for part in splitter.split(batch, [2, 1])]
        [([0, 1], ['a', 'b']), ([2], ['c'])]
    """

    def __init__(self, shared_keys: Sequence[str] = (), *, has_all_keys: bool = True) -> None:
        self._shared = SharedKeys(shared_keys)
        self._has_all_keys = has_all_keys
        self._known: dict[BatchPath, Role] = {}

    def batch_size(self, batch: Any) -> int:
        """Return the number of samples; ``BatchSplitError`` if none or several fit, or a shared key is missing."""
        return self._read(batch).size

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Cut a batch into parts of ``sizes`` samples, together all, in new containers around views of the tensors."""
        layout = self._read(batch)
        if min(sizes, default=0) < 1 or sum(sizes) != layout.size:
            raise ValueError(f"split(sizes) must be numbers above 0 that add up to {layout.size}, got {list(sizes)}.")
        if len(sizes) > 1:
            for path, layouts in layout.ambiguous.items():
                raise BatchSplitError(f"{path.code} is ambiguous: {layouts}. To split it, {WAY_OUT}.")
        try:
            return self._cut(batch, _ROOT, layout, sizes)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise BatchSplitError(f"A micro-batch cannot be rebuilt: {error} Please {WAY_OUT}.") from error

    def shape_key(self, batch: Any) -> str:
        """Return at most 160 characters, equal for batches of one structure, dtypes and shapes, on all ranks."""
        text = describe_all(batch)
        if len(text) <= _MAX_LENGTH:
            return text
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return f"{text[: _MAX_LENGTH - len(digest) - 4]}... {digest}"

    def elements(self, batch: Any) -> int:
        """Count the elements of entries that follow the samples, or of all that are not shared if it cannot be cut."""
        try:
            layout = self._read(batch)
        except BatchSplitError:
            return sum(count_elements(value) for _, value in iterate(batch, _ROOT, self._shared))
        return self._count(batch, _ROOT, layout)

    def _read(self, batch: Any) -> Reading:
        if self._has_all_keys:
            self._shared.check(batch)
        try:
            layout = find_reading(batch, self._shared, self._known)
        except BatchSplitError:
            if not self._known:
                raise
            layout = find_reading(batch, self._shared, {})
        if layout.size > 1:  # one sample is read alike either way
            self._known |= {path: role for path, role in layout.roles.items() if path not in layout.ambiguous}
        return layout

    def _cut(self, value: Any, path: BatchPath, layout: Reading, sizes: Sequence[int]) -> list[Any]:
        if self._shared.cover(path):
            return [value for _ in sizes]
        starts = [sum(sizes[:position]) for position in range(len(sizes))]
        rows = count_rows(value)
        if rows is not None:
            is_cut = rows == layout.size and len(sizes) > 1
            return [cut_rows(value, *part) if is_cut else refresh(value) for part in zip(starts, sizes, strict=True)]
        parts = take_apart(value)
        if parts is None:
            return [value for _ in sizes]
        if layout.roles.get(path) == "samples":
            samples = [refresh(sample) for sample in parts.values]
            return [parts.build(samples[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
        children = zip(parts.values, path.children(parts), strict=True)
        columns = [self._cut(inner, child, layout, sizes) for inner, child in children]
        return [parts.build([column[part] for column in columns]) for part in range(len(sizes))]

    def _count(self, value: Any, path: BatchPath, layout: Reading) -> int:
        if self._shared.cover(path) or is_constant(value):
            return 0
        parts = take_apart(value)
        if parts is None:
            return count_elements(value) if count_rows(value) == layout.size else 0
        if layout.roles.get(path) == "samples":
            return sum(count_elements(inner) for _, inner in iterate(value, path, self._shared))
        children = zip(parts.values, path.children(parts), strict=True)
        return sum(self._count(inner, child, layout) for inner, child in children)


def describe_all(value: Any) -> str:
    """Return dtypes and shapes of everything in a nest of containers."""
    parts = take_apart(value)
    if parts is None:
        return describe(value)
    if parts.is_list:
        inner = [describe_all(part) for part in parts.values]
        inside = f"{len(inner)} x {inner[0]}" if len(inner) > 1 and len(set(inner)) == 1 else ", ".join(inner)
    else:
        inside = ", ".join(f"{k}: {describe_all(part)}" for k, part in zip(parts.labels, parts.values, strict=True))
    return f"{type(value).__name__}({inside})"
