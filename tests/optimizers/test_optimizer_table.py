"""Every optimizer of PyTorch's database and 40 of ``pytorch-optimizer``, in every form: ``optimizer_table.txt``.

A cell compares weights and optimizer states after five steps in a form with those of the same steps without it:

- ``equal``: bitwise identical.
- ``fused``: bitwise identical to ``fused=True``, the kernel that steps on the host use unless the user chose one.
- ``bound``: approximate weights, within the bound of the form (``BOUNDS``).
- ``refused``: the message of the form (``REFUSALS``), or an error of sharded tensors.

``bf16``, ``8bit`` and ``4bit`` leave optimizers that they do not know as they are, which is ``equal``; an ``AdamW``
within another optimizer gets the form. Settings are those of PyTorch's own tests, and the defaults of
``pytorch-optimizer``. Gradients do not depend on the weights, and are bf16 numbers: the same in each form.
"""

import copy
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
from support.database_samples import optimizer_infos
from support.sharded_nets import on_ranks, sharded, whole
from torch import Tensor, nn
from torch.optim import LBFGS, AdamW, Muon, Optimizer, SparseAdam

from lightning_vram.optimizers.bf16_weights import LeanParameters
from lightning_vram.optimizers.in_backward import BackwardSteps, Clipping
from lightning_vram.optimizers.low_precision import LowPrecisionMoments
from lightning_vram.optimizers.moment_forms import FORMS as MOMENTS
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.optimizers.step_round import STEPPABLE

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:.* is not one of torch.optim's")]

NUM_STEPS = 5
# Largest distance of the weights: as a share of what five steps move them, and of the weights themselves.
BOUNDS = {
    "bf16": (0.003, 0.0),
    "8bit": (0.04, 0.0),  # 0.007 without Lion, whose step is a sign
    "4bit": (0.15, 0.0),
    "kahan": (0.01, 2**-16),
    "stochastic": (0.01, 2**-7),
    "2 ranks": (1e-4, 0.0),  # sums in another order
}
_LEAN = "bfloat16 parameters cannot be stepped by {name}: use one of"
_SHARDS = "{name} cannot step on shards: "
REFUSALS = {
    **dict.fromkeys(("master", "split", "kahan", "stochastic"), _LEAN),
    "backward": "OptimizerInBackward cannot step {name}: use one of",
    **dict.fromkeys(("host", "host split", "2 ranks"), _SHARDS),
    **{f"host {form}": f"{_SHARDS}|host_state='{form}' is for the moments of .*, got {{name}}: " for form in MOMENTS},
    "nvme": f"{_SHARDS}|nvme_path cannot hold the optimizer state of {{name}}: ",
}
Make = Callable[[nn.Module], Optimizer]
Around = Callable[[nn.Module, Make, Path], AbstractContextManager[Optimizer]]


class Product(nn.Module):
    """A loss whose gradients are given."""

    def __init__(self, rows: int, columns: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.bias = nn.Parameter(torch.randn(rows)) if bias else None

    def forward(self, generator: torch.Generator) -> Tensor:
        gradients = [torch.randn(one.shape, generator=generator).bfloat16() for one in self.parameters()]
        return sum((one * g.to(one.dtype)).sum() for one, g in zip(self.parameters(), gradients, strict=True))


class Net(nn.Module):
    """Weights of 4,608 numbers, whose moments may have 8 or 4 bits; of 640 and a bias, whose moments may not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = Product(64, 72, bias=True), Product(10, 64, bias=False)

    def forward(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self.body(generator) + self.head(generator)


@dataclass(frozen=True)
class Setting:
    """An optimizer class with its arguments."""

    kind: Callable[..., Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    has_fused: bool = False  # and chooses no kernel

    def make(self, net: nn.Module, **more: Any) -> Optimizer:
        parameters = [one for one in net.parameters() if self.kind is not Muon or one.dim() == 2]
        return self.kind(parameters, **copy.deepcopy(self.options), **more)


def read_table() -> dict[str, dict[str, str]]:
    lines = Path(__file__).with_name("optimizer_table.txt").read_text().splitlines()
    (_, *forms), *rows = (re.split(" {2,}", line.strip()) for line in lines)
    return {name: dict(zip(forms, cells, strict=True)) for name, *cells in rows}


TABLE = read_table()


@cache
def settings_of_pytorch() -> dict[str, Setting]:
    found = {}
    for info in optimizer_infos():
        settings = [(one.desc, one.kwargs) for one in info.optim_inputs_func(device="cpu")]
        kernels = [name for name in ("foreach", "fused") if name in info.supported_impls]
        for name, options in (*settings, *((name, {name: True}) for name in kernels)):
            has_fused = "fused" in kernels and not options.keys() & set(kernels)
            found[f"{info.optim_cls.__name__}, {name}"] = Setting(info.optim_cls, options, has_fused)
    return found


def find_setting(name: str) -> Setting | None:
    package, _, kind = name.rpartition(".")
    if not package:
        return settings_of_pytorch().get(name)
    if kind == "Lookahead":
        return Setting(lambda parameters: pytorch_optimizer.Lookahead(AdamW(parameters)))
    return Setting(getattr(pytorch_optimizer, kind), {"base_optimizer": AdamW} if kind == "SAM" else {})


if_pinned = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason="other versions of PyTorch have other settings and sharded operators",
)


@contextmanager
def attached(
    net: nn.Module, make: Make, folder: Path, create: Callable[[nn.Module], Any], end: str = "let_go"
) -> Iterator[Optimizer]:
    form = create(net)
    try:
        optimizer = make(net)
        form.attach([optimizer])
        yield optimizer
    finally:
        getattr(form, end)()


def moments(name: Any) -> Around:
    return partial(attached, create=lambda net: LowPrecisionMoments(net, MOMENTS[name]))


def lean(name: str) -> Around:
    return partial(attached, create=lambda net: LeanParameters(net.parameters(), f"bf16+{name}"), end="restore")


@contextmanager
def on_host(
    net: nn.Module, make: Make, folder: Path, state: Any = "fp32", *, is_on_disk: bool = False, is_split: bool = False
) -> Iterator[Optimizer]:
    names = {name for name, _ in net.named_parameters()}
    options = {"is_split": True, "low_precision_dtype": torch.bfloat16, "low_precision": names} if is_split else {}
    with sharded(net, **options) as sharding:
        path, optimizer = folder if is_on_disk else None, make(net)
        host = HostOptimizers(sharding, num_threads=1, nvme_path=path, form=MOMENTS.get(state))
        try:
            host.attach([optimizer])
            yield optimizer
            host.finish()
        finally:
            host.let_go(sharding.remove())


FORMS: dict[str, Around] = {
    **{name: moments(name) for name in MOMENTS},
    **{name: lean(name) for name in ("master", "split", "kahan", "stochastic")},
    "backward": partial(attached, create=lambda net: BackwardSteps(net, Clipping())),
    "host": on_host,
    **{f"host {form}": partial(on_host, state=form) for form in MOMENTS},
    "host split": partial(on_host, is_split=True),
    "nvme": partial(on_host, is_on_disk=True),
}


def weights(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def train(net: nn.Module, optimizer: Optimizer) -> None:
    torch.manual_seed(0)

    def closure(seed: int) -> Tensor:
        optimizer.zero_grad()
        loss = net(seed)
        if isinstance(optimizer, LBFGS):  # a line search needs a minimum
            loss = loss + sum(parameter.square().sum() for parameter in net.parameters())
        loss.backward()
        if isinstance(optimizer, SparseAdam):
            for parameter in net.parameters():
                parameter.grad = parameter.grad.to_sparse()
        return loss.detach()

    for seed in range(NUM_STEPS):
        optimizer.step(partial(closure, seed))


def states(net: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    named = (item for parameter in net.parameters() for item in sorted(optimizer.state.get(parameter, {}).items()))
    return [whole(torch.as_tensor(value)).double() for _, value in named if isinstance(value, Tensor | float | int)]


@cache
def trained(name: str, **more: Any) -> tuple[Tensor, list[Tensor]]:
    net = Net()
    optimizer = find_setting(name).make(net, **more)
    train(net, optimizer)
    return weights(net), states(net, optimizer)


def is_same(name: str, net: nn.Module, optimizer: Optimizer, **more: Any) -> bool:
    expected, of_optimizer = trained(name, **more)
    found = states(net, optimizer)
    is_whole = len(found) == len(of_optimizer) and all(map(torch.equal, found, of_optimizer))
    return is_whole and torch.equal(weights(net), expected)


def compare(name: str, form: str, net: nn.Module, optimizer: Optimizer) -> str:
    """Return a cell, or how far off the weights are."""
    kernels = {"equal": {}, "fused": {"fused": True}} if find_setting(name).has_fused else {"equal": {}}
    cells = [cell for cell, more in kernels.items() if is_same(name, net, optimizer, **more)]
    if cells:  # on some CPUs, both kernels round alike
        return TABLE[name][form] if TABLE[name].get(form) in cells else cells[0]
    expected, _ = trained(name)
    distance, moved = (weights(net) - expected).norm(), (expected - weights(Net())).norm()
    of_moved, of_weights = BOUNDS.get(form.removeprefix("host "), (-1.0, 0.0))
    is_near = distance <= of_moved * moved + of_weights * expected.norm()
    return "bound" if is_near else f"off by {distance / moved:.2g} of the steps"


def find_cell(name: str, form: str, around: Around, folder: Path) -> str:
    kind = name.removeprefix("pytorch_optimizer.").partition(",")[0]
    net, message = Net(), REFUSALS.get(form, "$").format(name=kind)
    try:
        with around(net, find_setting(name).make, folder) as optimizer:
            train(net, optimizer)
    except Exception as error:
        modules = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)}
        is_of_shards = "DTensor" in str(error) or any(one.startswith("torch.distributed.tensor") for one in modules)
        is_foreign = "2 ranks" in form or form.startswith(("host", "nvme"))
        is_refused = (is_foreign and is_of_shards) or re.match(message, str(error))
        return "refused" if is_refused else f"refused by {error!r}"
    return compare(name, form, net, optimizer)


def is_default(name: str) -> bool:
    return "," not in name or name.endswith(" default")


def is_quick(name: str) -> bool:
    """The defaults of PyTorch's, and some of the others."""
    return name.endswith(" default") or name in [one for one in TABLE if "," not in one][::8]


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if is_quick(name) else pytest.mark.slow) for name in TABLE]
)
def test_an_optimizer_does_in_each_form_what_the_table_says(tmp_path, name):
    if find_setting(name) is None:
        pytest.skip("only PyTorch 2.13 has this setting in its database")
    expected = {form: TABLE[name][form] for form in FORMS}
    assert {form: find_cell(name, form, around, tmp_path) for form, around in FORMS.items()} == expected


@if_pinned
@pytest.mark.slow
@pytest.mark.parametrize("settings", ["default", "other"])
def test_an_optimizer_does_on_two_ranks_what_the_table_says(tmp_path, settings):
    names = [name for name in TABLE if is_default(name) == (settings == "default")]

    def compare_with_table() -> None:
        cells = {name: find_cell(name, "2 ranks", on_host, tmp_path) for name in names}
        assert cells == {name: TABLE[name]["2 ranks"] for name in names}

    on_ranks(tmp_path, compare_with_table)


@if_pinned
def test_the_table_has_each_setting_of_pytorchs_database_and_forty_of_pytorch_optimizer():
    of_pytorch = settings_of_pytorch()
    assert list(TABLE)[: len(of_pytorch)] == list(of_pytorch)
    assert {setting.kind for setting in of_pytorch.values()} >= set(STEPPABLE)
    foreign = list(TABLE)[len(of_pytorch) :]
    assert len({name for name in foreign if name.startswith("pytorch_optimizer.")}) == len(foreign) == 40
