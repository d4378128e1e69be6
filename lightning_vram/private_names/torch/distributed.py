"""``DistributedDataParallel``: what it would do between ranks by itself.

* ``torch.nn.parallel.DistributedDataParallel._delay_all_reduce_params``: parameters it reduces late | 2.11 - | they are
  reduced with the others
* ``torch.nn.parallel.DistributedDataParallel._use_python_reducer``: whether compiled autograd reduces | 2.11 - | it is
  taken for not so
* ``torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data``: what it logs of itself, built-in hooks too |
  2.11 - | communication hooks are not noticed
* ``torch.nn.parallel.DistributedDataParallel._sync_buffers``: broadcast the buffers | 2.11 - | the next forward does it
* ``torch.distributed.Reducer._reset_state``: forget which parameters were used | 2.11 - | with unused parameters, those
  of micro-batches count as used in the next step
* ``parameter._in_backward_optimizers``: the mark of an optimizer that runs in the backward | 2.11 - | it is not noticed
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def delays_reductions(ddp: DistributedDataParallel) -> bool:
    """Whether ``ddp`` reduces some parameters late."""
    return bool(getattr(ddp, "_delay_all_reduce_params", ()))


def is_reduced_by_compiler(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer of compiled autograd is in place of that of ``ddp``."""
    return bool(getattr(ddp, "_use_python_reducer", False))


def has_optimizer_in_backward(parameters: Iterable[Tensor]) -> bool:
    """Whether an optimizer was put into the backward of one of ``parameters``."""
    return any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters)


def logged_by(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Return what ``ddp`` logs of itself: the only place that knows hooks which are built in."""
    read = getattr(ddp, "_get_ddp_logging_data", dict)
    logged: dict[str, Any] = read()
    return logged


def can_sync_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether :func:`sync_buffers` works for ``ddp``."""
    return getattr(ddp, "_sync_buffers", None) is not None


def sync_buffers(ddp: DistributedDataParallel) -> None:
    """Broadcast the buffers from rank 0. A collective.

    Raises:
        RuntimeError: If the backend fails.
    """
    ddp._sync_buffers()  # type: ignore[no-untyped-call]


def forget_used_parameters(ddp: DistributedDataParallel) -> None:
    """Let the reducer of ``ddp`` forget which parameters took part in backwards; nothing if it cannot."""
    reset = getattr(ddp.reducer, "_reset_state", None)
    if reset is not None:
        reset()
