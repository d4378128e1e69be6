"""Where optimizer state is stored between steps on the host."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.tensors.layout import state_stored_like
from lightning_vram.optimizers.on_disk import StreamedStates
from lightning_vram.optimizers.on_host.narrow_states import NarrowStates, widen_when_stepped
from lightning_vram.optimizers.on_host.split_steps import cut_gradient, scale, step_in_parts, step_lanes
from lightning_vram.optimizers.stepping.state_forms import StateForm
from lightning_vram.optimizers.stepping.step_round import Member, StepRound
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part
from lightning_vram.techniques.sharding import ShardLane


class KeptStates:
    """States of one optimizer: in memory or in a file in ``folder``, with moments in a form or float32.

    ``on_device``: parameters on the device, if a callback wants the form for all moments.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Collection[nn.Parameter],
        folder: str | os.PathLike[str] | None,
        form: StateForm | None,
        on_device: Collection[nn.Parameter] | None = None,
    ) -> None:
        self._narrow, self._has_device = None, bool(on_device)
        if form is not None and (on_device is None or form.fits(optimizer)):
            takes = form.takes if folder is None and on_device is not None else form.holds
            narrow = set(filter(takes, {*parameters, *(on_device or ())}))
            self._narrow = NarrowStates(optimizer, narrow.__contains__, form)
        form = None if self._narrow is None else form
        self._streamed = None if folder is None else StreamedStates(optimizer, parameters, folder, form)

    def begin(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Move states there, now and after loading; return handles."""
        self._take_in(optimizer)
        handles = [optimizer.register_load_state_dict_post_hook(self._take_in)]
        if self._narrow is not None:
            handles.append(optimizer.register_load_state_dict_pre_hook(self._narrow.before_load))
        return handles

    def adopt(self, members: Sequence[Member], wait: Callable[[], None]) -> None:
        """Adopt what user code wrote to states of a group, once other steps are over."""
        if self._streamed is not None:
            self._streamed.adopt(members, wait)
        if self._narrow is not None:
            self._narrow.adopt(members)

    def step(self, step_round: StepRound, lanes: Sequence[ShardLane], members: Sequence[Member]) -> None:
        """Step members of one group: with states from disk, in parts, or at once."""
        members = step_lanes(step_round, self._narrow, lanes, members, is_whole=self._streamed is not None)
        if self._streamed is not None:
            scale(step_round, members)
            self._streamed.run(step_round, members, cut_gradient)
        elif self._narrow is not None:
            step_in_parts(step_round, self._narrow, members)
        elif members:
            step_round.run(members)

    def step_on_device(self, step_round: StepRound, members: Sequence[Member], *, is_on_host: bool) -> None:
        """Step members of a group whose shards are on the computing device."""
        if self._narrow is not None and self._has_device:
            step_in_parts(step_round, self._narrow, members)
        else:
            step_round.run(members, is_on_host=is_on_host)

    def let_go(self, optimizer: Optimizer) -> None:
        """Upcast moments once the optimizer steps by itself."""
        if self._narrow is not None:
            widen_when_stepped(optimizer)

    def _take_in(self, optimizer: Optimizer) -> None:
        if self._narrow is not None:
            self._narrow.take_in(optimizer)
        if self._streamed is not None:
            self._streamed.load()


def replace_parameters(optimizer: Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters in groups and states of an optimizer."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for parameter, other in replaced.items():
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            is_alone = isinstance(parameter, DTensor) and parameter.device_mesh.size() == 1
            plain = {key: local_part(value) if is_alone else value for key, value in state.items()}
            optimizer.state[other] = state_stored_like(plain, local_part(other))
