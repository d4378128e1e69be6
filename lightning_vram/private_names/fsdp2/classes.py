"""Base classes to derive from, which take the place of the classes of FSDP2's own objects."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from lightning_vram.private_names.fsdp2.states import place_of

__all__ = ["FSDPParamGroup", "GroupBase", "ParameterBase", "StateBase"]


class _InGraph:
    """Stands in for a state or a group in graphs, so that a loss that the module keeps does not keep all of its fit.

    The garbage collector does not look into graphs.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)

    @property
    def __self__(self) -> Any:
        owner = self._owner()
        if owner is None:
            raise RuntimeError(
                "backward() was called after the fit whose sharded weights it needs. Call it during the fit."
            )
        return owner

    def __call__(self, gradient: Tensor) -> Tensor:
        return FSDPState._pre_backward(self.__self__, gradient)

    def post_backward(self) -> None:
        self.__self__.post_backward()


class StateBase(FSDPState):
    """The state of a module."""

    @property
    def _pre_backward(self) -> _InGraph:  # type: ignore[override]
        return _InGraph(self)

    def find_hooked(self, output: Any) -> Any:
        """Return the tensors to set hooks on, of those that a layer returns."""
        return output

    def _register_pre_backward_hook(self, output: Any) -> Any:
        is_transformed = getattr(torch._C, "_are_functorch_transforms_active", bool)
        if not torch.is_grad_enabled() or is_transformed():
            return super()._register_pre_backward_hook(output)
        super()._register_pre_backward_hook(self.find_hooked(output))
        return output


class GroupBase(FSDPParamGroup):
    """Parameters that are gathered together, whose dtypes are those in which they are gathered."""

    fsdp_params: Any

    def given_up(self) -> None:
        """Called before all is reset after an error."""

    def _register_post_backward_hook(self, args: Any, kwargs: Any) -> Any:
        return FSDPParamGroup._register_post_backward_hook(_InGraph(self), args, kwargs)  # type: ignore[arg-type]

    # --- where it is ---

    @property
    def is_gathering(self) -> bool:
        """Whether a gathering is under way."""
        return self._all_gather_result is not None

    @property
    def is_before_backward(self) -> bool:
        """Whether it is gathered for a backward."""
        return self._training_state == TrainingState.PRE_BACKWARD

    @property
    def is_in_forward(self) -> bool:
        """Whether a module of the group is in its forward."""
        return self._training_state == TrainingState.FORWARD

    @property
    def num_shards(self) -> int:
        """Number of ranks that have a part of each parameter."""
        return int(self._all_gather_process_group.size())

    def leave_backward(self) -> None:
        """Let what its modules compute next be a call of their own.

        Else FSDP2 takes what a reentrant checkpoint computes next for a part of the call whose backward is over, and
        loses the gradients of all calls of a layer but one.
        """
        for module in self.modules:
            if isinstance(module, FSDPModule):  # FSDP2 still calls groups that were removed from their modules
                state: Any = module._get_fsdp_state()
                state._training_state = TrainingState.IDLE

    def forget_whole(self) -> None:
        """Drop what is gathered."""
        if not self.is_sharded:
            self._to_sharded()  # type: ignore[no-untyped-call]

    # --- streams, of devices that have them ---

    @property
    def copy_in_stream(self) -> Any:
        """The first stream of a gathering; ``None`` on the host, and before the first step."""
        return None if self.device.type == "cpu" else getattr(self.comm_ctx, "all_gather_copy_in_stream", None)

    def gather_stream(self, *, async_op: bool) -> Any:
        """Return the stream that reads the shards; ``None`` on the host, and before the first step."""
        if self.copy_in_stream is None or self.num_shards == 1:
            return self.copy_in_stream
        return self.comm_ctx.get_all_gather_streams(async_op, self._training_state)[0]

    @property
    def reduced_event(self) -> torch.Event | None:
        """When the gradients are reduced."""
        return None if self.device.type == "cpu" else self._post_reduce_event

    @property
    def reduce_stream(self) -> Any:
        """Where they are."""
        context = self.comm_ctx
        return context.all_reduce_stream if self._is_hsdp else context.reduce_scatter_stream

    def await_reduce_stream(self) -> None:
        """Have the end of the backward wait for what is on :attr:`reduce_stream` now."""
        if self.device.type == "cpu":
            return
        stream = self.reduce_stream
        self._post_reduce_event = stream.record_event()
        events = getattr(self.comm_ctx, "_last_post_reduce_events", None)
        if events is not None:
            events[stream] = self._post_reduce_event

    # --- gradients ---

    def reduce_parts(self, parts: Iterable[tuple[Sequence[Any], torch.dtype | None]]) -> None:
        """Reduce the gradients of one group of parameters after the other, each in a dtype; ``None``: in its own."""
        parameters, sharded, training = self.fsdp_params, self._sharded_state, self._training_state
        try:
            for part, dtype in parts:
                self.fsdp_params = part
                self._sharded_state, self._training_state = sharded, training
                self._reduce_dtype = dtype
                event: Any = self._post_reduce_event
                self._post_reduce_event = None  # else the computation waits for it
                FSDPParamGroup.post_backward(self)
                if self._post_reduce_event is None:
                    self._post_reduce_event = event
        finally:
            self.fsdp_params = parameters

    def _init_mp_dtypes(self) -> None:
        for parameter in self.fsdp_params:
            parameter.init_dtype_attrs(parameter.mp_policy if hasattr(parameter, "mp_policy") else self.mp_policy)
        self._orig_dtype = None  # a gradient is cast where it is sent
        self._reduce_dtype = None

    @property
    def _reduce_scatter_param_indices(self) -> Sequence[int]:
        return range(len(self.fsdp_params))  # of the parameters being reduced

    @_reduce_scatter_param_indices.setter
    def _reduce_scatter_param_indices(self, value: Sequence[int]) -> None:
        """Is what it is."""

    def _reset_iter_state(self) -> None:
        self.given_up()
        super()._reset_iter_state()


class ParameterBase(FSDPParam):
    """A parameter whose gradient keeps the dtype in which it was computed and reduced."""

    @property
    def gathered_dtype(self) -> torch.dtype:
        """What it is gathered in."""
        return self.sharded_param.dtype

    @property
    def module(self) -> nn.Module:
        """The first module that has it."""
        return place_of(self)[0]

    @property
    def key(self) -> str:
        """Its name there."""
        return self._module_info.param_name

    @property
    def name(self) -> str:
        """Its name in the root, once that has run."""
        return self._param_fqn or self.key

    @property
    def memory(self) -> Tensor:
        """Memory of the shard: flat, with what it is padded to."""
        return self._sharded_param_data

    @memory.setter
    def memory(self, value: Tensor) -> None:
        self._sharded_param_data = value

    @property
    def whole(self) -> nn.Parameter | None:
        """What is gathered, or was; ``None`` before the first time."""
        return getattr(self, "_unsharded_param", None)

    @property
    def is_whole(self) -> bool:
        """Whether it is gathered."""
        return self.sharded_state == ShardedState.UNSHARDED

    @property
    def is_shard(self) -> bool:
        """Whether the shard is in its place."""
        return self.sharded_state == ShardedState.SHARDED

    def forget_whole(self) -> None:
        """Have it made anew the next time, since the dtype of what is gathered changes."""
        self.all_gather_outputs = []
        vars(self).pop("_unsharded_param", None)

    @property
    def _sharded_local_tensor(self) -> Tensor:
        # FSDP2 looks for extensions on it: that needs no wait, and is no write.
        return self._sharded_param_data

    @property
    def sharded_grad_dtype(self) -> None:
        """What FSDP2 is to cast a reduced gradient to: nothing, that is done where it is sent."""

    @sharded_grad_dtype.setter
    def sharded_grad_dtype(self, value: torch.dtype | None) -> None:
        """Is what it is."""

    @property
    def unsharded_grad_dtype(self) -> torch.dtype:
        """What a backward adds gradients up in."""
        return self.gathered_dtype
