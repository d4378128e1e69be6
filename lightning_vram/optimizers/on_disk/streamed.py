"""Optimizer state on disk: read ahead, stepped in parts of the shards, and written behind."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.optimizers.on_disk.layouts import find_layout
from lightning_vram.optimizers.on_disk.states import DiskStates, Piece
from lightning_vram.optimizers.stepping.state_forms import StateForm, first_place, make_seeds, narrow_state, widen_state
from lightning_vram.optimizers.stepping.step_round import (
    Member,
    State,
    StepRound,
    as_sharded,
    check_state,
    local_parts,
    make_stand_in,
    publish_state,
)
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part


class StreamedStates:
    """Stores states of an elementwise optimizer in a file, with file-backed tensors in its ``state``.

    :meth:`adopt` moves tensors that user code puts there to the disk. ``form`` of moments, where it is supported.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Iterable[nn.Parameter],
        folder: str | os.PathLike[str],
        form: StateForm | None = None,
    ) -> None:
        self._optimizer, self._wanted, self._form = optimizer, set(parameters), form
        self._index: dict[nn.Parameter, int] = {}
        self._forms: list[StateForm | None] = []
        self._shown: list[State] = []  # file-backed tensors of the optimizer's state
        self._disk = DiskStates(folder)
        self.load()

    def load(self) -> None:
        """Move the optimizer's states to the disk."""
        form = self._form
        fresh = {
            parameter: replace(
                find_layout(self._optimizer, group, parameter.dtype),
                form=form if form is not None and form.holds(parameter) else None,
            )
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter in self._wanted and parameter not in self._index
        }
        self._disk.add([local_part(parameter).numel() for parameter in fresh], list(fresh.values()))
        self._forms += [layout.form for layout in fresh.values()]
        for parameter in fresh:
            index = self._index[parameter] = len(self._index)
            shape = local_part(parameter).shape
            views = self._disk.views(index).items()
            self._shown.append({key: as_sharded(view.view(shape), parameter, shape) for key, view in views})
        for parameter, index in self._index.items():
            state = self._optimizer.state.get(parameter, {})
            local_state = local_parts(parameter, state)
            for key, shown in self._shown[index].items() if _has_begun(state) else ():
                if state.get(key) is not shown:
                    check_state(self._optimizer, parameter, key, local_state.get(key))
                    local_part(shown).copy_(local_state[key])
                    state[key] = shown
        self._disk.release()

    def adopt(self, members: Sequence[Member], wait: Callable[[], None]) -> None:
        """Add new ``members``, and move states that user code replaced to the disk, once other steps are over."""
        if not all(map(self._is_there, members)):
            wait()
            self.load()

    def _is_there(self, member: Member) -> bool:
        if member.parameter not in self._index:
            return member.parameter not in self._wanted
        shown = self._shown[self._index[member.parameter]].items()
        return not _has_begun(member.state) or all(member.state.get(key) is value for key, value in shown)

    def run(
        self, step_round: StepRound, members: Sequence[Member], cut_gradient: Callable[[Member, slice], Tensor]
    ) -> None:
        """Step ``members`` with unscaled gradients, of which ``cut_gradient`` returns flat parts."""
        by_index = {self._index[member.parameter]: member for member in members}

        def step(pieces: Sequence[Piece]) -> None:
            groups, proxies = [], []
            for piece in pieces:
                member, part = by_index[piece.index], slice(piece.start, piece.stop)
                groups.append(member.group)
                proxies.append(make_stand_in(member.shard.view(-1)[part], cut_gradient(member, part)))
            if self._form is None:
                step_round.step_proxies(groups, proxies, [piece.states for piece in pieces])
                return
            forms = [self._forms[piece.index] for piece in pieces]
            seeds = make_seeds([by_index[piece.index] for piece in pieces], [piece.states for piece in pieces])
            pairs = zip(forms, pieces, strict=True)
            states = [piece.states if form is None else widen_state(piece.states) for form, piece in pairs]
            step_round.step_proxies(groups, proxies, states)
            for form, piece, state, seed in zip(forms, pieces, states, seeds, strict=True):
                if form is not None:
                    first = first_place(by_index[piece.index].parameter) + piece.start
                    piece.states.update(narrow_state(form, state, first, seed, piece.states))

        self._disk.release()  # pages that a checkpoint has read
        known = {
            index: {
                key: value
                for key, value in member.local_state.items()
                if key not in self._shown[index] and not (isinstance(value, Tensor) and value.dim())
            }
            for index, member in by_index.items()
            if _has_begun(member.local_state)
        }
        for index, scalars in self._disk.stream(list(by_index), step, known).items():
            publish_state(by_index[index], scalars)
            if index not in known:
                by_index[index].state.update(self._shown[index])


def _has_begun(state: State) -> bool:
    """Whether there is a state: the momentum buffer of SGD may be ``None``."""
    return any(value is not None for value in state.values())
