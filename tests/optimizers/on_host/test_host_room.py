"""What the host has no room for is refused, with the bytes by kind and what would fit."""

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW

from lightning_vram.core.host.memory import OffloadError
from lightning_vram.memory.units import GIB, MIB
from lightning_vram.optimizers import host_memory
from lightning_vram.optimizers.host_memory import HostMemory, count_host_needs, count_state_bytes

NAME = "FSDPOffloadStrategy"
ADVICE = (
    "Set nvme_path='/a/fast/disk' (moves the optimizer state there), host_state='bf16', '8bit' or '4bit', "
    "master='split' or precision='bf16-true', or use more machines."
)
KINDS = ("weights", "16-bit copies", "gradients", "averages of weights", "optimizer state")


class Net(nn.Module):
    """40 weights that are trained, 12 that are not, and a scalar, which is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 3, bias=False).requires_grad_(requires_grad=False)
        self.trained = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(()))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    return net


# --- what is needed ---

LOW = {"low_precision": {"trained.weight"}, "low_dtype": torch.bfloat16}
PADDED = 4 + 14 + 2  # of 3 rows 1, of 5 rows 2, of 5 elements 2


@pytest.mark.parametrize(
    ("make", "num_shards", "options", "expected"),
    [
        (Net, 1, {}, (4 * 52, 0, 4 * 40, 0)),
        (on_meta, 1, {}, (4 * 52, 0, 4 * 40, 0)),
        (Net, 1, LOW, (4 * 52, 2 * 35, 4 * 40, 0)),
        (lambda: Net().bfloat16(), 1, LOW, (2 * 52, 0, 2 * 40, 0)),
        (Net, 4, {"averages": [Net()]}, (4 * PADDED, 0, 4 * (14 + 2), 4 * PADDED)),
        (tied, 1, {}, (64, 0, 64, 0)),
    ],
    ids=["whole", "meta", "copies", "16 bit", "shards are padded", "tied weights count once"],
)
def test_needs_of_one_rank(make: Any, num_shards: int, options: Any, expected: tuple[int, ...]) -> None:
    assert tuple(count_host_needs(make(), num_shards, **options).values()) == expected


@pytest.mark.parametrize(
    ("make", "for_each"),
    [
        (lambda p: AdamW(p, fused=True), 8),
        (lambda p: Adam(p, amsgrad=True), 12),
        (lambda p: SGD(p, 0.1), 0),
        (lambda p: SGD(p, 0.1, momentum=0.9), 4),
        (Adafactor, 0),  # not known
    ],
)
def test_states_are_those_of_the_class_for_each_weight_that_is_trained(make: Any, for_each: int) -> None:
    net = Net()
    state = torch.random.get_rng_state()
    optimizer = make(list(net.trained.parameters()) + list(net.frozen.parameters()))
    assert count_state_bytes([optimizer], {}) == 40 * for_each
    assert not optimizer.state
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_optimizer_that_was_made_before_the_shards_is_counted_by_them() -> None:
    before, shard = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(6))
    assert count_state_bytes([AdamW([before])], {before: shard}) == 48


# --- what is there ---


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Check needs, in the order of ``KINDS``, on a machine with so much available.

    ``ranks``: the others, by machine, as this one is.
    """

    def check(
        *needs: int,
        available: int | None,
        swap: int = 0,
        ranks: tuple[tuple[str, int], ...] = (),
        of: nn.Module | None = None,
        **options: Any,
    ) -> None:
        def gather(own: Any) -> list[Any]:
            return [own] + [((machine, "boot", "container"), own[1]) for machine, count in ranks for _ in range(count)]

        monkeypatch.setattr(host_memory, "available_host_bytes", lambda: available)
        monkeypatch.setattr(host_memory, "free_swap_bytes", lambda: swap)
        monkeypatch.setattr(host_memory, "machine_name", lambda: ("node1", "boot", "container"))
        monkeypatch.setattr(host_memory, "gather_objects", gather)
        room = HostMemory(of or nn.Identity(), **{"may_swap": False, **options})
        room.check(dict(zip(KINDS, needs, strict=False)), NAME)

    return check


def refusal(needed: str, kinds: str, there: str, margin: str, where: str = "node1") -> Any:
    text = (
        f"{NAME} needs {needed} of host memory on {where}: {kinds}. Available are {there}, including the "
        f"memory of the module, of which {margin} must stay free. {ADVICE}"
    )
    return pytest.raises(OffloadError, match=f"^{re.escape(text)}$")


def test_what_fits_beside_a_gibibyte_is_accepted_and_a_byte_more_refused(check: Any) -> None:
    needs = (GIB, 0, GIB, 0, 2 * GIB)
    check(*needs, available=5 * GIB)
    kinds = "weights 1.00 GiB, gradients 1.00 GiB, optimizer state 2.00 GiB"
    with refusal("4.00 GiB", kinds, "5.00 GiB", "1.00 GiB"):
        check(*needs, available=5 * GIB - 1)


def test_ranks_of_a_machine_share_it(check: Any) -> None:
    check(GIB, available=9 * GIB, ranks=(("node1", 7),))
    with refusal("8.00 GiB", "weights 8.00 GiB", "9.00 GiB", "1.00 GiB", "node1 for its 8 ranks"):
        check(GIB, available=9 * GIB - 1, ranks=(("node1", 7), ("node2", 2)))


def test_all_ranks_refuse_what_another_machine_lacks(check: Any) -> None:
    with refusal("3.00 GiB", "weights 3.00 GiB", "3.00 GiB", "1.00 GiB", "node2 for its 3 ranks"):
        check(GIB, available=3 * GIB, ranks=(("node2", 3),))


def test_what_the_module_its_averages_and_states_of_a_run_before_have_is_given_back(check: Any) -> None:
    net = nn.Linear(512, 512, bias=False)  # 1 MiB
    check(MIB, available=MIB, of=net)  # nothing more is taken
    check(MIB, 0, MIB // 2, available=MIB, of=net)
    check(MIB, 0, MIB, MIB, available=3 * MIB, of=net, averages=[deepcopy(net)])
    kinds = "weights 1.00 MiB, gradients 1.00 MiB, averages of weights 1.00 MiB"
    with refusal("3.00 MiB", kinds, "4.00 MiB", "2.00 MiB"):
        check(MIB, 0, MIB, MIB, available=3 * MIB, of=net)
    optimizer = AdamW(net.parameters())
    net.weight.grad = torch.zeros(512, 512)
    optimizer.step()
    check(MIB, 0, MIB, 0, 2 * MIB, available=2 * MIB, of=net, optimizers=[optimizer])
    with refusal("1.00 MiB", "weights 1.00 MiB", "1.00 MiB", "1.00 MiB"):
        check(MIB, available=MIB, of=net.to("meta"))


def test_a_toy_needs_as_much_again_on_a_machine_that_is_full(check: Any) -> None:
    check(10 * MIB, available=20 * MIB)


def test_what_is_not_pinned_may_be_swapped_out(check: Any) -> None:
    check(2 * GIB, available=GIB, swap=2 * GIB, may_swap=True)
    with pytest.raises(OffloadError):
        check(2 * GIB, available=GIB, swap=2 * GIB)


def test_a_system_that_does_not_tell_refuses_nothing(check: Any) -> None:
    check(2**60, available=None, ranks=(("node1", 1),))
