"""What the host has no room for is refused, with the bytes by kind and what would fit."""

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW

from lightning_vram.core.host.memory import OffloadError
from lightning_vram.memory.units import GIB, MIB
from lightning_vram.optimizers.on_host import host_memory
from lightning_vram.optimizers.on_host.host_memory import HostMemory, HostNeeds, count_host_needs, count_state_bytes

NAME = "FSDPOffloadStrategy"
NOTHING_FITS = "No single setting would make it fit: use a machine with more memory, or a smaller model."


class Net(nn.Module):
    """40 weights that are trained, 12 that are not, and a scalar, which is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 3, bias=False).requires_grad_(requires_grad=False)
        self.trained = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with so much available."""

    def host(available: int | None, swap: int = 0) -> None:
        monkeypatch.setattr(host_memory, "available_host_bytes", lambda: available)
        monkeypatch.setattr(host_memory, "free_swap_bytes", lambda: swap)
        monkeypatch.setattr(host_memory, "machine_name", lambda: ("node1", "boot", "container"))

    return host


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The others: their machines, and how many ranks are as this one is."""
    others: list[tuple[str, int]] = []

    def gather(own: Any) -> list[Any]:
        return [own] + [((machine, "boot", "container"), own[1]) for machine, count in others for _ in range(count)]

    monkeypatch.setattr(host_memory, "gather_objects", gather)
    return others


def refused(needs: HostNeeds, message: str, module: nn.Module | None = None, **options: Any) -> None:
    room = HostMemory(module or nn.Identity(), may_swap=False)
    with pytest.raises(OffloadError, match=f"^{re.escape(message)}$"):
        room.check(needs, NAME, **{"is_spread": False, **options})


def weights_alone(needed: str, there: str, margin: str, where: str = "node1") -> str:
    return (
        f"{NAME} needs {needed} of host memory on {where}: weights {needed}. Available are {there}, including the "
        f"memory of the module, of which {margin} must stay free. "
    )


def accepted(needs: HostNeeds, module: nn.Module | None = None, *, may_swap: bool = False) -> None:
    HostMemory(module or nn.Identity(), may_swap=may_swap).check(needs, NAME, is_spread=True)


# --- what is needed ---


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_needs_of_one_rank(device: str) -> None:
    with torch.device(device):
        net = Net()
    assert count_host_needs(net, 1) == HostNeeds(weights=4 * 52, gradients=4 * 40)
    assert count_host_needs(net, 1, {"trained.weight"}, torch.bfloat16) == HostNeeds(
        4 * 52, 2 * 35, 4 * 40, can_be_split=True
    )


def test_shards_are_padded_to_the_same_length() -> None:
    # of 3 rows 1, of 5 rows 2, of 5 elements 2
    assert count_host_needs(Net(), 4) == HostNeeds(weights=4 * (4 + 14 + 2), gradients=4 * (14 + 2))


def test_what_is_in_16_bit_has_no_copies_and_cannot_be_halved() -> None:
    net = Net().to(torch.bfloat16)
    needs = count_host_needs(net, 1, {"trained.weight"}, torch.bfloat16)
    assert needs == HostNeeds(weights=2 * 52, gradients=2 * 40, can_be_16_bit=False)


def test_tied_weights_count_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    assert count_host_needs(net, 1) == HostNeeds(weights=64, gradients=64)


def test_an_average_is_sharded_as_the_module_is() -> None:
    net = Net()
    needs = HostNeeds(weights=4 * 52, gradients=4 * 40, averages=2 * 4 * 52)
    assert count_host_needs(net, 1, averages=[deepcopy(net), deepcopy(net)]) == needs
    assert count_host_needs(net, 4, averages=[net]).averages == 4 * (4 + 14 + 2)


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


def test_what_fits_beside_a_gibibyte_is_accepted_and_a_byte_more_refused(host: Any) -> None:
    needs = HostNeeds(weights=GIB, gradients=GIB, states=2 * GIB)
    host(5 * GIB)
    accepted(needs)
    host(5 * GIB - 1)
    refused(
        needs,
        f"{NAME} needs 4.00 GiB of host memory on node1: weights 1.00 GiB, gradients 1.00 GiB, optimizer state "
        "2.00 GiB. Available are 5.00 GiB, including the memory of the module, of which 1.00 GiB must stay free. It "
        "would fit with nvme_path='/a/fast/disk' (2.00 GiB), or with precision='bf16-true' (2.00 GiB).",
    )


def test_only_what_would_fit_is_named(host: Any) -> None:
    host(3 * GIB)
    needs = HostNeeds(weights=GIB, low_precision_copies=512 * MIB, gradients=GIB, states=2 * GIB)
    start = (
        f"{NAME} needs 4.50 GiB of host memory on node1: weights 1.00 GiB, 16-bit copies 512.00 MiB, gradients 1.00 "
        "GiB, optimizer state 2.00 GiB. Available are 3.00 GiB, including the memory of the module, of which 1.00 GiB "
        "must stay free. "
    )
    refused(needs, start + "It would fit with precision='bf16-true' (2.00 GiB).")
    refused(
        HostNeeds(4 * GIB, can_be_16_bit=False),
        weights_alone("4.00 GiB", "3.00 GiB", "1.00 GiB") + NOTHING_FITS,
    )


def test_averages_are_named_and_given_back_and_stay_wide(host: Any) -> None:
    net = nn.Linear(512, 512, bias=False)  # 1 MiB
    needs = HostNeeds(weights=MIB, gradients=MIB, averages=MIB)
    host(3 * MIB)
    HostMemory(net, averages=[deepcopy(net)], may_swap=False).check(needs, NAME, is_spread=False)
    refused(
        needs,
        f"{NAME} needs 3.00 MiB of host memory on node1: weights 1.00 MiB, gradients 1.00 MiB, averages of weights "
        "1.00 MiB. Available are 4.00 MiB, including the memory of the module, of which 2.00 MiB must stay free. It "
        "would fit with precision='bf16-true' (2.00 MiB).",
        net,
    )


def test_weights_that_can_be_split_and_moments_in_fewer_bytes_are_named(host: Any) -> None:
    host(4 * GIB)
    refused(
        HostNeeds(
            GIB,
            GIB // 2,
            states=2 * GIB,
            can_be_16_bit=False,
            can_be_split=True,
            low_precision_states=(GIB, GIB // 2, 0),
        ),
        f"{NAME} needs 3.50 GiB of host memory on node1: weights 1.00 GiB, 16-bit copies 512.00 MiB, optimizer "
        "state 2.00 GiB. Available are 4.00 GiB, including the memory of the module, of which 1.00 GiB must stay "
        "free. It would fit with nvme_path='/a/fast/disk' (1.50 GiB), or with master='split' (3.00 GiB), or with "
        "host_state='bf16' (2.50 GiB), or with host_state='8bit' (2.00 GiB).",
    )


def test_without_states_no_disk_is_named(host: Any) -> None:
    host(2 * GIB)
    refused(
        HostNeeds(weights=GIB, gradients=GIB),
        f"{NAME} needs 2.00 GiB of host memory on node1: weights 1.00 GiB, gradients 1.00 GiB. Available are "
        "2.00 GiB, including the memory of the module, of which 1.00 GiB must stay free. It would fit with "
        "precision='bf16-true' (1.00 "
        "GiB).",
    )


def test_ranks_of_a_machine_share_it(host: Any, ranks: list[tuple[str, int]]) -> None:
    needs = HostNeeds(weights=GIB, can_be_16_bit=False)
    host(9 * GIB)
    ranks.append(("node1", 7))
    accepted(needs)
    host(9 * GIB - 1)
    ranks.append(("node2", 2))
    refused(
        needs,
        weights_alone("8.00 GiB", "9.00 GiB", "1.00 GiB", "node1 for its 8 ranks")
        + "It would fit with 3 such machines, each with as many ranks.",
        is_spread=True,
    )


def test_all_ranks_refuse_what_another_machine_lacks(host: Any, ranks: list[tuple[str, int]]) -> None:
    host(3 * GIB)
    ranks.append(("node2", 3))
    refused(
        HostNeeds(weights=GIB, can_be_16_bit=False),
        weights_alone("3.00 GiB", "3.00 GiB", "1.00 GiB", "node2 for its 3 ranks") + NOTHING_FITS,
    )


def test_what_the_module_has_is_given_back(host: Any) -> None:
    net = nn.Linear(512, 512, bias=False)  # 1 MiB
    host(MIB)
    accepted(HostNeeds(weights=MIB), net)  # nothing more is taken
    accepted(HostNeeds(weights=MIB, gradients=MIB // 2), net)
    with torch.device("meta"):
        empty = nn.Linear(512, 512, bias=False)
    refused(
        HostNeeds(weights=MIB, can_be_16_bit=False),
        weights_alone("1.00 MiB", "1.00 MiB", "1.00 MiB") + NOTHING_FITS,
        empty,
    )


def test_states_of_a_run_before_are_given_back(host: Any) -> None:
    net = nn.Linear(512, 512, bias=False)
    optimizer = AdamW(net.parameters())
    net.weight.grad = torch.zeros(512, 512)
    optimizer.step()
    host(2 * MIB)
    room = HostMemory(net, [optimizer], may_swap=False)
    room.check(HostNeeds(weights=MIB, gradients=MIB, states=2 * MIB), NAME, is_spread=False)


def test_a_toy_needs_as_much_again_on_a_machine_that_is_full(host: Any) -> None:
    host(20 * MIB)
    accepted(HostNeeds(weights=10 * MIB))


def test_what_is_not_pinned_may_be_swapped_out(host: Any) -> None:
    host(GIB, swap=2 * GIB)
    accepted(HostNeeds(weights=2 * GIB), may_swap=True)
    with pytest.raises(OffloadError):
        accepted(HostNeeds(weights=2 * GIB), may_swap=False)


def test_a_system_that_does_not_tell_refuses_nothing(host: Any, ranks: list[tuple[str, int]]) -> None:
    host(None)
    ranks.append(("node1", 1))
    accepted(HostNeeds(weights=2**60))
