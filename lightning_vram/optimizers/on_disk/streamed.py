"""The states of one optimizer on disk: it steps on parts of its shards, while states come and go."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.optimizers.on_disk.layouts import find_layout
from lightning_vram.optimizers.on_disk.pieces import Piece
from lightning_vram.optimizers.on_disk.states import DiskStates
from lightning_vram.optimizers.stepping import (
    Member,
    State,
    StateForm,
    StepRound,
    first_places,
    make_seeds,
    make_stand_in,
    narrow_state,
    publish_state,
    widen_state,
)
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part


class StreamedStates:
    """Keeps the states of some parameters on disk. The optimizer's ``state`` names tensors over the file.

    Args:
        optimizer: One that steps each element by itself.
        parameters: Of it, those whose states are kept here.
        folder: On a local disk that is fast.
        form: Of moments there, of parameters that it holds; ``None``: float32.

    Raises:
        ValueError: If the optimizer does not, or ``folder`` is no folder.
        OffloadError: If the disk is too small, or cannot be written to.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Iterable[nn.Parameter],
        folder: str | os.PathLike[str],
        form: StateForm | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._forms: list[StateForm | None] = []
        self._places = first_places(optimizer)
        wanted = set(parameters)
        layouts = []
        self._index: dict[nn.Parameter, int] = {}
        for group in optimizer.param_groups:
            for parameter in (one for one in group["params"] if one in wanted):
                self._index[parameter] = len(self._index)
                self._forms.append(form if form is not None and form.holds(parameter) else None)
                layouts.append(replace(find_layout(optimizer, group, parameter.dtype), form=self._forms[-1]))
        self._disk = DiskStates(folder, [local_part(parameter).numel() for parameter in self._index], layouts)
        self.load()

    def load(self) -> None:
        """Move to the disk what the optimizer has as the states of the parameters now."""
        for parameter, index in self._index.items():
            state = self._optimizer.state.pop(parameter, {})
            self._disk.load(index, {key: local_part(value) for key, value in state.items()})
            if state:
                self._optimizer.state[parameter] = {}
                shard = local_part(parameter)
                self._publish(Member(0, parameter, shard, shard, self._optimizer.state[parameter], {}))
        self._disk.release()

    def run(
        self, step_round: StepRound, members: Sequence[Member], cut_gradient: Callable[[Member, slice], Tensor]
    ) -> None:
        """Step ``members``, as :meth:`StepRound.run` does, with gradients as they are.

        Args:
            step_round: The step.
            members: To step.
            cut_gradient: Returns some of the gradient of a member, flat.
        """
        by_index = {self._index[member.parameter]: member for member in members}

        def step(pieces: Sequence[Piece]) -> None:
            groups, stand_ins = [], []
            for piece in pieces:
                member, part = by_index[piece.index], slice(piece.start, piece.stop)
                groups.append(member.group)
                stand_ins.append(make_stand_in(member.shard.view(-1)[part], cut_gradient(member, part)))
            forms = [self._forms[piece.index] for piece in pieces]
            places = [self._places[by_index[piece.index].parameter] for piece in pieces]
            seeds = make_seeds([piece.states for piece in pieces], [number for number, _ in places])
            kept = zip(forms, pieces, strict=True)
            states = [piece.states if form is None else widen_state(piece.states) for form, piece in kept]
            step_round.step_stand_ins(groups, stand_ins, states)
            for form, piece, state, seed, (_, first) in zip(forms, pieces, states, seeds, places, strict=True):
                if form is not None:
                    piece.states.update(narrow_state(form, state, first + piece.start, seed, piece.states))

        self._disk.release()  # pages that a checkpoint has looked at
        self._disk.stream(list(by_index), step)
        for member in members:
            self._publish(member)

    def _publish(self, member: Member) -> None:
        index = self._index[member.parameter]
        local: State = dict(self._disk.scalars(index))
        if any(key not in member.state for key in self._disk.views(index)):
            local |= {key: view.view(member.shard.shape) for key, view in self._disk.views(index).items()}
        publish_state(member, local)
