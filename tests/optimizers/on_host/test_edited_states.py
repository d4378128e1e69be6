"""What ``optimizer.state`` shows is what the next step uses, whoever wrote it, and wherever states are kept."""

import time
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.sharded_nets import Net, batch, loss_of, make, sharded, whole
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_vram.core.host.transfers import HostWorker
from lightning_vram.core.tensors.codecs import LowBitTensor
from lightning_vram.optimizers.moment_forms import FORMS
from lightning_vram.optimizers.on_host import HostOptimizers

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
EXACT = {"memory", "disk"}
Edit = Callable[[Optimizer, dict[str, Any]], None]


def fill_steps(optimizer: Optimizer, held: dict[str, Any]) -> None:
    for state in optimizer.state.values():
        state["step"].fill_(1000.0)


def add_to_steps_in_held_dicts(optimizer: Optimizer, held: dict[str, Any]) -> None:
    for state in held["states"]:
        state["step"] += 1000


def clear(optimizer: Optimizer, held: dict[str, Any]) -> None:
    optimizer.state.clear()


def pop_some(optimizer: Optimizer, held: dict[str, Any]) -> None:
    for parameter in list(optimizer.state)[::2]:
        del optimizer.state[parameter]


def begin_anew(optimizer: Optimizer, held: dict[str, Any]) -> None:
    optimizer.state = defaultdict(dict)


def replace_by_plain_ones(optimizer: Optimizer, held: dict[str, Any]) -> None:
    for parameter, state in optimizer.state.items():
        state["exp_avg"] = torch.full(parameter.shape, 0.5)
        state["exp_avg_sq"] = torch.full(parameter.shape, 0.25)


def replace_states(optimizer: Optimizer, held: dict[str, Any]) -> None:
    for parameter in list(optimizer.state):
        moments = {key: torch.full_like(parameter, 0.5).detach() for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(7.0), **moments}


def write_moments(optimizer: Optimizer, held: dict[str, Any]) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def load(optimizer: Optimizer, held: dict[str, Any]) -> None:
    for state in held["state_dict"]["state"].values():
        state["step"].fill_(30.0)
        state["exp_avg"].fill_(0.5)
        state["exp_avg_sq"].fill_(0.25)
    optimizer.load_state_dict(held["state_dict"])


EDITS: list[Edit] = [
    fill_steps,
    add_to_steps_in_held_dicts,
    clear,
    pop_some,
    begin_anew,
    replace_by_plain_ones,
    replace_states,
    write_moments,
    load,
]


def adamw(parameters: Any) -> Optimizer:
    return optim.AdamW(parameters, lr=1e-2, fused=True)


def host_of(sharding: Any, place: str, folder: Any) -> HostOptimizers:
    on_disk, form = place.startswith("disk"), FORMS.get(place.rpartition(" ")[2])
    return HostOptimizers(sharding, num_threads=1, nvme_path=folder if on_disk else None, form=form)


def step(net: nn.Module, optimizer: Optimizer, seed: int, *, is_early: bool = False) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, batch(seed))
        loss.backward()
        return loss

    if is_early:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def train(net: nn.Module, optimizer: Optimizer, edit: Edit | None, *, is_early: bool = False) -> Tensor:
    """Three steps, an edit right after the third, while it goes on, and two more; return what the weights are then."""
    held: dict[str, Any] = {}
    for seed in range(5):
        step(net, optimizer, seed, is_early=is_early)
        if seed == 0:
            held["states"] = list(optimizer.state.values())
            held["state_dict"] = deepcopy(optimizer.state_dict())
        elif seed == 2 and edit is not None:
            edit(optimizer, held)
    return torch.cat([whole(parameter).detach().flatten() for parameter in net.parameters()])


def train_hosted(place: str, folder: Any, edit: Edit | None, *, is_early: bool = False) -> Tensor:
    net = make()
    with sharded(net) as sharding:
        host = host_of(sharding, place, folder)
        host.may_step_early = lambda optimizer: is_early
        optimizer = adamw(net.parameters())
        host.attach([optimizer])
        try:
            return train(net, optimizer, edit, is_early=is_early)
        finally:
            host.let_go(sharding.remove())


def train_plainly(edit: Edit | None) -> Tensor:
    net = make()
    return train(net, adamw(net.parameters()), edit)


def is_seen(ours: Tensor, edit: Edit, *, is_exact: bool) -> bool:
    expected = train_plainly(edit)
    if is_exact:
        return torch.equal(ours, expected)
    return bool((ours - expected).norm() < 0.5 * (expected - train_plainly(None)).norm())


@pytest.fixture
def _slowly(monkeypatch):
    """Have every job of the thread that steps begin late: what does not wait for it comes before it."""
    submit = HostWorker.submit

    def submit_late(worker: HostWorker, job: Callable[[], None]) -> Any:
        if worker._thread.name == "stepping optimizers":
            submit(worker, lambda: time.sleep(0.002))
        return submit(worker, job)

    monkeypatch.setattr(HostWorker, "submit", submit_late)


CASES = [
    *((edit, place, False) for edit in EDITS for place in ("memory", "disk 8bit")),
    *((edit, place, False) for edit in (replace_by_plain_ones, load) for place in ("disk", "bf16", "8bit")),
    *((edit, place, True) for edit in (fill_steps, clear) for place in ("memory", "disk 8bit")),
]


@pytest.mark.usefixtures("_slowly")
@pytest.mark.quick_sample(10)
@pytest.mark.parametrize(("edit", "place", "is_early"), CASES)
def test_what_is_written_to_states_while_a_step_goes_on_counts_in_the_next(mesh, tmp_path, edit, place, is_early):
    assert is_seen(train_hosted(place, tmp_path, edit, is_early=is_early), edit, is_exact=place in EXACT)


@pytest.mark.parametrize(
    ("place", "value", "found"),
    [(place, torch.zeros(3), r"shape \[3\]") for place in ("memory", "disk", "8bit")]
    + [("bf16", 0.0, r"0\.0"), ("disk", None, "None")],
)
def test_a_moment_of_another_shape_is_refused(mesh, tmp_path, place, value, found):
    net = make()
    with sharded(net) as sharding:
        host = host_of(sharding, place, tmp_path)
        optimizer = adamw(net.parameters())
        host.attach([optimizer])
        step(net, optimizer, 0)
        optimizer.state[net.blocks[0].down.weight]["exp_avg"] = value
        text = (
            rf"^AdamW\.state\[parameter 2\]\['exp_avg'\] must be a tensor of shape \[6, 9\], got {found}: write "
            r"torch\.zeros_like\(parameter\), or reset it with optimizer\.state\.pop\(parameter\)\.$"
        )
        with pytest.raises(ValueError, match=text):
            step(net, optimizer, 1)
        host.let_go(sharding.remove())


# --- parameters that come and go ---


def add_and_load(optimizer: Optimizer, net: Net, seed: int) -> None:
    if seed in (1, 3):
        optimizer.add_param_group({"params": list(net.blocks[2 - seed // 2].parameters()), "lr": 5e-3})
    elif seed == 4:
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))


def remove(optimizer: Optimizer, net: Net, seed: int) -> None:
    if seed == 1:
        optimizer.add_param_group({"params": list(net.blocks[1].parameters())})
    elif seed == 3:
        optimizer.param_groups.pop(0)


def replace(optimizer: Optimizer, net: Net, seed: int) -> None:
    if seed == 2:
        optimizer.param_groups[0]["params"] = list(net.norm.parameters())  # as many
    elif seed == 4:
        optimizer.param_groups[:] = [{**optimizer.param_groups[0], "params": list(net.parameters())}]


def thaw(optimizer: Optimizer, net: Net, seed: int) -> None:
    if seed == 0:
        optimizer.add_param_group({"params": list(net.blocks.parameters())})
        net.blocks.requires_grad_(False)
    elif seed == 2:
        net.blocks.requires_grad_(True)


def train_changing(net: nn.Module, optimizer: Optimizer, change: Callable[[Optimizer, Any, int], None]) -> Tensor:
    for seed in range(6):
        change(optimizer, net, seed)
        step(net, optimizer, seed, is_early=True)
    return torch.cat([whole(parameter).detach().flatten() for parameter in net.parameters()])


@pytest.mark.parametrize("place", ["memory", "disk", "disk 8bit"])
@pytest.mark.parametrize(
    ("change", "is_early"), [(add_and_load, True), (remove, False), (replace, True), (thaw, False)]
)
def test_parameters_that_come_and_go_are_trained_as_in_the_plain_run(mesh, tmp_path, place, change, is_early):
    net, plain = make(), make()
    before = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])
    with sharded(net) as sharding:
        host = host_of(sharding, place, tmp_path)
        host.may_step_early = lambda optimizer: is_early
        optimizer = adamw(net.head.parameters())
        host.attach([optimizer])
        ours = train_changing(net, optimizer, change)
        kinds = {type(state["exp_avg"].to_local()) for state in optimizer.state.values()}
        host.let_go(sharding.remove())
    expected = train_changing(plain, adamw(plain.head.parameters()), change)
    assert (
        torch.equal(ours, expected) if place in EXACT else (ours - expected).norm() < 0.3 * (expected - before).norm()
    )
    assert kinds == {LowBitTensor if "bit" in place else Tensor}
