"""Note how every tensor is made, as the operators pass by.

What is noted are weak references: nothing is kept alive by it. The recorder also sees every write: a tensor that a
recipe ends on is copied before it is overwritten, and a value that was overwritten is not taken for what it was.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.core.hooks.mode import QuietMode, count_writes
from lightning_vram.core.operators.families import (
    Family,
    family_of,
    functional_form,
    iterate_written,
    shares_version,
    written_arguments,
)
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES, PLAIN_TYPES
from lightning_vram.core.tensors.versions import is_strided, version_of
from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.private_names.torch.operator_calls import call_operator
from lightning_vram.private_names.torch.operators import BATCH_NORM_WITHOUT_STATISTICS, TO_COPY, is_on_lists
from lightning_vram.private_names.torch.tensors import num_writes
from lightning_vram.techniques.in_place_fusion.recomputation.dropout_recipes import DropoutRecipe, note_draw
from lightning_vram.techniques.in_place_fusion.recomputation.kept import Kept
from lightning_vram.techniques.in_place_fusion.recomputation.norm_recipes import (
    BatchNormRecipe,
    is_training,
    second_run,
    without_running_statistics,
)
from lightning_vram.techniques.in_place_fusion.recomputation.noted_values import NotedValues
from lightning_vram.techniques.in_place_fusion.recomputation.rebuilding import Dropped
from lightning_vram.techniques.in_place_fusion.recomputation.recipes import (
    CopyValue,
    MaskValue,
    Recipe,
    Value,
    WriteRecipe,
)

aten = torch.ops.aten

COPIED_BYTES = 64 * 1024  # weights of norms and small buffers; what is larger is not copied to rebuild from it
_MAX_HELD = 4
_NUM_WITHOUT_STATISTICS = 6  # arguments of a batch norm that has no running statistics
_HoldInputs = Callable[[Value], "list[Kept | Dropped] | None"]
_SCALINGS = frozenset({aten.mul_.Tensor, aten.div_.Tensor, aten.mul_.Scalar, aten.div_.Scalar})


class RecipeRecorder(QuietMode):
    """Notes a :class:`Value` for each result of a cheap operator while it is entered."""

    def __init__(self, dropout: Literal["mask", "replay"], hold_inputs: "weakref.WeakMethod[_HoldInputs]") -> None:
        """Make a recorder.

        Args:
            dropout: How masks can be had again.
            hold_inputs: Decides whether what a growing operator read has to outlive the caller's references to it.
        """
        super().__init__()
        self._dropout = dropout
        self._hold_inputs = hold_inputs
        self._held: deque[Recipe] = deque()
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        self.values = NotedValues()
        self.parameters_move = False
        """Whether parameters are freed between the layers' forwards: recipes then end on copies of the small ones."""
        self._position = 0
        self._program = 0, 0
        self._learned: list[Recipe] | None = []  # all recipes of this run
        self._useless: dict[int, Any] = {}  # position -> operator

    def clear(self, num_saved: int) -> bool:
        """Forget this run, in which autograd saved ``num_saved`` tensors, but for what was learned from it.

        Returns:
            Whether it was another program than the one before.
        """
        self.values.clear()
        self._held.clear()
        self._copies.clear()
        return self._learn(num_saved)

    @property
    def position(self) -> int:
        """Number of the cheap or writing operator that ran last."""
        return self._position

    def mark_used(self, value: Value) -> None:
        """Note that ``value`` will be made again, so that its recipe is noted in later runs too."""
        if self._learned is None:
            return
        waiting = [value]
        while waiting:
            recipe = waiting.pop().recipe
            if recipe is not None and not recipe.is_used:
                recipe.is_used = True
                waiting.extend(recipe.inputs)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func, _UNKNOWN)
        if handler is _UNKNOWN:
            handler = _HANDLERS[func] = _choose_handler(func)
        if (
            handler is None
            or self._is_paused
            or torch.is_inference_mode_enabled()
            or (types and not PLAIN_TYPES.issuperset(types))
        ):
            if handler in _WRITERS and not self._is_paused:
                self._before_unseen_write(func, args, kwargs)
            return call_operator(func, args, kwargs)
        self._position += 1
        if self._useless.get(self._position) is func:
            return func(*args, **kwargs) if kwargs else func(*args)  # type: ignore[misc]  # mypy narrows it to None
        return handler(self, func, args, kwargs)

    def _learn(self, num_saved: int) -> bool:
        """Take no notes, from the next run on, where those of this run were of no use."""
        is_another = (self._position, num_saved) != self._program
        if self._learned is not None:
            self._useless = {recipe.position: recipe.function for recipe in self._learned if not recipe.is_used}
            self._learned = None
        elif is_another:
            self._useless = {}
            self._learned = []
        self._program = self._position, num_saved
        self._position = 0
        return is_another

    def _recipe(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, depth: int = 1) -> Recipe:
        inputs: list[Value] = []
        recipe = Recipe(function, self._with_values(args, inputs), kwargs, inputs, depth)
        recipe.position = self._position
        if self._learned is not None:
            self._learned.append(recipe)
        return recipe

    def _with_values(self, args: Iterable[Any], inputs: list[Value]) -> tuple[Any, ...]:
        filled: list[Any] = []
        for arg in args:
            if isinstance(arg, Tensor):
                if self.parameters_move and _is_small_weight(arg, args):
                    arg = self._copy_parameter(arg)
                else:
                    arg = self.values.value_of(arg)
                    inputs.append(arg)
            elif type(arg) is list:
                arg = list(self._with_values(arg, inputs))
            filled.append(arg)
        return tuple(filled)

    def _copy_parameter(self, parameter: Tensor) -> Tensor:
        """Copy a parameter that will not be there when a second run asks: FSDP frees it after its layer's forward."""
        known = self._copies.get(id(parameter))
        if known is None or known[0] is not parameter or known[1] != num_writes(parameter):
            with self.paused(), torch.no_grad():
                known = self._copies[id(parameter)] = (parameter, num_writes(parameter), parameter.detach().clone())
        return known[2]

    def _note(self, tensor: Tensor, recipe: Recipe, index: int = 0) -> Value:
        return self.values.note(tensor, recipe, version_of(tensor), index)

    def _note_all(self, results: Iterable[Any], recipe: Recipe) -> None:
        tensors = [(index, tensor) for index, tensor in enumerate(results) if isinstance(tensor, Tensor)]
        recipe.siblings = [weakref.ref(self._note(tensor, recipe, index)) for index, tensor in tensors]

    # Handlers. Each runs the operator and returns what it returns.

    def _elementwise(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        are_tensors = len(args) > 1 and isinstance(args[1], Tensor) and isinstance(args[0], Tensor)  # not ``2 ** x``
        if are_tensors and args[0].dtype is not args[1].dtype:
            return self._growing(func, args, kwargs)  # a sum in float32 of what was made in 16 bits
        recipe = self._recipe(func, args, kwargs)
        result = func(*args, **kwargs) if kwargs else func(*args)
        self._note(result, recipe)
        return result

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        recipe = self._recipe(func, args, kwargs, 0)
        results = func(*args, **kwargs) if kwargs else func(*args)
        is_one = isinstance(results, Tensor)
        values = []
        for index, result in enumerate((results,) if is_one else results):
            # Autograd will let it share the version of its base, which counts from zero until then.
            version = version_of(args[0] if shares_version(func) else result)
            values.append(self.values.note(result, recipe, version, index))
        if not is_one:
            recipe.siblings = [weakref.ref(value) for value in values]
        return results

    def _growing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        recipe = self._recipe(func, args, kwargs)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if not is_strided(result) or (func is TO_COPY and not _is_believed_copy(args[0], result)):
            return result
        if not torch.is_grad_enabled():
            self._note(result, recipe)
            return result

        def release(_: Any) -> None:
            recipe.held = None

        value = self.values.note(result, recipe, version_of(result), on_death=release)
        hold_inputs = self._hold_inputs()
        recipe.held = hold_inputs(value) if hold_inputs is not None else None
        if recipe.held:  # for the operators to come; a result that nobody saves must not hold them for long
            self._held.append(recipe)
            if len(self._held) > _MAX_HELD:
                self._held.popleft().held = None
        return result

    def _copy_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if kwargs and args[0].requires_grad:  # ``contiguous`` and ``reshape`` name a memory format
            return self._elementwise(func, args, kwargs)
        recipe = self._recipe(func, args, kwargs)
        result = func(*args, **kwargs) if kwargs else func(*args)
        self.values.note(result, recipe, version_of(result), kind=CopyValue)
        return result

    def _several_results(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        recipe = self._recipe(func, args, kwargs)
        results = func(*args, **kwargs) if kwargs else func(*args)
        if isinstance(results, Tensor):  # ``max`` has a form with one
            self._note(results, recipe)
        else:
            self._note_all(results, recipe)
        return results

    def _norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        recipe = self._recipe(func, args, kwargs)
        results = func(*args, **kwargs) if kwargs else func(*args)
        self._note(results if isinstance(results, Tensor) else results[0], recipe)
        return results

    def _batch_norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        in_training = is_training(func, args)
        statistics = (
            [arg for arg in args[3:5] if isinstance(arg, Tensor)] if len(args) > _NUM_WITHOUT_STATISTICS else []
        )
        if in_training:  # the kernel moves the running statistics and does not tell
            for statistic in statistics:
                if self.values.is_kept(statistic) or self.values.find(statistic) is not None:
                    self._before_write(statistic, is_told=False)
        inputs: list[Value] = []
        if in_training or not statistics:
            filled = self._with_values(without_running_statistics(func, args), inputs)
        else:  # copies: whoever moves them later does not tell
            with self.paused():
                copies = [statistic.clone() for statistic in statistics]
            filled = (*self._with_values(args[:3], inputs), *copies, *args[5:])
        recipe = BatchNormRecipe(second_run(func), filled, kwargs, inputs)
        recipe.position = self._position
        results = func(*args, **kwargs) if kwargs else func(*args)
        if in_training and func is not BATCH_NORM_WITHOUT_STATISTICS:
            recipe.replace_running_statistics(args[3])
        if in_training and func is aten.native_batch_norm.default:
            recipe.keep_statistics(results)
        self._note(results[0], recipe)
        return results

    def _native_dropout(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        source, probability, train = args[0], args[1], args[2] if len(args) > 2 else True
        if train is False:
            return self._several_results(func, args, kwargs)
        draw = note_draw(func, source, probability) if self._dropout == "replay" else None
        of_source = self.values.value_of(source)
        result, mask = func(*args, **kwargs) if kwargs else func(*args)
        of_mask = self.values.note(mask, draw, num_writes(mask), 1, kind=MaskValue)
        of_mask.is_scaled = False  # type: ignore[attr-defined]
        self._position += 1
        recipe = DropoutRecipe(of_source, of_mask, probability)
        recipe.position = self._position
        self._note(result, recipe)
        return result, mask

    def _bernoulli(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        mask = args[0]
        generator = kwargs.get("generator") if kwargs else None
        probability = args[1] if len(args) > 1 else (kwargs or {}).get("p", 0.5)
        self._before_write(mask)
        draw = note_draw(func, mask, probability, generator) if self._dropout == "replay" else None
        result = func(*args, **kwargs) if kwargs else func(*args)
        value = self.values.note(mask, draw, num_writes(mask) + 1, kind=MaskValue)
        value.is_scaled = False  # type: ignore[attr-defined]
        return result

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        target = args[0]
        before = self.values.find(target)
        if before is None:  # such as a counter of batches
            self._before_write(target, is_told=False)
            return func(*args, **kwargs) if kwargs else func(*args)
        recipe = None
        if (before.recipe is not None or before.find_kept() is not None or before.is_mask) and _keeps_dtype(args):
            inputs: list[Value] = []
            filled = self._with_values(args, inputs)
            recipe = WriteRecipe(functional_form(func), filled, kwargs, inputs, target)
            recipe.position = self._position
        self._before_write(target)
        result = func(*args, **kwargs) if kwargs else func(*args)
        version = num_writes(target) + 1  # autograd counts the write after this returns
        if recipe is not None and isinstance(before, MaskValue) and before.recipe is None:
            if func in _SCALINGS and _is_scale(args[1], target.dtype):
                before.version = version  # the zeros of the mask are still there to be read
                before.is_scaled = True
            else:
                recipe = None
        self.values.note(target, recipe, version)
        return result

    def _writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        targets = list(iterate_written(func, args, kwargs))
        for target in targets:
            self._before_write(target, is_told=False)  # fused optimizers count no version either
        result = call_operator(func, args, kwargs)
        if is_on_lists(func):
            count_writes(targets)
        return result

    def _before_write(self, target: Tensor, *, is_told: bool = True) -> None:
        """Save what recipes end on, and forget what is not told by a version."""
        with self.paused():
            self.values.before_write(target)
        if not is_told:
            self.values.forget(target)

    def _before_unseen_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Protect what is kept from writes in inference mode and by wrappers of tensors, of which nothing is noted."""
        for target in iterate_written(func, args, kwargs):
            if type(target) in PLAIN_TYPES:
                self._before_write(target, is_told=False)


_Handler = Callable[[RecipeRecorder, Any, tuple[Any, ...], dict[str, Any] | None], Any]
_OF_FAMILY: dict[Family, _Handler] = {
    Family.ELEMENTWISE: RecipeRecorder._elementwise,
    Family.VIEW: RecipeRecorder._view,
    Family.GROWING: RecipeRecorder._growing,
    Family.SEVERAL_RESULTS: RecipeRecorder._several_results,
    Family.NORM: RecipeRecorder._norm,
    Family.BATCH_NORM: RecipeRecorder._batch_norm,
    Family.DROPOUT: RecipeRecorder._native_dropout,
    Family.BERNOULLI: RecipeRecorder._bernoulli,
}
_WRITERS = (RecipeRecorder._in_place, RecipeRecorder._writing, RecipeRecorder._bernoulli)
_HANDLERS: dict[Any, _Handler | None] = {}  # None: nothing to note
_UNKNOWN: Any = object()


def _choose_handler(func: Any) -> _Handler | None:
    if func is aten.clone.default:
        return RecipeRecorder._copy_of
    handler = _OF_FAMILY.get(family_of(func))
    if handler is None and written_arguments(func):
        handler = RecipeRecorder._in_place if functional_form(func) is not None else RecipeRecorder._writing
    return handler


def _is_believed_copy(source: Tensor, copy: Tensor) -> bool:
    """Whether a converted copy is made again: not one from another device, nor one that may be made to be written.

    A batch is converted and then changed by NumPy or an extension, past all operators; what has a gradient is not.
    """
    return copy.device == source.device and (source.requires_grad or type(source) in PARAMETER_CLASSES)


def _is_small_weight(arg: Tensor, args: Iterable[Any]) -> bool:
    """Whether it is a parameter beside others, such as the weight of a norm, and not what a view is made of."""
    return type(arg) in PARAMETER_CLASSES and arg.nbytes <= COPIED_BYTES and next(iter(args)) is not arg


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
    if isinstance(arg, FakeTensor) or (isinstance(arg, Tensor) and (arg.dim() > 0 or arg.device.type != "cpu")):
        return False
    value = abs(float(arg))  # ``mul_(2.0)`` arrives with a tensor on the host made of the number
    smallest = torch.finfo(dtype).tiny if dtype.is_floating_point else 1.0
    return smallest * 2 < value < 1 / (smallest * 2)
