"""Which operators' results a checkpointed layer saves, so that recomputation skips them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.core.operators import ATTENTION, MATMULS, find_overloads, resolve_operators
from lightning_vram.private_names.dispatcher import OpOverload, schema_of

_FAMILIES = {"matmuls": MATMULS | ATTENTION, "attention": ATTENTION}
INPUTS = "inputs"


@dataclass(frozen=True)
class SavePolicy:
    """Save the results of some operators in checkpointed layers, in addition to the layers' inputs.

    Args:
        operators: ``"matmuls"``: matrix products, convolutions, recurrent kernels and fused attention: nearly all of
            the time, about half of the memory. ``"attention"``: fused attention only. Or a list of operator names in
            ``torch.ops``, with or without overload: ``["aten.mm", "aten.addmm.default", "mylib.flash"]``.
        every_n: Save the first of their results in a layer and every n-th after it.
        numbers: Save only results with these indices, counted from 0 in each call of a layer. Set by the plan of a
            ``budget``. ``None``: all.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an operator or family is unknown, no operator is named, or ``every_n`` is smaller than 1.

    Example:
        >>> from lightning_vram import ActivationCheckpointing, SavePolicy
        >>> callback = ActivationCheckpointing(save=SavePolicy(["aten.mm", "aten.addmm"], every_n=2))
    """

    operators: str | Sequence[str]
    every_n: int = 1
    numbers: frozenset[int] | None = None
    _operators: frozenset[Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_positive_int("SavePolicy(every_n)", self.every_n)
        if not isinstance(self.operators, str):
            _check_names(self.operators)
            object.__setattr__(self, "operators", tuple(self.operators))
        if self.numbers is not None:
            object.__setattr__(self, "numbers", frozenset(self.numbers))
        object.__setattr__(self, "_operators", _resolve(self.operators))

    def __reduce__(self) -> Any:
        return SavePolicy, (self.operators, self.every_n, self.numbers)  # operators do not pickle, their names do

    def concerns(self, operator: Any) -> bool:
        """Whether ``operator`` belongs to the policy."""
        return operator in self._operators

    def keeps(self, number: int) -> bool:
        """Whether to save the result with this index, counted from 0 in each call of a layer."""
        return number % self.every_n == 0 and (self.numbers is None or number in self.numbers)

    @property
    def resolved(self) -> frozenset[Any]:
        """Operators of the policy, as in ``torch.ops``."""
        return self._operators


def parse_save(save: object, argument: str) -> SavePolicy | None:
    """Return the policy that a user gave, ``None`` for ``"inputs"``; ``argument`` is the name for messages."""
    if save == INPUTS:
        return None
    if isinstance(save, SavePolicy):
        return save
    try:
        return SavePolicy(save)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}: {error}") from None


def _resolve(operators: str | Sequence[str]) -> frozenset[Any]:
    if isinstance(operators, str):
        if operators not in _FAMILIES:
            raise ValueError(
                f"{operators!r} is not a family of operators. Use 'inputs' (none), 'matmuls' or 'attention', or a list "
                "of operators, such as ['aten.mm']."
            )
        members = (overload for name in _FAMILIES[operators] for overload in find_overloads(name))
        return frozenset(filter(_gives_new_memory, members))
    if not operators:
        raise ValueError("the list of operators is empty. Use 'inputs' to save inputs only.")
    return frozenset(filter(_gives_new_memory, resolve_operators(operators)))


def _check_names(operators: object) -> None:
    if not isinstance(operators, Sequence) or not all(isinstance(name, str) for name in operators):
        raise TypeError(
            "SavePolicy(operators) must be 'matmuls', 'attention' or a list of operator names, "
            f"got {operators!r} of type {type(operators).__name__}."
        )


def _gives_new_memory(operator: Any) -> bool:
    if not isinstance(operator, OpOverload):
        return True
    schema = schema_of(operator)
    return not schema.is_mutable and not any(result.alias_info for result in schema.returns)
