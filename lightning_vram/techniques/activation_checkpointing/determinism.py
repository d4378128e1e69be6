"""Name the operator in which a recomputation differs from the forward: ``determinism_check="operators"``."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_vram.core.hooks.mode import QuietMode
from lightning_vram.core.hooks.saved_samples import RecomputationError, is_close, take_sample
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES, PLAIN_TYPES
from lightning_vram.core.tensors.versions import storage_address
from lightning_vram.private_names.torch.autograd import current_graph_task_id
from lightning_vram.private_names.torch.dispatch import without_dispatch
from lightning_vram.private_names.torch.operator_calls import call_operator
from lightning_vram.private_names.torch.operators import TO_COPY, OpOverload, schema_of
from lightning_vram.private_names.torch.trees import tree_leaves

_UNSET = ("empty", "new_empty", "resize", "set_")  # operators that leave whatever was in the memory


_Record = tuple[Any, tuple[str, ...], Tensor | None]
"""Of an operator: itself, the shapes that it returned, and a sample of its values."""


class OperatorTrace(QuietMode):
    """Writes down every operator of a first run; :meth:`comparing` gives the mode for a second.

    It costs some ten kernels and a synchronisation per operator.
    """

    def __init__(self, buffers: Iterable[Tensor] = (), records: list[_Record] | None = None) -> None:
        super().__init__()
        # Statistics in buffers are updated in both runs: what is read from them is not compared.
        self._buffers = {storage_address(buffer) for buffer in buffers} - {0}
        self._expected = records  # of the first run; ``None`` in the first run
        self._backward = current_graph_task_id()
        self._records: list[_Record] = []

    def comparing(self) -> "OperatorTrace":
        """Return a mode that raises ``RecomputationError`` at the first operator that is not as it was here."""
        return OperatorTrace(records=self._records)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = call_operator(func, args, kwargs)
        is_inner = current_graph_task_id() != self._backward  # a backward inside of the layer
        if is_inner or _is_passed_over(func, types, args):
            return output
        first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
        is_compared = not (self._is_unset_or_moving(func, args) or _is_counter(func, first))
        with without_dispatch():  # other modes are not to see our own operators
            record = (func, _describe(output), take_sample(first) if is_compared else None)
            self._records.append(record)
            if self._expected is not None:
                self._compare(record, len(self._records) - 1)
        return output

    def _is_unset_or_moving(self, func: Any, args: tuple[Any, ...]) -> bool:
        if any(part in str(func) for part in _UNSET):
            return True
        first = args[0] if args else None
        return isinstance(first, Tensor) and storage_address(first) in self._buffers

    def _compare(self, record: _Record, number: int) -> None:
        assert self._expected is not None
        function, shapes, sample = record
        if number >= len(self._expected):
            raise RecomputationError(f"it ran {function} after the last operator of the forward")
        (expected, expected_shapes, expected_sample), place = self._expected[number], f"operator {number + 1}"
        if function is not expected:
            raise RecomputationError(f"{place} was {expected} and is {function}")
        if shapes != expected_shapes:
            was, now = ", ".join(expected_shapes), ", ".join(shapes)
            raise RecomputationError(f"{place}, {function}, returned {was} and returns {now}")
        if expected_sample is not None and not is_close(expected_sample, sample):
            raise RecomputationError(f"{place}, {function}, returned other values than it returns now")


def _is_passed_over(func: Any, types: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator is the checkpoint's own, a mere question, a cast that autocast keeps, or of a subclass."""
    if not PLAIN_TYPES.issuperset(types):
        return True
    is_cast = func is TO_COPY and type(args[0]) in PARAMETER_CLASSES
    return is_cast or getattr(func, "namespace", "") == "prim" or str(func).startswith("aten.detach")


def _is_counter(func: Any, tensor: Tensor | None) -> bool:
    """Whether an integer is moved in place, as norms count their batches: that goes on in the second run."""
    is_mutable = isinstance(func, OpOverload) and schema_of(func).is_mutable
    return is_mutable and tensor is not None and not tensor.is_floating_point()


def _describe(output: Any) -> tuple[str, ...]:
    return tuple(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor)
    )
