"""Private names of ``DistributedDataParallel``, and of FSDP1."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def special_reductions(ddp: DistributedDataParallel, parameters: Iterable[Tensor]) -> dict[str, bool]:
    """Return by name whether ``ddp`` reduces the gradients of ``parameters`` in one of its other ways."""
    # the only place that names built-in hooks
    logged: dict[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return {
        "a communication hook": bool(logged.get("comm_hook")),
        "delayed reductions": bool(getattr(ddp, "_delay_all_reduce_params", ())),
        "the reducer of compiled autograd": bool(getattr(ddp, "_use_python_reducer", False)),
        "an optimizer that runs in the backward": any(hasattr(one, "_in_backward_optimizers") for one in parameters),
    }


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
    getattr(ddp.reducer, "_reset_state", lambda: None)()


def is_part_of_flat_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a view of the flat parameter of an FSDP1 module, which makes new views for the backward."""
    return bool(getattr(tensor._base, "_is_flat_param", False))
