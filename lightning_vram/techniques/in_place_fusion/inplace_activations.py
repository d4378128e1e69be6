"""Find the activations of a model that may overwrite their input, and let them.

That is right only if nothing else needs the input: no skip connection reads it, no view, hook or caller holds it, and
what made it has not saved it for its backward. One observed step shows that, for the same control flow. ``LeakyReLU``
saves one activation less for backward; ``ReLU`` only the moment in which input and output both exist. With
``recomputation``, which drops more, it adds little.
"""

from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

from lightning_vram.private_names.torch import SEE_INPUT, have_all_modules_hooks, is_view
from lightning_vram.techniques.in_place_fusion.observed_links import (
    Memory,
    StorageWatch,
    collect_cycles,
    has_tensor_hooks,
    is_plain,
    watch_hooks,
)

_EXACT = {nn.ReLU.forward, nn.LeakyReLU.forward}
_REFUSED: dict[str, tuple[type[nn.Module], ...]] = {
    "saves nothing: autograd copies its input first": (
        *(nn.ReLU6, nn.Hardtanh, nn.Threshold, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.Mish),
    ),
    "its backward rounds differently in place": (nn.ELU, nn.SELU, nn.CELU),
    "in place it draws its random numbers with another kernel": (
        *(nn.RReLU, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    ),
}
_NEVER: dict[Any, str] = {kind.forward: reason for reason, kinds in _REFUSED.items() for kind in kinds}
# Autograd nodes that do not save the first result of their operator. Any other may.
_DO_NOT_KEEP_OUTPUT = {
    f"{operator}Backward0"
    for operator in (
        *("Add", "Addmm", "Baddbmm", "Bmm", "Cat", "Clone", "Convolution", "Div", "Mm", "Mul", "Sub", "ToCopy"),
        *("CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNorm"),
        *("FusedRmsNorm", "NativeGroupNorm", "NativeLayerNorm"),
        *("AvgPool2D", "MaxPool2DWithIndices", "UpsampleBilinear2D", "UpsampleNearest2D"),
    )
}


class InplaceObserver:
    """Observes in one training step which activations inside a module may overwrite their input.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.LeakyReLU(), nn.Sigmoid(), nn.ReLU())
        >>> with InplaceObserver(net) as observer:
        ...     loss = net(torch.randn(2, 3, 8, 8)).sum()
        >>> observer.safe, observer.refused
        (['1'], {'3': 'the module before keeps its output for backward'})
        >>> handle = set_inplace(net, observer.safe)
        >>> net[1].inplace
        True
        >>> handle.remove()
    """

    def __init__(self, module: nn.Module) -> None:
        self.safe: list[str] = []  # names, in the order of the model
        self.refused: dict[str, str] = {}  # other modules whose ``inplace`` is off, and why they may not
        self.saved_bytes: dict[str, int] = {}  # output that each safe module does not allocate, in its largest call
        self._module = module
        self._candidates: dict[nn.Module, str] = {}
        self._watch = StorageWatch()
        self._exit = ExitStack()
        self._given: dict[nn.Module, list[Memory]] = defaultdict(list)
        self._open: dict[nn.Module, list[Memory | None]] = defaultdict(list)
        self._made: dict[nn.Module, list[Memory]] = defaultdict(list)
        self._graph: list[Any] = []  # nodes: as long as they live, what they saved is not freed

    def __enter__(self) -> Self:
        for name, member in self._module.named_modules():
            if getattr(member, "inplace", True) is False:
                if (reason := _why_never(member)) is None:
                    self._candidates[member] = name
                else:
                    self.refused[name] = reason
        with ExitStack() as stack:
            watch_hooks(self._module, self._watch, stack)  # first: ours are not the user's
            for member in self._candidates:
                stack.callback(member.register_forward_pre_hook(self._before, with_kwargs=True).remove)
                stack.callback(member.register_forward_hook(self._after).remove)
            stack.enter_context(self._watch)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._exit.close()
        collect_cycles(memory for memories in self._given.values() for memory in memories)
        for member, name in self._candidates.items():
            reason = self.refused.get(name) or self._why_unsafe(member)
            if reason is None and (kind is not None or have_all_modules_hooks(SEE_INPUT)):
                reason = "the step was not finished" if kind is not None else "a hook sees its input"
            if reason is None:
                self.safe.append(name)
            else:
                self.refused[name] = reason
                self.saved_bytes.pop(name, None)
        for records in (self._given, self._open, self._made, self._graph):
            records.clear()

    def _why_unsafe(self, member: nn.Module) -> str | None:
        """Return what came to light after the calls."""
        memories = self._given[member]
        if not memories:
            return "it was not called"
        if any(memory.is_held() for memory in memories):
            return "its input is still held after the step"
        if any(memory.is_touched_again() for memory in memories):
            return "its input is read again"
        if any(memory.num_writes for memory in self._made[member]):
            return "its output is overwritten"  # in place it is its output that is saved
        return "a hook sees its input" if any(memory.is_seen_by_hook for memory in memories) else None

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return None
        memory = self._watch.find(args[0]) if args and is_plain(args[0]) else None
        reason = self._why_not(args, memory)
        if reason is not None or memory is None:
            self.refused.setdefault(self._candidates[module], reason or "")
            self._open[module].append(None)
            return None
        self._open[module].append(memory)
        self._given[module].append(memory)
        return (self._watch.hand_over(args[0], memory), *args[1:]), kwargs

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        memory = self._open[module].pop() if self._open[module] else None
        if memory is None or torch.compiler.is_compiling():
            return
        memory.is_open = False
        self._graph.append(output.grad_fn)
        made = self._watch.find(output)
        if made is not None:
            made.expect(output)
            self._made[module].append(made)
        name = self._candidates[module]
        self.saved_bytes[name] = max(output.nbytes, self.saved_bytes.get(name, 0))

    def _why_not(self, args: tuple[Any, ...], memory: Memory | None) -> str | None:
        """Return what is known before the call."""
        if not args or not is_plain(args[0]):
            return "its input is not an ordinary tensor"
        tensor = args[0]
        if memory is None or (tensor.is_leaf and tensor.requires_grad):
            return "its input is the batch or a parameter"
        reasons = {
            "its input is a view": is_view(tensor),
            "a hook sees its input": memory.is_seen_by_hook or has_tensor_hooks(tensor),
            "the module before keeps its output for backward": _is_saved(tensor),
            "its input is read by another before": memory.is_given or memory.num_reads > 0,
        }
        return next((reason for reason, is_met in reasons.items() if is_met), None)


class InplaceHandle:
    """Undoes :func:`set_inplace`."""

    def __init__(self, changed: list[Any]) -> None:
        self._changed = changed

    def remove(self) -> None:
        """Switch the modules back. Calling it again does nothing."""
        while self._changed:
            self._changed.pop().inplace = False


def set_inplace(module: nn.Module, names: Iterable[str]) -> InplaceHandle:
    """Let the named activations overwrite their input; return the undo.

    Raises ``ValueError`` if there is no such module or it has no such switch. All modules are then as they were.
    """
    members: dict[str, Any] = dict(module.named_modules(remove_duplicate=False))
    chosen: list[Any] = []
    for name in names:
        if not isinstance(getattr(members.get(name), "inplace", None), bool):
            raise ValueError(f"{name!r} is not a module with a switch `inplace`.")
        if not members[name].inplace:
            chosen.append(members[name])
    for member in chosen:
        member.inplace = True
    return InplaceHandle(chosen)


def _why_never(member: nn.Module) -> str | None:
    forward = getattr(type(member), "forward", None)  # scripted modules have none
    if forward in _NEVER:
        return _NEVER[forward]
    if forward not in _EXACT or "forward" in vars(member):
        return "it is not a stock activation"
    if isinstance(member, nn.LeakyReLU) and not member.negative_slope >= 0:
        return "its backward does not work in place with a negative slope"
    return None


def _is_saved(tensor: Tensor) -> bool:
    """Whether what made ``tensor`` may need it in its backward."""
    if tensor.grad_fn is None:
        return torch.is_grad_enabled()  # what made it is frozen as yet, and may not stay so
    return tensor.grad_fn.name() not in _DO_NOT_KEEP_OUTPUT
