"""Name a batch by its structure, dtypes and shapes: batches of one name cost the same."""

import hashlib
from typing import Any

from lightning_vram.core.batches.leaves import describe
from lightning_vram.core.batches.structure import take_apart

_MAX_LENGTH = 160


def describe_shapes(batch: Any) -> str:
    """Return a short text that is equal for batches of the same structure, dtypes and shapes, in all processes.

    Args:
        batch: Any object, also one that cannot be cut.

    Returns:
        Up to 160 characters; of a longer description the beginning, and a hash of all of it.
    """
    text = _describe_all(batch)
    if len(text) <= _MAX_LENGTH:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[: _MAX_LENGTH - len(digest) - 4]}... {digest}"


def _describe_all(value: Any) -> str:
    parts = take_apart(value)
    if parts is None:
        return describe(value)
    if parts.is_list:
        inner = [_describe_all(part) for part in parts.values]
        inside = f"{len(inner)} x {inner[0]}" if len(inner) > 1 and len(set(inner)) == 1 else ", ".join(inner)
    else:
        inside = ", ".join(f"{k}: {_describe_all(part)}" for k, part in zip(parts.labels, parts.values, strict=True))
    return f"{type(value).__name__}({inside})"
