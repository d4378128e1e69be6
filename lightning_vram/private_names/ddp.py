"""Private names of ``DistributedDataParallel``, and of FSDP1."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def delays_reductions(ddp: DistributedDataParallel) -> bool:
    """Whether ``ddp`` reduces some parameters late."""
    return bool(getattr(ddp, "_delay_all_reduce_params", ()))


def is_reduced_by_compiler(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer of compiled autograd replaces that of ``ddp``."""
    return bool(getattr(ddp, "_use_python_reducer", False))


def has_optimizer_in_backward(parameters: Iterable[Tensor]) -> bool:
    """Whether an optimizer was put into the backward of one of ``parameters``."""
    return any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters)


def logged_by(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Return the logging data of ``ddp``: the only place that names built-in hooks."""
    read = getattr(ddp, "_get_ddp_logging_data", dict)
    logged: dict[str, Any] = read()
    return logged


def can_sync_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether :func:`sync_buffers` works for ``ddp``."""
    return getattr(ddp, "_sync_buffers", None) is not None


def sync_buffers(ddp: DistributedDataParallel) -> None:
    """Broadcast the buffers from rank 0. A collective: ``RuntimeError`` if the backend fails."""
    ddp._sync_buffers()  # type: ignore[no-untyped-call]


def drop_reduced_gradients(ddp: DistributedDataParallel) -> None:
    """Make ``ddp`` leave every ``grad`` empty after a backward: a communication hook has used the gradients."""
    reducer: Any = ddp.reducer
    reducer._set_optimizer_in_backward()


def prepare_for_backward(ddp: DistributedDataParallel) -> None:
    """Make ``ddp`` reduce a backward that follows no forward."""
    ddp.reducer.prepare_for_backward([])


def forget_used_parameters(ddp: DistributedDataParallel) -> None:
    """Make the reducer of ``ddp`` forget which parameters took part in backwards, if it can."""
    reset = getattr(ddp.reducer, "_reset_state", None)
    if reset is not None:
        reset()


def is_part_of_flat_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a view of the flat parameter of an FSDP1 module, which makes new views for the backward."""
    return bool(getattr(tensor._base, "_is_flat_param", False))
