"""Record how every tensor is computed, with weak references only.

The recorder also sees every write: a tensor that a recipe ends on is copied before it is overwritten, and a value that
was overwritten is no longer used.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.core import operators
from lightning_vram.core.hooks import count_foreach_writes
from lightning_vram.core.tensors.properties import PARAMETER_CLASSES, PLAIN_TYPES, is_strided
from lightning_vram.memory.storages import NO_VERSION, storage_address, version_of
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber
from lightning_vram.private_names import dispatcher
from lightning_vram.private_names.torch import count_storage_users, num_writes, storage_identity
from lightning_vram.techniques.in_place_fusion import recipes
from lightning_vram.techniques.in_place_fusion.recipes import dropout

COPIED_BYTES = 64 * 1024  # weights of norms and small buffers; what is larger is not copied to rebuild from it
MAX_HELD = 4  # recipes whose inputs are held at a time
HoldInputs = Callable[[recipes.Value], list[recipes.Saved | recipes.Dropped] | None]


class RecipeRecorder(OperatorSubscriber):
    """Notes a ``Value`` for each result of a cheap operator while it is entered."""

    def __init__(self, dropout: Literal["mask", "replay"], hold_inputs: "weakref.WeakMethod[HoldInputs]") -> None:
        self.dropout = dropout
        self.hold_inputs = hold_inputs  # keeps what a growing operator read, if that is worth it
        self.parameters_move = False  # freed between the layers' forwards: recipes then end on copies of small ones
        self.position = 0  # number of the cheap or writing operator that ran last
        self.held: deque[recipes.Recipe] = deque()  # what they read, until the result is saved
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._values: dict[int, recipes.Value] = {}  # by id of the tensor, which may be gone and its id be another's
        self._new: list[recipes.Value] = []  # not yet in the next
        self._by_address: dict[int, list[recipes.Value]] = {}
        self._saved: dict[int, list[weakref.ref[recipes.Saved]]] = {}  # by address of the storage; outlive the run
        self._program = 0, 0
        self._learned: list[recipes.Recipe] | None = []  # all recipes of this run
        self._useless: dict[int, Any] = {}  # position -> operator

    @override
    def on_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        handler = _choose_handler(func)
        if (
            handler is None
            or self._is_paused
            or torch.is_inference_mode_enabled()
            or (types and not PLAIN_TYPES.issuperset(types))
        ):
            if handler in _WRITERS and not self._is_paused:  # in inference mode, or by wrappers of tensors
                for target in operators.iterate_written(func, args, kwargs):
                    if type(target) in PLAIN_TYPES:
                        self.before_write(target, is_counted=False)
            return self.run(func, types, args, kwargs)
        self.position += 1
        if self._useless.get(self.position) is func:
            return self.run(func, types, args, kwargs)
        return handler(self, func, args, kwargs)

    def clear(self, num_saved: int) -> bool:
        """Forget this run, in which autograd saved ``num_saved`` tensors; return whether it was another program."""
        for records in (self.held, self._copies, self._values, self._new, self._by_address):
            records.clear()
        alive = {address: [ref for ref in refs if ref() is not None] for address, refs in self._saved.items()}
        self._saved = {address: refs for address, refs in alive.items() if refs}
        is_another = (self.position, num_saved) != self._program
        if self._learned is not None:
            self._useless = {recipe.position: recipe.function for recipe in self._learned if not recipe.is_used}
            self._learned = None
        elif is_another:
            self._useless, self._learned = {}, []
        self._program = self.position, num_saved
        self.position = 0
        return is_another

    def mark_used(self, value: recipes.Value) -> None:
        """Note that ``value`` will be recomputed, so that its recipe is recorded in later runs too."""
        waiting = [value] if self._learned is not None else []
        while waiting:
            recipe = waiting.pop().recipe
            if recipe is not None and not recipe.is_used:
                recipe.is_used = True
                waiting.extend(recipe.inputs)

    def recipe(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, depth: int = 1
    ) -> recipes.Recipe:
        """Make the recipe of a call."""
        inputs: list[recipes.Value] = []
        recipe = recipes.Recipe(function, self.with_values(args, inputs), kwargs, inputs, self.position, depth)
        if self._learned is not None:
            self._learned.append(recipe)
        return recipe

    def with_values(self, args: Sequence[Any], inputs: list[recipes.Value]) -> tuple[Any, ...]:
        """Return ``args`` with values in the place of tensors, which are added to ``inputs``."""
        filled: list[Any] = []
        for arg in args:
            if isinstance(arg, Tensor):
                is_copied = self.parameters_move and type(arg) in PARAMETER_CLASSES and arg.nbytes <= COPIED_BYTES
                if is_copied and arg is not args[0]:  # such as the weight of a norm, not what a view is made of
                    arg = self._copy_parameter(arg)
                else:
                    arg = self.value_of(arg)
                    inputs.append(arg)
            elif type(arg) is list:
                arg = list(self.with_values(arg, inputs))
            filled.append(arg)
        return tuple(filled)

    def find(self, tensor: Tensor) -> recipes.Value | None:
        """Return the value of ``tensor`` as it is now, if it is known."""
        value = self._values.get(id(tensor))
        if value is None or value() is not tensor or value.version == NO_VERSION:
            return None
        # Not by way of version_of() and storage_address(): this runs for every argument of every cheap operator.
        if value.version != num_writes(tensor) or (value.address and value.address != storage_identity(tensor)):
            return None  # written to, or its ``.data`` set
        return value

    def value_of(self, tensor: Tensor) -> recipes.Value:
        """Return the value of ``tensor`` as it is now."""
        value = self.find(tensor)
        if value is None:
            return self.note(tensor, None)
        if value.is_copy:
            value.recipe = None
        return value

    def note(
        self,
        tensor: Tensor,
        recipe: recipes.Recipe | None,
        version: int | None = None,
        index: int = 0,
        on_death: Callable[[Any], None] | None = None,
        kind: type[recipes.Value] = recipes.Value,
    ) -> recipes.Value:
        """Make the value of ``tensor``, result number ``index`` of ``recipe``. ``version=None``: its present one."""
        value = kind(tensor, on_death)
        value.recipe, value.index = recipe, index
        value.version = version_of(tensor) if version is None else version
        value.address = storage_address(tensor)
        value.saved = value.dropped = None
        self._values[id(tensor)] = value
        self._new.append(value)
        return value

    def watch(self, value: recipes.Value, saved: recipes.Saved) -> None:
        """Remember that ``saved`` holds ``value``, and protect it from writes once a recipe ends on it."""
        value.saved = weakref.ref(saved)
        self._saved.setdefault(value.address, []).append(value.saved)

    def before_write(self, target: Tensor, *, is_counted: bool = True) -> None:
        """Save what recipes end on; forget values on the memory of ``target``, its own unless its version counts it."""
        address = storage_address(target)
        num_known = 1  # the target itself
        with self.paused():
            for reference in self._saved.get(address, ()):
                if (saved := reference()) is not None:
                    num_known += saved.taken is None and saved.tensor is not target
                    saved.before_write()
        if address and count_storage_users(address) > num_known:
            for value in self._new:
                self._by_address.setdefault(value.address, []).append(value)
            self._new.clear()
            for value in self._by_address.pop(address, ()):
                if value() is not target:
                    value.version = NO_VERSION
        if not is_counted and (known := self._values.pop(id(target), None)) is not None:
            known.version = NO_VERSION

    def _copy_parameter(self, parameter: Tensor) -> Tensor:
        """Copy a parameter that will not be there when recomputation asks: FSDP frees it after its layer's forward."""
        known = self._copies.get(id(parameter))
        if known is None or known[0] is not parameter or known[1] != num_writes(parameter):
            with self.paused(), torch.no_grad():
                known = self._copies[id(parameter)] = (parameter, num_writes(parameter), parameter.detach().clone())
        return known[2]


aten = torch.ops.aten
_SCALINGS = frozenset({aten.mul_.Tensor, aten.div_.Tensor, aten.mul_.Scalar, aten.div_.Scalar})


# Handlers: each runs the operator and returns its result.


def _elementwise(
    notes: RecipeRecorder,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    kind: type[recipes.Value] = recipes.Value,
) -> Any:
    are_tensors = len(args) > 1 and isinstance(args[1], Tensor) and isinstance(args[0], Tensor)  # not ``2 ** x``
    if are_tensors and args[0].dtype is not args[1].dtype:
        return _growing(notes, func, args, kwargs)  # a sum in float32 of what was made in 16 bits
    recipe = notes.recipe(func, args, kwargs)
    result = notes.run(func, (), args, kwargs)
    notes.note(result, recipe, kind=kind)
    return result


def _view(notes: RecipeRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    recipe = notes.recipe(func, args, kwargs, 0)
    results = notes.run(func, (), args, kwargs)
    is_one = isinstance(results, Tensor)
    values = []
    for index, result in enumerate((results,) if is_one else results):
        # Autograd will let it share the version of its base, which counts from zero until then.
        version = version_of(args[0] if operators.shares_version(func) else result)
        values.append(notes.note(result, recipe, version, index))
    if not is_one:
        recipe.siblings = [weakref.ref(value) for value in values]
    return results


def _growing(notes: RecipeRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    recipe = notes.recipe(func, args, kwargs)
    result = notes.run(func, (), args, kwargs)
    if not is_strided(result) or (func is dispatcher.TO_COPY and not _is_believed_copy(args[0], result)):
        return result
    if not torch.is_grad_enabled():
        notes.note(result, recipe)
        return result

    def release(_: Any) -> None:
        recipe.held = None

    value = notes.note(result, recipe, on_death=release)
    hold_inputs = notes.hold_inputs()
    recipe.held = hold_inputs(value) if hold_inputs is not None else None
    if recipe.held:  # for the operators to come; a result that nobody saves must not hold them for long
        notes.held.append(recipe)
        if len(notes.held) > MAX_HELD:
            notes.held.popleft().held = None
    return result


def _copy_of(notes: RecipeRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    is_layout = kwargs and args[0].requires_grad  # ``contiguous`` and ``reshape`` name a memory format
    return _elementwise(notes, func, args, kwargs, recipes.Value if is_layout else recipes.CopyValue)


def _several_results(notes: RecipeRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    recipe = notes.recipe(func, args, kwargs)
    results = notes.run(func, (), args, kwargs)
    if isinstance(results, Tensor):  # ``max`` has a form with one
        notes.note(results, recipe)
    else:
        tensors = [(index, tensor) for index, tensor in enumerate(results) if isinstance(tensor, Tensor)]
        recipe.siblings = [weakref.ref(notes.note(tensor, recipe, index=index)) for index, tensor in tensors]
    return results


def _norm(notes: RecipeRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    recipe = notes.recipe(func, args, kwargs)
    results = notes.run(func, (), args, kwargs)
    notes.note(results if isinstance(results, Tensor) else results[0], recipe)
    return results


def _batch_norm(notes: RecipeRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    has_statistics = func is not dispatcher.BATCH_NORM_WITHOUT_STATISTICS
    in_training = not has_statistics or bool(args[5])  # ``training``
    statistics = [arg for arg in args[3:5] if isinstance(arg, Tensor)] if has_statistics else []
    running, others = None, args[3:]
    if statistics and in_training:  # the kernel moves the running statistics and does not tell
        for statistic in statistics:
            notes.before_write(statistic, is_counted=False)
        running, others = (args[3].shape, args[3].dtype, args[3].device), (None, None, *args[5:])
    elif statistics:  # copies: whoever moves them later does not tell
        with notes.paused():
            others = (*(statistic.clone() for statistic in statistics), *args[5:])
    inputs: list[recipes.Value] = []
    function = aten.native_batch_norm.default if func is dispatcher.BATCH_NORM else func
    filled = (function, running, *notes.with_values(args[:3], inputs), *others)
    recipe = recipes.Recipe(recipes.batch_norm, filled, kwargs, inputs, notes.position)
    results = notes.run(func, (), args, kwargs)
    notes.note(results[0], recipe)
    return results


def _native_dropout(notes: RecipeRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    source, probability, train = args[0], args[1], args[2] if len(args) > 2 else True
    if train is False:
        return _several_results(notes, func, args, kwargs)
    draw = recipes.note_draw(func, source, probability) if notes.dropout == "replay" else None
    of_source = notes.value_of(source)
    result, mask = notes.run(func, (), args, kwargs)
    of_mask = notes.note(mask, draw, num_writes(mask), 1, kind=recipes.MaskValue)
    of_mask.is_scaled = False  # type: ignore[attr-defined]
    notes.position += 1
    notes.note(
        result, recipes.Recipe(dropout, (of_source, of_mask, probability), None, [of_source, of_mask], notes.position)
    )
    return result, mask


def _bernoulli(notes: RecipeRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    mask = args[0]
    generator = kwargs.get("generator") if kwargs else None
    probability = args[1] if len(args) > 1 else (kwargs or {}).get("p", 0.5)
    notes.before_write(mask)
    draw = recipes.note_draw(func, mask, probability, generator) if notes.dropout == "replay" else None
    result = notes.run(func, (), args, kwargs)
    notes.note(mask, draw, num_writes(mask) + 1, kind=recipes.MaskValue).is_scaled = False  # type: ignore[attr-defined]
    return result


def _in_place(notes: RecipeRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    target = args[0]
    before = notes.find(target)
    if before is None:  # such as a counter of batches
        notes.before_write(target, is_counted=False)
        return notes.run(func, (), args, kwargs)
    recipe = None
    if (before.recipe is not None or before.find_saved() is not None or before.is_mask) and _keeps_dtype(args):
        inputs: list[recipes.Value] = []
        recipe = recipes.Recipe(
            operators.functional_form(func), notes.with_values(args, inputs), kwargs, inputs, notes.position
        )
        recipe.strides = target.stride()
    notes.before_write(target)
    result = notes.run(func, (), args, kwargs)
    version = num_writes(target) + 1  # autograd counts the write after this returns
    if recipe is not None and isinstance(before, recipes.MaskValue) and before.recipe is None:
        if func in _SCALINGS and _is_scale(args[1], target.dtype):
            before.version = version  # the zeros of the mask are still there to be read
            before.is_scaled = True
        else:
            recipe = None
    notes.note(target, recipe, version)
    return result


def _writing(notes: RecipeRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    for target in operators.iterate_written(func, args, kwargs):
        notes.before_write(target, is_counted=False)  # fused optimizers count no version either
    result = notes.run(func, (), args, kwargs)
    count_foreach_writes(func, args, kwargs)
    return result


_Handler = Callable[[RecipeRecorder, Any, tuple[Any, ...], dict[str, Any] | None], Any]
_OF_FAMILY: dict[operators.Family, _Handler] = {
    operators.Family.ELEMENTWISE: _elementwise,
    operators.Family.VIEW: _view,
    operators.Family.GROWING: _growing,
    operators.Family.SEVERAL_RESULTS: _several_results,
    operators.Family.NORM: _norm,
    operators.Family.BATCH_NORM: _batch_norm,
    operators.Family.DROPOUT: _native_dropout,
    operators.Family.BERNOULLI: _bernoulli,
}
_WRITERS = (_in_place, _writing, _bernoulli)


@cache
def _choose_handler(func: Any) -> _Handler | None:
    if func is aten.clone.default:
        return _copy_of
    handler = _OF_FAMILY.get(operators.family_of(func))
    if handler is None and operators.written_arguments(func):
        handler = _in_place if operators.functional_form(func) is not None else _writing
    return handler


def _is_believed_copy(source: Tensor, copy: Tensor) -> bool:
    """Whether a converted copy is recomputed: not that of a batch, which NumPy may change past all operators."""
    return copy.device == source.device and (source.requires_grad or type(source) in PARAMETER_CLASSES)


def _keeps_dtype(args: tuple[Any, ...]) -> bool:
    """Whether the functional form gives the dtype and shape that the in-place form leaves."""
    target = args[0]
    for arg in args[1:]:
        if isinstance(arg, Tensor) and arg.dim() > 0 and (arg.dtype != target.dtype or arg.dim() > target.dim()):
            return False
        if isinstance(arg, complex) or (isinstance(arg, float) and not target.dtype.is_floating_point):
            return False
    return True


def _is_scale(arg: Any, dtype: torch.dtype) -> bool:
    """Whether ones that are multiplied or divided by ``arg`` stay apart from zeros."""
    if isinstance(arg, dispatcher.FakeTensor) or (
        isinstance(arg, Tensor) and (arg.dim() > 0 or arg.device.type != "cpu")
    ):
        return False
    value = abs(float(arg))  # ``mul_(2.0)`` arrives with a tensor on the host made of the number
    smallest = torch.finfo(dtype).tiny if dtype.is_floating_point else 1.0
    return smallest * 2 < value < 1 / (smallest * 2)
