"""Other ranks: small decisions that all take together on the host, and errors that all raise."""

import ctypes
import hashlib
import logging
import os
import pickle
import re
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import chain, zip_longest
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parameter import is_lazy

from lightning_vram.core.host.memory import OffloadError
from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.private_names.dispatcher import detect_fake_mode, is_traceable_wrapper_subclass


class RankAgreementError(RuntimeError):
    """A rank did not take part in a decision."""


class RankAgreement:
    """Agree on integers over all ranks, over gloo in a group of its own.

    So a vote blocks on no device, mixes with no collective of the training, and ends in an error if a rank does not
    come within the timeout (``None``: 30 minutes, as in ``torch.distributed``). Making one is a collective over all
    ranks, and so is each call: with as many values on every rank, in the same order. With one rank nothing is sent.
    After an error every further call raises ``RankAgreementError`` at once, on the other ranks too.

    Example:
        >>> RankAgreement().largest(3, 1)
        (3, 1)
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        if timeout is not None and timeout <= timedelta():
            raise ValueError(f"RankAgreement(timeout) must be positive, got {timeout}.")
        self._timeout = timedelta(minutes=30) if timeout is None else timeout
        self._failure: str | None = None
        self._group: dist.ProcessGroup | None = None
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        try:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        except RuntimeError as error:
            raise self._failed(self._timeout) from error
        # A rank whose own connections are made could use and close the group while another still connects, which then
        # fails as if that rank had crashed (gloo's "connectFullMesh"). Nobody has a first result before all are there.
        self.largest(0)

    @property
    def is_alone(self) -> bool:
        """Whether there is only one rank."""
        return self._group is None and self._failure is None

    def largest(self, *values: int, timeout: timedelta | None = None) -> tuple[int, ...]:
        """Return the largest of each value (at most 64 bits) over the ranks; ``timeout`` can only be shorter."""
        return self._begin(values, timeout)() if not self.is_alone else values

    def begin_largest(self, *values: int) -> Callable[[], tuple[int, ...]]:
        """Begin to find the largest of each value; the returned function waits for it. All ranks do so in one order."""
        return self._begin(values, None) if not self.is_alone else lambda: values

    def gather(self, value: Any) -> list[Any]:
        """Collect one small value of each rank, which can be pickled, on all ranks, in their order."""
        if self.is_alone:
            return [value]
        if self._failure is not None or self._group is None:
            raise RankAgreementError(self._failure)
        values: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self._failed(self._timeout) from error
        return values

    def close(self) -> None:
        """Destroy the group; no collective. Calling it again does nothing."""
        group, self._group = self._group, None
        if group is None:
            return
        self._failure = self._failure or "The agreement between ranks was closed."
        if dist.is_initialized():  # else all groups are gone already
            dist.destroy_process_group(group)

    def _begin(self, values: tuple[int, ...], timeout: timedelta | None) -> Callable[[], tuple[int, ...]]:
        if self._failure is not None or self._group is None:
            raise RankAgreementError(self._failure)
        if not values:
            return lambda: ()
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]  # the stub knows the class only, not its values
        options.timeout = min(timeout or self._timeout, self._timeout)  # dist.all_reduce knows no timeout of its own
        try:
            work = self._group.allreduce([tensor], options)
        except RuntimeError as error:
            raise self._failed(options.timeout) from error
        return partial(self._end, work, tensor, options.timeout)

    def _end(self, work: "dist.Work", tensor: Tensor, timeout: timedelta) -> tuple[int, ...]:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(timeout) from error
        return tuple(tensor.tolist())

    def _failed(self, timeout: timedelta) -> RankAgreementError:
        self._failure = (
            f"Rank {dist.get_rank()} waited for a decision of all ranks, but another rank did not answer within "
            f"{timeout.total_seconds():g} s or has died. See the log of that rank."
        )
        return RankAgreementError(self._failure)


Result = TypeVar("Result")
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (FileNotFoundError, IsADirectoryError, OffloadError, ValueError)
}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


def on_all_ranks(action: Callable[[], Result], what: str, group: dist.ProcessGroup | None = None) -> Result:
    """Run ``action`` on every rank, and raise the same error on all of them if it failed on any. A collective.

    ``what`` is for the message: "The checkpoint x.ckpt could not be saved". Errors about an argument keep their class.
    """
    failure: tuple[int, str, str] | None = None
    cause: BaseException | None = None
    try:
        result = action()
    except (Exception, CheckpointException) as error:
        failure, cause = _describe_error(error), error
    failures = [each for each in gather_objects(failure, group) if each is not None]
    if not failures:
        return result
    rank, kind, text = min(failures)
    if kind in _KINDS:
        raise _KINDS[kind](text) from cause
    if kind == "UnpicklingError":  # what weights_only=True does not read: the text says what to do
        raise pickle.UnpicklingError(f"{what}: {text}") from cause
    if kind == CheckpointError.__name__:  # whose text says all
        raise CheckpointError(f"{what}: {text}") from cause
    raise CheckpointError(f"{what}: {kind} on rank {rank}: {text}") from cause


def current_rank() -> int:
    """Return the rank of this process; 0 without ``torch.distributed``."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks(group: "dist.ProcessGroup | None" = None) -> int:
    """Return the number of processes, in a group or in all; 1 without ``torch.distributed``."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def gather_objects(value: Result, group: "dist.ProcessGroup | None" = None) -> list[Result]:
    """Return the values of all ranks, in their order. A collective, unless there is one rank."""
    values = [value] * num_ranks(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group)
    return values


def _describe_error(error: BaseException) -> tuple[int, str, str]:
    rank = current_rank()
    if isinstance(error, CheckpointException):  # torch.distributed.checkpoint has collected those of all ranks
        rank, (error, _) = min(error.failures.items(), key=lambda item: item[0])
    # what weights_only=True does not read, by whatever class of ours
    kind = pickle.UnpicklingError if isinstance(error, pickle.UnpicklingError) else type(error)
    return rank, kind.__name__, str(error)


# Words of gloo, of the store and of NCCL about a rank that did not answer in time, or whose connection broke.
_LOST = re.compile(
    r"timed out (waiting \d|after \d+ seconds waiting|connecting|in monitoredBarrier)|failed to pass monitoredBarrier"
    r"|timeout caused pair closure|wait timeout after|socket has timed out|socket timeout|watchdog caught collective"
    r"|before timing out|operations have failed or timed out|connection (reset|closed|refused|was likely closed)"
    r"|broken pipe|socket closed|ncclRemoteError|remote process exit|communicator was aborted",
    re.IGNORECASE,
)
_log = logging.getLogger(__name__)


class LostPeerError(RuntimeError):
    """Another rank died, hangs, or runs other collectives than this one."""


class naming_lost_peers:  # noqa: N801 - a context, used as one
    """A context in which the loss of another rank is raised, and logged, as a :class:`LostPeerError`.

    It adds rank and place to the words of the ``torch.distributed`` backend: ``describe`` is called after an error and
    returns the place. Contexts may be nested: the innermost one names the place. Out of memory, and all other errors,
    pass unchanged.

    Example:
        >>> with naming_lost_peers(0, 2, lambda: "step 12, backward"):
        ...     pass
    """

    def __init__(self, rank: int, world_size: int, describe: Callable[[], str]) -> None:
        self._rank, self._world_size, self._describe = rank, world_size, describe

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Log and raise a :class:`LostPeerError` in place of the backend's error; let any other pass."""
        if not isinstance(error, RuntimeError) or isinstance(error, LostPeerError):
            return
        words = str(error.__cause__ if isinstance(error, RankAgreementError) else error).rstrip(".")
        if _LOST.search(words) and not is_out_of_memory(error):  # NCCL reports memory that ran out as a failed call
            message = (
                f"Rank {self._rank} of {self._world_size} on {socket.gethostname()}, {self._describe()}, lost another "
                f"rank: {words}. See the log of the rank that failed first; if it is only slow, increase `timeout=`."
            )
            _log.error(message)  # at once: srun and torchrun end this process, too, maybe before Python's traceback
            raise LostPeerError(message) from error


def check_store() -> None:
    """Refuse restarts by ``torchrun`` whose agent keeps the store, with addresses of dead ranks (pytorch#135712)."""
    has_old_addresses = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if has_old_addresses and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise RuntimeError(
            "torchrun --max-restarts would start ranks again with the addresses of those that died. "
            "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, with --standalone or --rdzv-backend=c10d."
        )


def check_same_modules(module: nn.Module, group: "dist.ProcessGroup | None" = None) -> None:
    """Raise ``ValueError`` on every rank if names, shapes, dtypes or sharing of tensors differ. A collective."""
    if num_ranks(group) == 1:
        return
    entries = _describe_module(module)
    if len(set(gather_objects(hashlib.sha256(repr(entries).encode()).hexdigest(), group))) == 1:
        return
    described = gather_objects(entries, group)
    row = next(row for row in zip_longest(*described, fillvalue="nothing more") if len(set(row)) > 1)
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(row):
        ranks.setdefault(text, []).append(str(rank))
    where = " but ".join(f"{text} on rank{'s' * (len(own) > 1)} {', '.join(own)}" for text, own in ranks.items())
    raise ValueError(
        f"The model differs between ranks: {where}. Build it from the same arguments in the same order on every rank."
    )


def spread_values(module: nn.Module, group: "dist.ProcessGroup | None" = None) -> None:
    """Copy parameters and buffers on the host that differ from rank 0 to all. A collective on the host.

    To be called after :func:`check_same_modules`.
    """
    plain = [tensor for tensor in chain(module.parameters(), module.buffers()) if _is_plain(tensor)]
    if num_ranks(group) == 1 or not plain or detect_fake_mode() is not None:  # fake tensors have no values
        return
    sums = torch.tensor(list(map(_checksum, plain)), dtype=torch.int64)
    gathered = [torch.empty_like(sums) for _ in range(num_ranks(group))]
    dist.all_gather(gathered, sums, group)
    differing = (torch.stack(gathered) != gathered[0]).any(dim=0).tolist()
    for tensor in (one for one, differs in zip(plain, differing, strict=True) if differs):
        _broadcast(tensor, group)


def _describe_module(module: nn.Module) -> list[str]:
    first_names: dict[int, str] = {}
    entries = []
    parameters = (("parameter", *one) for one in module.named_parameters(remove_duplicate=False))
    buffers = (("buffer", *one) for one in module.named_buffers(remove_duplicate=False))
    for kind, name, tensor in chain(parameters, buffers):
        first_name = first_names.setdefault(id(tensor), name)
        shape = "no shape yet" if is_lazy(tensor) else f"shape {tuple(tensor.shape)}"
        text = f"has {shape}, {str(tensor.dtype).removeprefix('torch.')}, requires_grad={tensor.requires_grad}"
        text += "" if _is_plain(tensor) else f", as {type(tensor).__name__} on {tensor.device.type}"
        entries.append(f"{kind} {name!r} {text if first_name == name else f'is the same as {first_name!r}'}")
    return entries


def _is_plain(tensor: Tensor) -> bool:
    is_strided_on_host = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return is_strided_on_host and not is_lazy(tensor) and not is_traceable_wrapper_subclass(tensor)


def _checksum(tensor: Tensor) -> int:
    """Return 64 bits that depend on every bit of ``tensor`` and its place; some 1.5 GB/s."""
    data = tensor.detach().contiguous()
    num_bytes = data.numel() * data.element_size()
    memory = (ctypes.c_char * num_bytes).from_address(data.data_ptr()) if num_bytes else b""
    return int.from_bytes(hashlib.sha256(memory).digest()[:8], signed=True)


def _broadcast(tensor: Tensor, group: "dist.ProcessGroup | None") -> None:
    values = tensor.detach()
    whole = values.contiguous()
    dist.broadcast(whole, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    if whole is not values:
        values.copy_(whole)
    else:
        torch.autograd.graph.increment_version(values)  # a collective does not count as a write
