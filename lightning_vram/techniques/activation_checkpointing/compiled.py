"""Checkpoint a layer inside of compiled code, where the compiler's partitioner does the work."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy

# Past the saved-tensor hooks of others, as always. From torch 2.15 on it has to be said: else a warning tells that a
# later version will hand them what is kept. Where nothing is kept it means nothing.
_RESPECT = "respect_saved_tensors_hooks"
_HOOKS: dict[str, Any] = {_RESPECT: False} if _RESPECT in inspect.signature(checkpoint).parameters else {}


def compiled_checkpoint(save: SavePolicy | None, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``forward`` so that the compiler recomputes it, but for the operators of ``save``.

    The compiler takes a list of operators: ``every_n`` does not count there, all of them are kept.
    """
    run = functools.partial(forward, **kwargs)  # past the checkpoint, which has keywords of its own
    if save is None:
        return checkpoint(run, *args, use_reentrant=False)
    contexts = functools.partial(create_selective_checkpoint_contexts, list(save.resolved))
    return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **_HOOKS)
