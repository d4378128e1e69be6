"""States that are streamed from disk are to the bit those in memory; memory is bounded; a bad disk is told, early."""

import errno
import gc
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_vram.core.host import disk as disk_file
from lightning_vram.memory.units import MIB
from lightning_vram.optimizers import on_disk
from lightning_vram.optimizers.on_disk import StreamedStates
from lightning_vram.optimizers.step_loop import Part
from lightning_vram.optimizers.step_round import StepRound, iterate_parameters

pytestmark = pytest.mark.timeout(60)

SIZES = (9001, 1, 700, 0, 4096, 17, 12_295, 3)


def in_groups(parameters: list[nn.Parameter], **options: Any) -> optim.Optimizer:
    """With states of their own in each group."""
    one, *rest = parameters
    return optim.AdamW([{"params": rest, "amsgrad": True}, {"params": [one], "weight_decay": 0.5}], **options)


CASES = {  # five steps of all others are in optimizer_table.txt
    "AdamW": (optim.AdamW, {}),
    "AdamW, groups": (in_groups, {}),
    "Adam, amsgrad": (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "SGD, momentum": (optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    "Adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    "NAdam": (optim.NAdam, {}),
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch) -> None:
    monkeypatch.setattr(on_disk, "CHUNK_ELEMENTS", 4096)


class Streamed:
    """An optimizer whose states are on disk."""

    def __init__(self, folder: Path, optimizer: optim.Optimizer, later: Sequence[nn.Parameter] = ()) -> None:
        self.optimizer = optimizer
        self.states = StreamedStates(optimizer, [*self.parameters, *later], folder)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def step(self, work: Sequence[int] | None = None) -> None:
        step_round = StepRound(self.optimizer, is_on_host=False)
        members = step_round.take(self.parameters if work is None else [self.parameters[index] for index in work])
        self.states.adopt(members, lambda: None)
        self.states.run(step_round, members)


def make_parameters(sizes: Sequence[int] = SIZES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def step_both(streamed: Streamed, reference: optim.Optimizer, seeds: Sequence[int]) -> None:
    for seed in seeds:
        for parameters in (streamed.parameters, list(iterate_parameters(reference))):
            give_gradients(parameters, seed)
        streamed.step()
        reference.step()


def assert_same(streamed: Streamed, reference: optim.Optimizer) -> None:
    for parameter, other in zip(streamed.parameters, iterate_parameters(reference), strict=True):
        assert torch.equal(parameter, other)
        found, state = streamed.optimizer.state.get(parameter, {}), reference.state.get(other, {})
        assert found.keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value


def make_pair(tmp_path: Path, case: str) -> tuple[Streamed, optim.Optimizer]:
    kind, arguments = CASES[case]
    reference = kind(make_parameters(), lr=0.01, **arguments)
    return Streamed(tmp_path, kind(make_parameters(), lr=0.01, **arguments)), reference


def stop_at(monkeypatch, error: type[BaseException]) -> None:
    """Fail at the second part of a parameter."""
    plain = on_disk.step_parts

    def step(step_round: StepRound, parts: Sequence[Part]) -> None:
        if parts[0].range.start:
            raise error  # a class: an instance would hold the frames of the step
        plain(step_round, parts)

    monkeypatch.setattr(on_disk, "step_parts", step)


@pytest.mark.parametrize("chunk_elements", [4096, 2**20])
@pytest.mark.parametrize("case", CASES)
def test_parameters_and_states_are_to_the_bit_those_in_memory(tmp_path, monkeypatch, case, chunk_elements) -> None:
    monkeypatch.setattr(on_disk, "CHUNK_ELEMENTS", chunk_elements)
    streamed, reference = make_pair(tmp_path, case)
    step_both(streamed, reference, range(10))
    assert_same(streamed, reference)


def test_any_order_and_any_part_of_the_parameters_can_be_stepped(tmp_path) -> None:
    streamed, reference = make_pair(tmp_path, "Adam, amsgrad")
    theirs = reference.param_groups[0]["params"]
    for seed, work in enumerate([[6, 0, 3], [7, 6, 5, 4, 2, 1], [0, 1, 2, 3, 4, 5, 6, 7], [2], []]):
        give_gradients(streamed.parameters, seed)
        give_gradients(theirs, seed)
        for index, parameter in enumerate(theirs):
            parameter.grad = parameter.grad if index in work else None
        streamed.step(work)
        reference.step()
    assert_same(streamed, reference)


def test_states_that_are_loaded_or_written_into_views_are_gone_on_with(tmp_path) -> None:
    streamed, reference = make_pair(tmp_path, "NAdam")
    step_both(streamed, reference, [0, 1])
    ahead = torch.optim.NAdam(make_parameters(), lr=0.01)
    for seed in range(4):
        give_gradients(ahead.param_groups[0]["params"], seed)
        ahead.step()
    reference.load_state_dict(ahead.state_dict())
    for index, (parameter, state) in enumerate(zip(streamed.parameters, ahead.state.values(), strict=True)):
        own = streamed.optimizer.state[parameter]
        if index % 2:
            own.update({key: value.clone() for key, value in state.items()})
        else:
            for key, value in state.items():
                own[key].copy_(value)
    step_both(streamed, reference, [2, 3])
    assert_same(streamed, reference)


@pytest.mark.parametrize("sizes", [[5, 0, 9001], [2**20]])
def test_parameters_that_are_added_later_leave_states_as_they_are(tmp_path, sizes) -> None:
    more = [make_parameters(sizes), make_parameters(sizes)]
    reference = optim.AdamW(make_parameters(), lr=0.01)
    streamed = Streamed(tmp_path, optim.AdamW(make_parameters(), lr=0.01), later=more[1])
    step_both(streamed, reference, [0])
    shown = streamed.optimizer.state[streamed.parameters[0]]["exp_avg"]
    for optimizer, parameters in zip((reference, streamed.optimizer), more, strict=True):
        optimizer.add_param_group({"params": parameters})
    step_both(streamed, reference, (1, 2))
    assert_same(streamed, reference)
    assert shown is streamed.optimizer.state[streamed.parameters[0]]["exp_avg"]  # over an older mapping


@pytest.mark.parametrize(
    ("left", "found"),
    [
        ({"max_exp_avg_sq": torch.zeros(5)}, "max_exp_avg_sq = torch.float32 (5,)"),
        ({"exp_avg": None}, "exp_avg = None"),
        ({"exp_avg": torch.zeros(5, dtype=torch.float64)}, "exp_avg = torch.float64 (5,)"),
        ({"exp_avg_sq": torch.zeros(4)}, "exp_avg_sq = torch.float32 (4,)"),
    ],
)
def test_states_without_room_are_refused(tmp_path, monkeypatch, left, found) -> None:
    def step(step_round: StepRound, parts: Sequence[Part]) -> None:
        parts[0].state = {"exp_avg": torch.zeros(5), "exp_avg_sq": torch.zeros(5), **left}

    streamed = Streamed(tmp_path, optim.AdamW(make_parameters([5])))
    give_gradients(streamed.parameters, 0)
    monkeypatch.setattr(on_disk, "step_parts", step)
    with pytest.raises(ValueError, match="no space") as error:
        streamed.step()
    assert str(error.value) == (
        f"nvme_path: no space is reserved for the optimizer state {found} of parameter 0. "
        "Set the options of the optimizer (amsgrad, momentum, ...) before training and do not change them."
    )
    assert not streamed.optimizer.state[streamed.parameters[0]]


def test_the_file_has_no_name_and_what_lies_in_it_stays_as_long_as_a_view(tmp_path) -> None:
    streamed, reference = make_pair(tmp_path, "AdamW")
    step_both(streamed, reference, [0])
    assert list(tmp_path.iterdir()) == []
    view = streamed.optimizer.state[streamed.parameters[0]]["exp_avg"]
    expected = view.clone()
    del streamed
    gc.collect()
    assert torch.equal(view, expected)


def test_forgotten_it_closes_itself_and_waits_for_no_thread(tmp_path, monkeypatch) -> None:
    """The garbage collector runs in the midst of anything, even of what holds a lock that waiting needs."""
    gc.collect()  # what other tests left
    num_files, before = len(os.listdir("/proc/self/fd")), threading.enumerate()
    streamed = Streamed(tmp_path, optim.AdamW(make_parameters([9001])))
    give_gradients(streamed.parameters, 0)
    stop_at(monkeypatch, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        streamed.step()
    threads, joined = [one for one in threading.enumerate() if one not in before and "nvme_path" in one.name], []
    monkeypatch.setattr(threading.Thread, "join", lambda thread, timeout=None: joined.append(thread))
    del streamed
    gc.collect()  # the error's frames knew it
    monkeypatch.undo()
    assert joined == []
    for thread in threads:
        thread.join(30)
    assert threads
    assert not any(thread.is_alive() for thread in threads)
    assert len(os.listdir("/proc/self/fd")) <= num_files


def test_a_full_disk_is_refused_before_training(tmp_path, monkeypatch) -> None:
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_file.os, "posix_fallocate", refuse)
    monkeypatch.setattr(disk_file.shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB))
    with pytest.raises(RuntimeError) as error:
        Streamed(tmp_path, optim.AdamW(make_parameters([2**20])))
    assert str(error.value) == (
        f"nvme_path='{tmp_path}' needs 8.00 MiB for the optimizer state, but 1.00 MiB are free. Free some space, name "
        "a folder on another disk, or leave nvme_path out."
    )


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_what_goes_wrong_in_a_thread_is_raised_here_and_again(tmp_path, monkeypatch, call: str) -> None:
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(on_disk, "NUM_BUFFERS", 2)
    monkeypatch.setattr(on_disk, "NUM_THREADS", 1)
    streamed, reference = make_pair(tmp_path, "AdamW")
    step_both(streamed, reference, [0])
    monkeypatch.setattr(disk_file.os, call, fail)
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            streamed.step()
        assert str(error.value) == (
            f"nvme_path='{tmp_path}': optimizer state could not be written or read ([Errno 5] Input/output error). "
            "It is lost: resume from a checkpoint, with nvme_path on another disk or without it."
        )
        monkeypatch.undo()
