"""One call of a layer that is recomputed in the backward.

It follows the rules of non-reentrant :func:`torch.utils.checkpoint.checkpoint`: see
:mod:`~lightning_vram.core.hooks.recomputed_saves`. In addition, modules and random state are as in the first run,
inputs may be passed anywhere, results of chosen operators are taken from the first run, and a recomputation that
diverges is an error. In compiled code the compiler's partitioner does all that, under PyTorch's checkpoint.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_vram.core.hooks.hidden_from_dynamo import hide_from_dynamo
from lightning_vram.core.hooks.recomputed_saves import SecondRun
from lightning_vram.core.hooks.stage import exact_only
from lightning_vram.core.rollback.forward_state import ForwardState, Learned
from lightning_vram.core.tensors.nests import flatten_arguments
from lightning_vram.memory.tracking.following import module_scope
from lightning_vram.private_names.torch.trees import tree_map
from lightning_vram.techniques.activation_checkpointing.kept_arguments import Arguments, KeptArguments
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_checkpointing.two_runs import Counts, LayerRuns, Recomputing

# Past the saved-tensor hooks of others, as always. From torch 2.15 on it has to be said: else a warning tells that a
# later version will hand them what is kept. Where nothing is kept it means nothing.
_RESPECT = "respect_saved_tensors_hooks"
_HOOKS: dict[str, Any] = {_RESPECT: False} if _RESPECT in inspect.signature(checkpoint).parameters else {}


@dataclass
class Observation:
    """What is known about a layer from its earlier calls."""

    learned: Learned = field(default_factory=Learned)  # what it writes and draws
    # whether it writes its input tensors in place; ``None`` before the first call
    overwrites_inputs: bool | None = None
    num_kept: int | None = None  # results of operators it kept in its last call, besides its inputs
    counts: Counts = field(default_factory=Counts)


@hide_from_dynamo  # as PyTorch's checkpoint is, in what surrounds compiled code
def call_recomputed(
    modules: Sequence[nn.Module],
    forward: Callable[..., Any],
    arguments: Arguments,
    observation: Observation,
    recomputing: Recomputing,
) -> Any:
    """Call ``forward`` and save its inputs only; the backward calls it again."""
    if observation.overwrites_inputs is None and _has_lazy(modules):
        args, kwargs = arguments
        return forward(*args, **kwargs)  # draws its weights in this call, as a second run would not
    watch = recomputing.watch
    watching = watch.call(flatten_arguments(arguments)[0]) if watch is not None else nullcontext()
    with watching, exact_only:
        kept = KeptArguments(arguments, observation.overwrites_inputs)
        state = ForwardState(modules, observation.learned, kept.devices())
        runs = LayerRuns(modules, recomputing, observation.counts)

        def run_again(run: SecondRun) -> None:
            def work() -> None:
                args, kwargs = kept.give(is_overwritten=observation.overwrites_inputs)
                with module_scope(modules[0]), runs.second(run):
                    forward(*args, **kwargs)

            state.run(work)

        saves = runs.saves(run_again)
        args, kwargs = arguments
        del arguments
        with runs.first(saves):
            output = forward(*args, **kwargs)
        saves.is_complete = True
        state.settle()
        _settle(kept, observation, recomputing.name)
        observation.num_kept = runs.settle()
    return output


def _settle(kept: KeptArguments, observation: Observation, name: str) -> None:
    """Learn whether the layer overwrote its inputs, and keep what the second run needs of them."""
    if kept.overwrites_inside():
        raise RuntimeError(
            f"layer {name} overwrites a tensor inside an input object, and cannot be recomputed. Let it assign a new "
            "tensor, or choose other layers to checkpoint."
        )
    is_overwritten = kept.are_overwritten()
    if is_overwritten and kept.share_memory():
        raise RuntimeError(
            f"layer {name} overwrites an input that shares memory with another of its inputs, and "
            "cannot be recomputed. Choose an outer layer to checkpoint."
        )
    if is_overwritten and observation.overwrites_inputs is False:
        raise RuntimeError(
            f"layer {name} overwrites its input in some forwards and not in others, and cannot be "
            "recomputed. Choose other layers to checkpoint."
        )
    observation.overwrites_inputs = bool(observation.overwrites_inputs) or is_overwritten
    kept.settle()


def _has_lazy(modules: Sequence[nn.Module]) -> bool:
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return any(map(is_lazy, tensors))


def compiled_checkpoint(save: SavePolicy | None, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``forward`` so that the compiler recomputes it, but for the operators of ``save``.

    The compiler takes a list of operators: ``every_n`` does not count there, all of them are kept.
    """
    run = functools.partial(forward, **kwargs)  # past the checkpoint, which has keywords of its own
    if save is None:
        return checkpoint(run, *args, use_reentrant=False)
    contexts = functools.partial(create_selective_checkpoint_contexts, list(save.resolved))
    return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **_HOOKS)


def drop_empty_caches(layer: nn.Module, arguments: Arguments) -> Arguments:
    """Replace key-value caches in ``arguments`` by ``None``, as transformers does under its own checkpointing.

    A layer appends its keys and values to a cache (``use_cache=True`` is the default, in training too): a second run
    would append them twice, and the cache would keep alive what checkpointing frees.
    """
    if not any(_is_cache(leaf) for leaf in (*arguments[0], *arguments[1].values())):
        return arguments

    def drop(leaf: Any) -> Any:
        if not _is_cache(leaf):
            return leaf
        position = next((module.layer_idx for module in layer.modules() if hasattr(module, "layer_idx")), 0)
        if leaf.get_seq_length(position):
            raise RuntimeError(
                f"layer {type(layer).__name__} reads a filled key-value cache and cannot be recomputed. "
                "Choose other layers to checkpoint, or train without past_key_values."
            )
        return None

    dropped: Arguments = tree_map(drop, arguments, is_leaf=_is_cache)
    return dropped


def _is_cache(value: Any) -> bool:
    return hasattr(type(value), "get_seq_length") and hasattr(type(value), "update")
