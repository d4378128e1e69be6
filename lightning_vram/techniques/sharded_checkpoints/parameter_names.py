"""Names of parameters as a plain module has them, without what wrappers put in between."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.private_names.torch.compiled import COMPILED_PART
from lightning_vram.private_names.torch.modules import CHECKPOINT_WRAPPED

_WRAPPERS = (COMPILED_PART, CHECKPOINT_WRAPPED)
_MOST_NAMES = 10  # in a message


def clean_name(name: str) -> str:
    """Leave the wrappers' parts out of a dotted name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """Find the parameters of a module under their clean names, tied ones under each of theirs."""
    return {clean_name(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}


def names_in_optimizer(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Name the parameters of an optimizer, group by group; a tied one goes by its first clean name.

    Raises:
        ValueError: If the module does not have one of them.
    """
    names: dict[int, str] = {}
    for name, parameter in parameters_by_name(module).items():
        names.setdefault(id(parameter), name)
    groups = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        if None in group:
            raise ValueError(
                f"Parameter {group.index(None)} in group {index} of {type(optimizer).__name__} does not belong to "
                "the module; sharded checkpoints store optimizer state by name. Save full checkpoints."
            )
    return [[name for name in group if name is not None] for group in groups]


def check_fit(module_state: Mapping[str, Any], shapes: Mapping[str, Sequence[int] | None], *, strict: bool) -> None:
    """Check whether a checkpoint fits a module, before anything is loaded.

    Args:
        module_state: The module's own state dict, under clean names.
        shapes: Those in the checkpoint, under clean names; ``None`` for what is no tensor.
        strict: Whether both must have the same names.

    Raises:
        ValueError: If it does not. Names everything.
    """
    complaints = []
    if strict:
        complaints += _list("lacks", sorted(module_state.keys() - shapes.keys()))
        complaints += _list("has, unlike the module,", sorted(shapes.keys() - module_state.keys()))
    for name, shape in shapes.items():
        own = module_state.get(name)
        if isinstance(own, Tensor) and (shape is None or tuple(shape) != tuple(own.shape)):
            found = "no tensor" if shape is None else list(shape)
            complaints.append(f"has {found} for {name} of shape {list(own.shape)}")
    if complaints:
        raise ValueError(
            f"The checkpoint does not fit the module: it {'; it '.join(complaints[:_MOST_NAMES])}. Load it into the "
            "module it was saved from; self.strict_loading = False in the LightningModule allows for missing and "
            "additional names."
        )


def _list(what: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return [f"{what} {', '.join(names[:_MOST_NAMES])}{more}"] if names else []
