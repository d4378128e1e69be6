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
from lightning_vram.optimizers import host_memory
from lightning_vram.optimizers.host_memory import HostMemory, count_host_needs, count_state_bytes

NAME = "FSDPOffloadStrategy"
ADVICE = (
    "Set nvme_path='/a/fast/disk' (moves the optimizer state there), host_state='bf16', '8bit' or '4bit', "
    "master='split' or precision='bf16-true', or use more machines."
)
KINDS = ("weights", "16-bit copies", "gradients", "averages of weights", "optimizer state")


def needs_of(*num_bytes: int) -> dict[str, int]:
    """Bytes by kind, the first ones given."""
    return dict(zip(KINDS, (*num_bytes, *[0] * (len(KINDS) - len(num_bytes))), strict=True))


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


def refused(needs: dict[str, int], message: str, module: nn.Module | None = None) -> None:
    with pytest.raises(OffloadError, match=f"^{re.escape(message + ADVICE)}$"):
        HostMemory(module or nn.Identity(), may_swap=False).check(needs, NAME)


def weights_alone(needed: str, there: str, margin: str, where: str = "node1") -> str:
    return (
        f"{NAME} needs {needed} of host memory on {where}: weights {needed}. Available are {there}, including the "
        f"memory of the module, of which {margin} must stay free. "
    )


def accepted(needs: dict[str, int], module: nn.Module | None = None, *, may_swap: bool = False) -> None:
    HostMemory(module or nn.Identity(), may_swap=may_swap).check(needs, NAME)


# --- what is needed ---


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_needs_of_one_rank(device: str) -> None:
    with torch.device(device):
        net = Net()
    assert count_host_needs(net, 1) == counted(4 * 52, 0, 4 * 40)
    assert count_host_needs(net, 1, {"trained.weight"}, torch.bfloat16) == counted(4 * 52, 2 * 35, 4 * 40)


def counted(weights: int, copies: int, gradients: int, averages: int = 0) -> dict[str, int]:
    return dict(zip(KINDS, (weights, copies, gradients, averages), strict=False))


def test_shards_are_padded_to_the_same_length() -> None:
    # of 3 rows 1, of 5 rows 2, of 5 elements 2
    assert count_host_needs(Net(), 4) == counted(4 * (4 + 14 + 2), 0, 4 * (14 + 2))


def test_what_is_in_16_bit_has_no_copies() -> None:
    net = Net().to(torch.bfloat16)
    assert count_host_needs(net, 1, {"trained.weight"}, torch.bfloat16) == counted(2 * 52, 0, 2 * 40)


def test_tied_weights_count_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    assert count_host_needs(net, 1) == counted(64, 0, 64)


def test_an_average_is_sharded_as_the_module_is() -> None:
    net = Net()
    needs = counted(4 * 52, 0, 4 * 40, 2 * 4 * 52)
    assert count_host_needs(net, 1, averages=[deepcopy(net), deepcopy(net)]) == needs
    assert count_host_needs(net, 4, averages=[net])["averages of weights"] == 4 * (4 + 14 + 2)


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
    needs = needs_of(GIB, 0, GIB, 0, 2 * GIB)
    host(5 * GIB)
    accepted(needs)
    host(5 * GIB - 1)
    refused(
        needs,
        f"{NAME} needs 4.00 GiB of host memory on node1: weights 1.00 GiB, gradients 1.00 GiB, optimizer state "
        "2.00 GiB. Available are 5.00 GiB, including the memory of the module, of which 1.00 GiB must stay free. ",
    )


def test_averages_are_named_and_given_back(host: Any) -> None:
    net = nn.Linear(512, 512, bias=False)  # 1 MiB
    needs = needs_of(MIB, 0, MIB, MIB)
    host(3 * MIB)
    HostMemory(net, averages=[deepcopy(net)], may_swap=False).check(needs, NAME)
    refused(
        needs,
        f"{NAME} needs 3.00 MiB of host memory on node1: weights 1.00 MiB, gradients 1.00 MiB, averages of weights "
        "1.00 MiB. Available are 4.00 MiB, including the memory of the module, of which 2.00 MiB must stay free. ",
        net,
    )


def test_ranks_of_a_machine_share_it(host: Any, ranks: list[tuple[str, int]]) -> None:
    needs = needs_of(GIB)
    host(9 * GIB)
    ranks.append(("node1", 7))
    accepted(needs)
    host(9 * GIB - 1)
    ranks.append(("node2", 2))
    refused(
        needs,
        weights_alone("8.00 GiB", "9.00 GiB", "1.00 GiB", "node1 for its 8 ranks"),
    )


def test_all_ranks_refuse_what_another_machine_lacks(host: Any, ranks: list[tuple[str, int]]) -> None:
    host(3 * GIB)
    ranks.append(("node2", 3))
    refused(
        needs_of(GIB),
        weights_alone("3.00 GiB", "3.00 GiB", "1.00 GiB", "node2 for its 3 ranks"),
    )


def test_what_the_module_has_is_given_back(host: Any) -> None:
    net = nn.Linear(512, 512, bias=False)  # 1 MiB
    host(MIB)
    accepted(needs_of(MIB), net)  # nothing more is taken
    accepted(needs_of(MIB, 0, MIB // 2), net)
    with torch.device("meta"):
        empty = nn.Linear(512, 512, bias=False)
    refused(
        needs_of(MIB),
        weights_alone("1.00 MiB", "1.00 MiB", "1.00 MiB"),
        empty,
    )


def test_states_of_a_run_before_are_given_back(host: Any) -> None:
    net = nn.Linear(512, 512, bias=False)
    optimizer = AdamW(net.parameters())
    net.weight.grad = torch.zeros(512, 512)
    optimizer.step()
    host(2 * MIB)
    room = HostMemory(net, [optimizer], may_swap=False)
    room.check(needs_of(MIB, 0, MIB, 0, 2 * MIB), NAME)


def test_a_toy_needs_as_much_again_on_a_machine_that_is_full(host: Any) -> None:
    host(20 * MIB)
    accepted(needs_of(10 * MIB))


def test_what_is_not_pinned_may_be_swapped_out(host: Any) -> None:
    host(GIB, swap=2 * GIB)
    accepted(needs_of(2 * GIB), may_swap=True)
    with pytest.raises(OffloadError):
        accepted(needs_of(2 * GIB), may_swap=False)


def test_a_system_that_does_not_tell_refuses_nothing(host: Any, ranks: list[tuple[str, int]]) -> None:
    host(None)
    ranks.append(("node1", 1))
    accepted(needs_of(2**60))
