"""All ranks train the same model, or say on every rank why not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from lightning_vram.core.ranks import check_same_modules, spread_values

NUM_RANKS = 3


def run_rank(rank: int, path: str, check: Callable[[int], None]) -> None:
    store = dist.FileStore(f"{path}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    check(rank)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(path: Path, check: Callable[[int], None]) -> None:
    mp.start_processes(run_rank, (str(path), check), nprocs=NUM_RANKS, start_method="fork")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"one": nn.Linear(2, 3), "two": nn.Linear(2, 3), "norm": nn.BatchNorm1d(3)})


def freeze(model: nn.Module) -> nn.Module:
    model.two.weight.requires_grad_(False)
    return model


def tie(model: nn.Module) -> nn.Module:
    model.two.weight = model.one.weight
    return model


def turn(model: nn.Module) -> nn.Module:
    return nn.ModuleDict({name: model[name] for name in ("two", "one", "norm")})


def without_norm(model: nn.Module) -> nn.Module:
    del model["norm"]
    return model


ONE = "parameter 'one.weight' has shape (3, 2), float32, requires_grad=True"
TWO = "parameter 'two.weight' has shape (3, 2), float32, requires_grad=True"
DIFFERENCES = {  # on rank 1 only
    lambda model: model.double(): (
        f"{ONE} on ranks 0, 2 but parameter 'one.weight' has shape (3, 2), float64, requires_grad=True on rank 1"
    ),
    freeze: (
        f"{TWO} on ranks 0, 2 but parameter 'two.weight' has shape (3, 2), float32, requires_grad=False on rank 1"
    ),
    tie: f"{TWO} on ranks 0, 2 but parameter 'two.weight' is the same as 'one.weight' on rank 1",
    without_norm: (
        "parameter 'norm.weight' has shape (3,), float32, requires_grad=True on ranks 0, 2 but nothing more on rank 1"
    ),
    turn: f"{ONE} on ranks 0, 2 but {TWO} on rank 1",
}


def check_differences(rank: int) -> None:
    check_same_modules(build())
    for change, difference in DIFFERENCES.items():
        model = build()
        with pytest.raises(ValueError, match="The model differs") as caught:
            check_same_modules(change(model) if rank == 1 else model)
        assert str(caught.value) == (
            f"The model differs between ranks: {difference}. "
            "Build it from the same arguments in the same order on every rank."
        )
    pair = dist.new_group([0, 2])
    if rank != 1:
        check_same_modules(build(), pair)


@pytest.mark.distributed
def test_models_that_differ_are_refused_on_every_rank_alike(tmp_path):
    on_ranks(tmp_path, check_differences)


def check_spreading(rank: int) -> None:
    expected, model = build(), build()
    with torch.no_grad():
        spread_values(model)
        if rank == 2:
            model.two.weight[1, 1] = torch.nextafter(model.two.weight[1, 1], torch.tensor(9.0))
            model.norm.num_batches_tracked += 1
            swapped = model.one.bias.flip(0).clone()
            model.one.bias.copy_(swapped)  # the same numbers in other places
        versions = [parameter._version for parameter in model.parameters()]
        spread_values(model)
        changed = [one._version != version for one, version in zip(model.parameters(), versions, strict=True)]
        assert changed == [False, True, True, False, False, False]  # the others were not sent
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    spread_values(model)
    transposed = nn.ParameterDict({"weight": nn.Parameter(torch.full((3, 2), float(rank)).T)})
    spread_values(transposed)
    assert not transposed["weight"].is_contiguous()
    assert torch.equal(transposed["weight"], torch.zeros(2, 3))
    odd = {"bf16": torch.full((), rank, dtype=torch.bfloat16), "bool": torch.tensor([rank > 0]), "empty": torch.ones(0)}
    special = nn.ParameterDict({name: nn.Parameter(value, requires_grad=False) for name, value in odd.items()})
    special["meta"] = nn.Parameter(torch.ones(2, device="meta"))
    spread_values(special)
    assert (special["bf16"], special["bool"].item(), special["meta"].is_meta) == (0, False, True)


@pytest.mark.distributed
def test_values_that_differ_become_those_of_the_first_rank(tmp_path):
    on_ranks(tmp_path, check_spreading)


def check_meta(rank: int) -> None:
    model = build() if rank == 0 else build().to("meta")
    with pytest.raises(
        ValueError,
        match=r"'one\.weight' has .*=True on rank 0 but .*=True, as Parameter on meta on ranks 1, 2\. Build it from",
    ):
        check_same_modules(model)
    pair = dist.new_group([1, 2])  # its first rank is not the first of all
    if rank > 0:
        layer = nn.Linear(1, 1)
        nn.init.constant_(layer.weight, rank)
        spread_values(layer, pair)
        assert layer.weight.item() == 1


@pytest.mark.distributed
def test_values_on_some_ranks_only_are_refused_and_groups_have_a_first_rank_of_their_own(tmp_path):
    on_ranks(tmp_path, check_meta)


def test_alone_there_is_nothing_to_compare(one_rank):
    model = build()
    check_same_modules(model)
    spread_values(model)


def test_nothing_is_compared_without_processes():
    check_same_modules(build())
    spread_values(build())
