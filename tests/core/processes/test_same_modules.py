"""All ranks train the same model, or say on every rank why not."""

import pytest
import torch
import torch.distributed as dist
from support.sharded_nets import on_ranks
from torch import nn

from lightning_vram.core.ranks import check_same_modules, spread_values


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
NORM = "parameter 'norm.weight' has shape (3,), float32, requires_grad=True"
DIFFERENCES = {  # on rank 1 only
    lambda model: model.double(): f"{ONE} on ranks 0, 2 but {ONE.replace('32', '64')} on rank 1",
    freeze: f"{TWO} on ranks 0, 2 but {TWO.replace('True', 'False')} on rank 1",
    tie: f"{TWO} on ranks 0, 2 but parameter 'two.weight' is the same as 'one.weight' on rank 1",
    without_norm: f"{NORM} on ranks 0, 2 but nothing more on rank 1",
    turn: f"{ONE} on ranks 0, 2 but {TWO} on rank 1",
}


def models_that_differ_are_refused_on_every_rank_alike() -> None:
    check_same_modules(build())
    for change, difference in DIFFERENCES.items():
        model = build()
        with pytest.raises(ValueError, match="The model differs") as caught:
            check_same_modules(change(model) if dist.get_rank() == 1 else model)
        assert str(caught.value) == (
            f"The model differs between ranks: {difference}. "
            "Build it from the same arguments in the same order on every rank."
        )
    pair = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        check_same_modules(build(), pair)


def values_that_differ_become_those_of_the_first_rank() -> None:
    rank, expected, model = dist.get_rank(), build(), build()
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


def values_on_some_ranks_only_are_refused_and_groups_have_a_first_rank_of_their_own() -> None:
    rank = dist.get_rank()
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
def test_three_ranks(tmp_path):
    on_ranks(
        tmp_path,
        models_that_differ_are_refused_on_every_rank_alike,
        values_that_differ_become_those_of_the_first_rank,
        values_on_some_ranks_only_are_refused_and_groups_have_a_first_rank_of_their_own,
        num_ranks=3,
    )


def test_without_processes_nothing_is_compared():
    check_same_modules(build())
    spread_values(build())
