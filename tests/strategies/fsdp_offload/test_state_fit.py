"""States of other parameters are refused by name, before a kernel reads past their end."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_nets import make_net, train
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from lightning_vram.optimizers.moment_forms import is_elementwise
from lightning_vram.techniques.sharded_checkpoints import CheckpointStore
from lightning_vram.techniques.sharded_checkpoints.states import (
    check_shapes,
    gather_optimizer_state,
    load_optimizer_state,
    match_parameters,
    renamed,
    sharded_module_state,
    sharded_optimizer_state,
)

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
WAY_OUT = "Return the optimizer the checkpoint was saved with: the same parameters, in the same order."
KINDS: list[Callable[..., Optimizer]] = [
    *(ASGD, Adadelta, Adagrad, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop),
    lambda parameters: SGD(parameters, 0.1, momentum=0.9),
    lambda parameters: SGD(parameters, 0.1),
    lambda parameters: AdamW(parameters, amsgrad=True),
]


def make_states(kind: Callable[..., Optimizer] = AdamW) -> tuple[nn.Module, Optimizer, dict[str, Any]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = kind(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return module, optimizer, optimizer.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizers_own_states_fit(kind: Callable[..., Optimizer]):
    module, optimizer, state = make_states(kind)
    check_shapes(module, optimizer, state, 0)
    check_shapes(module, kind(module.parameters()), state, 0)  # one that has not stepped yet


def test_another_order_or_other_names_of_parameters_are_refused():
    module, _, state = make_states()
    turned = AdamW(reversed(list(module.parameters())))
    message = f"The checkpoint's exp_avg of 1.bias in optimizer 0 has shape [3, 4], the parameter [2]. {WAY_OUT}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_shapes(module, turned, state, 0)
    names = dict(module.named_parameters())
    named = AdamW(names.items()).state_dict()
    message = f"The checkpoint has 0.weight where optimizer 0 has 1.bias. {WAY_OUT}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_shapes(module, AdamW(reversed(names.items())), named, 0)


def test_names_of_compiled_layers_and_of_states_in_another_order_fit():
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    names = dict(module.named_parameters())
    compiled = {name.replace(".", "._orig_mod."): parameter for name, parameter in names.items()}
    check_shapes(module, AdamW(names.items()), AdamW(compiled.items()).state_dict(), 0)
    turned = AdamW(reversed(names.items()))
    matched = match_parameters(module, turned, renamed(AdamW(names.items()).state_dict(), [list(names)]))
    check_shapes(module, turned, matched, 0)
    load_optimizer_state(turned, matched)
    assert turned.param_groups[0]["param_names"] == ["1.weight", "0.weight"]


@pytest.mark.parametrize("sharded", [False, True], ids=["full", "sharded"])
def test_nothing_is_loaded_if_one_optimizer_does_not_fit(one_rank: None, tmp_path: Path, sharded: bool):
    net = make_net()
    weights = [p for p in net.parameters() if p.requires_grad]
    optimizers = [AdamW(weights[:3], foreach=False), AdamW(weights[3:], foreach=False)]
    for optimizer in optimizers:
        train(net, optimizer)
    if sharded:
        module_state = sharded_module_state(net)
        states = [sharded_optimizer_state(net, optimizer) for optimizer in optimizers]
        name = next(iter(states[1]["state"]))
    else:
        module_state = make_net(sharded=False).state_dict()
        states = [gather_optimizer_state(optimizer) for optimizer in optimizers]
        name = 0
    assert isinstance(states[1]["state"][name]["exp_avg"], Tensor)
    states[1]["state"][name] = {**states[1]["state"][name], "exp_avg": torch.zeros(3, 7)}
    store = CheckpointStore(sharded=sharded, asynchronous=False)
    store.save({"state_dict": module_state, "optimizer_states": states}, tmp_path / "a.ckpt")
    fresh = [AdamW(weights[:3]), AdamW(weights[3:])]
    checkpoint = store.open(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"exp_avg of .* in optimizer 1 has shape \[3, 7\], the parameter"):
        store.load_optimizers(checkpoint, net, fresh, is_elementwise)
    assert not fresh[0].state
