"""States that are streamed from disk are to the bit those in memory; memory is bounded; a bad disk is told, early."""

import errno
import gc
import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_vram.core.host import disk as disk_file
from lightning_vram.memory.units import MIB, format_bytes
from lightning_vram.optimizers import on_disk
from lightning_vram.optimizers.moment_forms import StateLayout, find_layout
from lightning_vram.optimizers.on_disk import DiskStates, Piece, StatePlaces
from lightning_vram.optimizers.step_round import unhooked_step

pytestmark = pytest.mark.timeout(60)

SIZES = (9001, 1, 700, 0, 4096, 17, 12_295, 3)
ADAM = StateLayout((("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)), ("step",))
CASES = {  # five steps of all others are in optimizer_table.txt
    "AdamW": (optim.AdamW, {}),
    "Adam, amsgrad": (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "SGD": (optim.SGD, {}),
    "SGD, momentum": (optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    "Adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    "NAdam": (optim.NAdam, {}),
}


def make_disk(folder: Path, sizes: Sequence[int], layouts: Sequence[StateLayout], **options: int) -> DiskStates:
    disk = DiskStates(folder, **options)
    disk.add(sizes, layouts)
    return disk


class Streamed:
    """An optimizer whose states are on disk: what the host's step does, in a few lines."""

    def __init__(self, folder: Path, optimizer: optim.Optimizer, **options: int) -> None:
        self.optimizer = optimizer
        self.places = [(group, p) for group in optimizer.param_groups for p in group["params"]]
        layouts = [find_layout(optimizer, group, p.dtype) for group, p in self.places]
        self.disk = make_disk(folder, [p.numel() for _, p in self.places], layouts, **options)
        self.scalars: dict[int, dict] = {}  # of those that have a state
        self.calls: list[list[tuple[int, int, int]]] = []
        for index, (_, parameter) in enumerate(self.places):  # Adagrad alone has some
            self.load(index, optimizer.state.pop(parameter, {}))

    def load(self, index: int, state: dict) -> None:
        views = self.disk.views(index)
        for key, view in views.items():
            view.copy_(state.get(key, view))
        self.scalars[index] = {key: value for key, value in state.items() if key not in views}
        if not state:
            del self.scalars[index]

    def step(self, work: Sequence[int] | None = None) -> None:
        work = range(len(self.places)) if work is None else work
        self.scalars |= self.disk.stream(work, self._step, self.scalars)

    def _step(self, pieces: Sequence[Piece]) -> None:
        self.calls.append([(piece.index, piece.start, piece.stop) for piece in pieces])
        groups, states = [], defaultdict(dict)
        for piece in pieces:
            group, parameter = self.places[piece.index]
            stand_in = nn.Parameter(parameter.detach().view(-1)[piece.start : piece.stop])
            stand_in.grad = parameter.grad.view(-1)[piece.start : piece.stop]
            groups.append({**group, "params": [stand_in]})
            states[stand_in] = piece.states
        kept = self.optimizer.param_groups, self.optimizer.state
        self.optimizer.param_groups, self.optimizer.state = groups, states
        unhooked_step(type(self.optimizer))(self.optimizer)
        self.optimizer.param_groups, self.optimizer.state = kept


def make_parameters(sizes: Sequence[int] = SIZES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def step_both(streamed: Streamed, reference: optim.Optimizer, seeds: Sequence[int]) -> None:
    theirs = reference.param_groups[0]["params"]
    ours = [parameter for _, parameter in streamed.places]
    for seed in seeds:
        for parameters in (ours, theirs):
            give_gradients(parameters, seed)
        streamed.step()
        reference.step()


def assert_same(streamed: Streamed, reference: optim.Optimizer) -> None:
    theirs = [parameter for group in reference.param_groups for parameter in group["params"]]
    for index, ((_, parameter), other) in enumerate(zip(streamed.places, theirs, strict=True)):
        assert torch.equal(parameter, other)
        state = reference.state.get(other, {})
        found = streamed.scalars.get(index, {}) | streamed.disk.views(index)
        assert found.keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value


def make_pair(tmp_path: Path, case: str, **options: int) -> tuple[Streamed, optim.Optimizer]:
    kind, arguments = CASES[case]
    reference = kind(make_parameters(), lr=0.01, **arguments)
    return Streamed(tmp_path, kind(make_parameters(), lr=0.01, **arguments), **options), reference


@pytest.mark.parametrize("chunk_elements", [4096, 2**20])
@pytest.mark.parametrize("case", CASES)
def test_parameters_and_states_are_to_the_bit_those_in_memory(tmp_path, case, chunk_elements) -> None:
    streamed, reference = make_pair(tmp_path, case, chunk_elements=chunk_elements)
    step_both(streamed, reference, range(10))
    assert_same(streamed, reference)


def test_chunks_are_parts_of_large_parameters_and_several_small_ones(tmp_path) -> None:
    streamed, reference = make_pair(tmp_path, "AdamW", chunk_elements=8192)
    step_both(streamed, reference, [0])
    assert streamed.calls == [
        [(0, 0, 8192)],
        [(0, 8192, 9001), (1, 0, 1), (2, 0, 700), (3, 0, 0), (4, 0, 4096), (5, 0, 17)],
        [(6, 0, 8192)],
        [(6, 8192, 12_295), (7, 0, 3)],
    ]


def test_neighbours_are_one_run_of_bytes() -> None:
    places = StatePlaces([100, 3, 5000, 10], [ADAM] * 4)
    (chunk,) = places.plan([0, 1, 2, 3], 2**20)
    assert [(extent.position, extent.length, extent.offset) for extent in chunk.extents] == [(0, places.total_bytes, 0)]
    apart = places.plan([0, 3], 2**20)[0].extents
    assert len(apart) == 2


def test_no_order_makes_a_chunk_larger_than_a_buffer() -> None:
    sizes = [1, 300, 2, 5000] * 50
    places = StatePlaces(sizes, [ADAM] * 200)
    for work in (range(200), range(199, -1, -1), range(0, 200, 2)):
        chunks = places.plan(work, 8192)
        assert max(chunk.num_bytes for chunk in chunks) <= places.buffer_bytes(8192)
        assert max(chunk.num_elements for chunk in chunks) <= 8192
        assert sum(chunk.num_elements for chunk in chunks) == sum(sizes[index] for index in work)


def test_any_order_and_any_part_of_the_parameters_can_be_stepped(tmp_path) -> None:
    streamed, reference = make_pair(tmp_path, "Adam, amsgrad", chunk_elements=4096)
    theirs = reference.param_groups[0]["params"]
    for seed, work in enumerate([[6, 0, 3], [7, 6, 5, 4, 2, 1], [0, 1, 2, 3, 4, 5, 6, 7], [2], []]):
        give_gradients([parameter for _, parameter in streamed.places], seed)
        give_gradients(theirs, seed)
        for index, parameter in enumerate(theirs):
            parameter.grad = parameter.grad if index in work else None
        streamed.step(work)
        reference.step()
    assert_same(streamed, reference)


def test_groups_may_keep_different_states(tmp_path) -> None:
    def make() -> optim.Optimizer:
        one, *rest = make_parameters()
        return optim.AdamW([{"params": rest, "amsgrad": True}, {"params": [one], "weight_decay": 0.5}], lr=0.01)

    streamed, reference = Streamed(tmp_path, make(), chunk_elements=4096), make()
    for seed in range(3):
        for parameters in ([p for _, p in streamed.places], [p for g in reference.param_groups for p in g["params"]]):
            give_gradients(parameters, seed)
        streamed.step()
        reference.step()
    assert_same(streamed, reference)


def test_states_that_are_loaded_or_written_into_views_are_gone_on_with(tmp_path) -> None:
    streamed, reference = make_pair(tmp_path, "NAdam", chunk_elements=4096)
    step_both(streamed, reference, [0, 1])
    ahead = torch.optim.NAdam(make_parameters(), lr=0.01)
    for seed in range(4):
        give_gradients(ahead.param_groups[0]["params"], seed)
        ahead.step()
    reference.load_state_dict(ahead.state_dict())
    for index, state in enumerate(ahead.state.values()):
        if index % 2:
            streamed.load(index, {key: value.clone() for key, value in state.items()})
        else:
            streamed.load(index, state | {"exp_avg": torch.zeros_like(state["exp_avg"])})
            streamed.disk.views(index)["exp_avg"].copy_(state["exp_avg"])
    streamed.disk.release()
    step_both(streamed, reference, [2, 3])
    assert_same(streamed, reference)


def test_a_parameter_whose_state_is_taken_away_begins_anew(tmp_path) -> None:
    streamed, reference = make_pair(tmp_path, "AdamW", chunk_elements=4096)
    step_both(streamed, reference, [0])
    reference.state.pop(reference.param_groups[0]["params"][0])
    streamed.load(0, {})
    step_both(streamed, reference, [1])
    assert_same(streamed, reference)


@pytest.mark.parametrize("sizes", [[5, 0, 9001], [2**20]])
def test_room_that_is_made_later_leaves_what_there_is(tmp_path, sizes) -> None:
    streamed, reference = make_pair(tmp_path, "AdamW", chunk_elements=4096)
    step_both(streamed, reference, [0])
    shown = streamed.disk.views(0)["exp_avg"]
    more = [make_parameters(sizes), make_parameters(sizes)]
    reference.add_param_group({"params": more[0]})
    streamed.disk.add(sizes, [ADAM] * len(sizes))
    streamed.places += [(streamed.optimizer.param_groups[0], parameter) for parameter in more[1]]
    for seed in (1, 2):
        for parameters in ([p for g in reference.param_groups for p in g["params"]], [p for _, p in streamed.places]):
            give_gradients(parameters, seed)
        streamed.step()
        reference.step()
    assert_same(streamed, reference)
    assert torch.equal(shown, streamed.disk.views(0)["exp_avg"])  # over an older mapping


def test_states_without_room_are_refused(tmp_path) -> None:
    disk = make_disk(tmp_path, [5], [ADAM])

    def step(pieces: Sequence[Piece]) -> None:
        pieces[0].states.update(exp_avg=torch.zeros(5), exp_avg_sq=torch.zeros(5), max_exp_avg_sq=torch.zeros(5))

    with pytest.raises(ValueError, match="no space") as error:
        disk.stream([0], step, {})
    assert str(error.value) == (
        "nvme_path: no space is reserved for the optimizer state max_exp_avg_sq = torch.float32 (5,) of parameter 0. "
        "Set the options of the optimizer (amsgrad, momentum, ...) before training and do not change them."
    )
    with pytest.raises(ValueError, match="exp_avg = None of"):
        disk.stream([0], lambda pieces: None, {})
    with pytest.raises(ValueError, match=r"^work must not name a parameter twice\.$"):
        disk.stream([0, 0], step, {})


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_memory_is_the_ring_and_nothing_else(tmp_path) -> None:
    disk = make_disk(tmp_path, [2**22, 2**22], [ADAM] * 2, chunk_elements=2**16, num_buffers=3)
    assert disk._places.total_bytes == 64 * MIB
    before, seen = anonymous_bytes(), []

    def step(pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if not piece.states:
                shape = (piece.stop - piece.start,)
                piece.states.update(step=torch.tensor(0.0), exp_avg=torch.zeros(shape), exp_avg_sq=torch.zeros(shape))
            piece.states["exp_avg"] += 1
        seen.append(anonymous_bytes())

    known = {}
    for _ in range(3):
        known = disk.stream([0, 1], step, known)
    assert 1.5 * MIB <= disk._pipeline.ring_bytes <= 1.6 * MIB
    assert max(seen) - before <= 6 * MIB  # threads and Python take some
    views = [view for index in (0, 1) for view in disk.views(index).values()]
    assert [float(view.sum()) for view in views] == [3.0 * 2**22, 0.0] * 2  # looked at as a checkpoint would
    assert anonymous_bytes() - before <= 6 * MIB


def test_the_file_has_no_name_and_what_lies_in_it_stays_as_long_as_a_view(tmp_path) -> None:
    streamed, reference = make_pair(tmp_path, "AdamW")
    step_both(streamed, reference, [0])
    assert list(tmp_path.iterdir()) == []
    view = streamed.disk.views(0)["exp_avg"]
    expected = view.clone()
    del streamed
    gc.collect()
    assert torch.equal(view, expected)


def test_forgotten_it_closes_itself_and_waits_for_no_thread(tmp_path, monkeypatch) -> None:
    """The garbage collector runs in the midst of anything, even of what holds a lock that waiting needs."""
    gc.collect()  # what other tests left
    num_files, before = len(os.listdir("/proc/self/fd")), threading.enumerate()
    disk = make_disk(tmp_path, [5], [ADAM])
    with pytest.raises(ValueError, match="exp_avg = None"):
        disk.stream([0], lambda pieces: None, {})
    threads, joined = [one for one in threading.enumerate() if one not in before and "nvme_path" in one.name], []
    monkeypatch.setattr(threading.Thread, "join", lambda thread, timeout=None: joined.append(thread))
    del disk
    gc.collect()  # the error's frames knew it
    monkeypatch.undo()
    assert joined == []
    for thread in threads:
        thread.join(30)
    assert threads
    assert not any(thread.is_alive() for thread in threads)
    assert len(os.listdir("/proc/self/fd")) <= num_files


def test_a_folder_that_is_none_is_refused(tmp_path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ValueError, match=r"^nvme_path must be an existing folder, got '.*'\.$"):
            DiskStates(path)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch) -> None:
    def refuse(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk_file.tempfile, "TemporaryFile", refuse)  # root may write anywhere
    with pytest.raises(RuntimeError) as error:
        DiskStates(tmp_path)
    assert str(error.value) == (
        f"nvme_path='{tmp_path}': cannot create a file there ([Errno 30] Read-only file system). Name a "
        f"writable folder."
    )


@pytest.mark.parametrize("free", [MIB, 1024 * MIB])
def test_a_full_disk_is_refused_before_training(tmp_path, monkeypatch, free: int) -> None:
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    gc.collect()  # what other tests left
    num_files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(disk_file.os, "posix_fallocate", refuse)
    monkeypatch.setattr(disk_file.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(RuntimeError) as error:
        make_disk(tmp_path, [2**20], [ADAM])
    assert str(error.value) == (
        f"nvme_path='{tmp_path}' needs 8.00 MiB for the optimizer state, but {format_bytes(free)} "
        f"are free. Free some space, name a folder on another disk, or leave nvme_path out."
    )
    del error
    gc.collect()  # its frames knew the file
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_a_disk_that_cannot_reserve_space_is_believed(tmp_path, monkeypatch) -> None:
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(disk_file.os, "posix_fallocate", refuse)
    streamed, reference = make_pair(tmp_path, "AdamW", chunk_elements=4096)
    step_both(streamed, reference, range(2))
    assert_same(streamed, reference)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_what_goes_wrong_in_a_thread_is_raised_here_and_again(tmp_path, monkeypatch, call: str) -> None:
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    streamed, reference = make_pair(tmp_path, "AdamW", chunk_elements=4096, num_buffers=2, num_threads=1)
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


def test_what_goes_wrong_in_a_step_is_raised_when_the_disk_is_at_rest(tmp_path) -> None:
    streamed, reference = make_pair(tmp_path, "AdamW", chunk_elements=4096)

    def stop(pieces: Sequence[Piece]) -> None:
        if pieces[0].start:
            raise KeyboardInterrupt
        for piece in pieces:
            shape = (piece.stop - piece.start,)
            piece.states.update(step=torch.tensor(7.0), exp_avg=torch.ones(shape), exp_avg_sq=torch.ones(shape))

    with pytest.raises(KeyboardInterrupt):
        streamed.disk.stream(range(len(SIZES)), stop, {})
    step_both(streamed, reference, [0, 1])
    assert_same(streamed, reference)


def test_what_stops_a_step_waits_for_the_disk(tmp_path, monkeypatch) -> None:
    streamed, _ = make_pair(tmp_path, "SGD, momentum", chunk_elements=4096)
    pwritev, is_stopped, done = os.pwritev, threading.Event(), []

    def write(file: int, views: list[memoryview], at: int) -> int:
        is_stopped.wait()
        num_written = pwritev(file, views, at)
        done.append(at)
        return num_written

    def stop(pieces: Sequence[Piece]) -> None:
        if pieces[0].start:
            is_stopped.set()
            raise KeyboardInterrupt
        pieces[0].states["momentum_buffer"] = torch.zeros(4096)

    monkeypatch.setattr(disk_file.os, "pwritev", write)
    with pytest.raises(KeyboardInterrupt):
        streamed.disk.stream([0], stop, {})
    assert done == [0]


def test_a_disk_that_fails_is_told_even_if_the_step_fails_too(tmp_path, monkeypatch) -> None:
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    def step(pieces: Sequence[Piece]) -> None:
        if pieces[0].start:
            raise ValueError("mine")
        pieces[0].states["momentum_buffer"] = torch.zeros(4096)

    streamed, _ = make_pair(tmp_path, "SGD, momentum", chunk_elements=4096)
    monkeypatch.setattr(disk_file.os, "pwritev", fail)
    with pytest.raises(RuntimeError, match="could not be written or read"):
        streamed.disk.stream([0], step, {})


def test_short_reads_and_writes_go_on(tmp_path, monkeypatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(disk_file.os, "pwritev", lambda file, views, at: pwritev(file, [views[0][:1000]], at))
    monkeypatch.setattr(disk_file.os, "preadv", lambda file, views, at: preadv(file, [views[0][:777]], at))
    streamed, reference = make_pair(tmp_path, "AdamW", chunk_elements=4096)
    step_both(streamed, reference, [0, 1, 2])
    assert_same(streamed, reference)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_moves_nothing_is_broken(tmp_path, monkeypatch, call: str) -> None:
    streamed, reference = make_pair(tmp_path, "AdamW")
    step_both(streamed, reference, [0])
    monkeypatch.setattr(disk_file.os, call, lambda *_: 0)
    with pytest.raises(RuntimeError, match=r"\(cannot read or write at byte 0\)"):
        streamed.step()


def test_buffers_begin_with_a_page() -> None:
    for size in (1, 5000):
        buffer = on_disk._make_buffer(size)
        assert buffer.data_ptr() % 4096 == 0
        assert buffer.numel() == size


def test_buffers_stay_whole_when_the_process_forks() -> None:
    """What is read past the page cache while a process forks goes to one of the two only."""
    buffer, maps, is_ours = on_disk._make_buffer(5000), Path("/proc/self/smaps").read_text().splitlines(), False
    for line in maps:
        head = line.split()[0]
        if "-" in head:
            start, end = (int(bound, 16) for bound in head.split("-"))
            is_ours = start <= buffer.data_ptr() < end
        elif is_ours and head == "VmFlags:":
            assert "dc" in line.split()  # do not copy
            return
    pytest.fail("the buffer is nowhere")


@pytest.fixture
def long_sizes(monkeypatch) -> tuple[int, ...]:
    """Runs long enough to go past the page cache: here some pages are."""
    monkeypatch.setattr(disk_file, "_MIN_DIRECT_BYTES", 8192)
    return (50_001, 7, 40_003, 12_000, 5)


def make_long_pair(tmp_path: Path, sizes: Sequence[int]) -> tuple[Streamed, optim.Optimizer]:
    streamed = Streamed(tmp_path, optim.AdamW(make_parameters(sizes), lr=0.01), chunk_elements=16_384)
    return streamed, optim.AdamW(make_parameters(sizes), lr=0.01)


def test_whole_pages_go_past_the_page_cache_and_the_rest_through_it(tmp_path, monkeypatch, long_sizes) -> None:
    streamed, reference = make_long_pair(tmp_path, long_sizes)
    if not streamed.disk._file._is_direct:
        pytest.skip("needs a file system with O_DIRECT")
    moved = {True: 0, False: 0}

    def count(call: str) -> None:
        plain = getattr(os, call)

        def counted(file: int, views: list[memoryview], at: int) -> int:
            moved[file == streamed.disk._file._direct] += len(views[0])
            return plain(file, views, at)

        monkeypatch.setattr(disk_file.os, call, counted)

    count("preadv")
    count("pwritev")
    step_both(streamed, reference, range(4))
    assert streamed.disk._file._is_direct  # nobody objected
    assert moved[True] > 0.9 * sum(moved.values())
    assert sum(moved.values()) == pytest.approx(
        7 * streamed.disk._places.total_bytes, rel=0.001
    )  # the first step reads nothing
    assert_same(streamed, reference)


def test_views_and_steps_past_the_page_cache_agree(tmp_path, long_sizes) -> None:
    streamed, reference = make_long_pair(tmp_path, long_sizes)
    held = [streamed.disk.views(index) for index in range(len(long_sizes))]
    for seed in range(4):
        step_both(streamed, reference, [seed])
        assert_same(streamed, reference)
        for views, state in zip(held, reference.state.values(), strict=True):
            assert torch.equal(views["exp_avg"], state["exp_avg"])
            for change in (views, state):
                change["exp_avg"].mul_(0.5)
                change["exp_avg_sq"].add_(1.0)
        if seed % 2:
            streamed.disk.release()


def test_a_file_system_that_cannot_go_past_the_page_cache_goes_through_it(tmp_path, monkeypatch, long_sizes) -> None:
    streamed, reference = make_long_pair(tmp_path, long_sizes)
    preadv = os.preadv

    def refuse(file: int, views: list[memoryview], at: int) -> int:
        if file == streamed.disk._file._direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(file, views, at)

    monkeypatch.setattr(disk_file.os, "preadv", refuse)
    step_both(streamed, reference, range(3))
    assert not streamed.disk._file._is_direct
    assert_same(streamed, reference)


def test_a_system_that_cannot_open_files_so_goes_through_the_page_cache(tmp_path, monkeypatch, long_sizes) -> None:
    monkeypatch.setattr(disk_file.os, "O_DIRECT", 1 << 30, raising=False)
    monkeypatch.setattr(disk_file.os, "open", lambda *_: (_ for _ in ()).throw(OSError(errno.EINVAL, "no")))
    assert disk_file._open_direct(0) is None
    monkeypatch.delattr(disk_file.os, "O_DIRECT")
    assert disk_file._open_direct(0) is None
