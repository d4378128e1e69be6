"""What cannot work on shards is refused before training, in one sentence."""

import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import ForkingOffload, LitTiny, TinyGPT
from support.offload_nets import Fused
from torch import nn, optim

from lightning_vram import LeanMixedPrecision
from lightning_vram.strategies.fsdp_offload.arguments import check_layer_drop
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy
from lightning_vram.techniques.sharding.apply import FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.grouping import plan_sharding_groups

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]


COPIES = "which copies parameters, and these are shards: average with WeightAveraging"
REPLACES = "which replaces parameters, and these are shards: prune with 'ddp' or a single device"


@pytest.mark.parametrize(
    ("kind", "argument", "reason"),
    [(StochasticWeightAveraging, 1e-2, COPIES), (ModelPruning, "l1_unstructured", REPLACES)],
)
def test_callbacks_that_copy_or_replace_parameters_are_refused(kind, argument, reason, fit):
    message = f"ForkingOffload does not work with {kind.__name__}, {reason}. Leave one out."
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        fit(Fused, kind(argument), strategy=ForkingOffload())


class OtherPrecision(Precision):
    pass


@pytest.mark.parametrize("plugin", [OtherPrecision, type("OtherMixed", (MixedPrecision,), {})])
def test_other_precision_plugins_are_refused(plugin):
    given = plugin("bf16-mixed", "cpu") if issubclass(plugin, MixedPrecision) else plugin()
    with pytest.raises(
        TypeError,
        match=rf"^FSDPOffloadStrategy does not work with the precision plugin {plugin.__name__}: use precision='32-true"
        r"', 'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or '64-true', or LeanMixedPrecision\.$",
    ):
        FSDPOffloadStrategy().precision_plugin = given


def test_lightnings_mixed_precision_becomes_ours():
    strategy, scaler = FSDPOffloadStrategy(), torch.amp.GradScaler("cpu", init_scale=8.0)
    strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", scaler)
    assert isinstance(strategy.precision_plugin, LeanMixedPrecision)
    assert strategy.precision_plugin.precision == "16-mixed"
    assert strategy.precision_plugin.scaler is scaler
    strategy.precision_plugin = MixedPrecision("bf16-mixed", "cpu")
    assert strategy.precision_plugin.precision == "bf16-mixed"


def test_lean_parameters_are_refused(make_trainer):
    plugin = LeanMixedPrecision("bf16", parameters="bf16+master")
    with pytest.raises(
        ValueError,
        match=r"^LeanMixedPrecision\(parameters='bf16\+master'\) does not work with ForkingOffload, which keeps "
        r"fp32 shards and transfers 16 bit by itself: leave parameters out\.$",
    ):
        make_trainer(strategy=ForkingOffload(), plugins=[plugin])


class With(LitTiny):
    """Has the optimizer that it is told to."""

    def __init__(self, make):
        super().__init__(TinyGPT())
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


@pytest.mark.parametrize("make", [optim.LBFGS, lambda p: optim.SparseAdam(list(p))], ids=["LBFGS", "SparseAdam"])
def test_optimizers_that_cannot_step_on_shards_are_refused(make, make_trainer):
    with pytest.raises(ValueError, match=r"^\w+ cannot step on shards: .*\. Use another optimizer, such as AdamW\.$"):
        make_trainer(strategy=ForkingOffload()).fit(With(make))


class Telling(ForkingOffload):
    """Each rank writes what it raises; the first that ends has the others killed."""

    def tell(self, call, *arguments):
        folder = Path(self.lightning_module.trainer.default_root_dir)
        try:
            call(*arguments)
        except Exception as error:
            part = folder / f"part{self.global_rank}"
            part.write_text(f"{type(error).__name__}: {error}")
            part.rename(folder / f"rank{self.global_rank}")
            end = time.monotonic() + 10
            while len(list(folder.glob("rank*"))) < self.world_size and time.monotonic() < end:
                time.sleep(0.01)
            raise

    def setup_environment(self):
        self.tell(super().setup_environment)

    def setup(self, trainer):
        self.tell(super().setup, trainer)


class Different(Fused):
    def configure_model(self):
        if self.trainer.global_rank:
            self.net.head = nn.Linear(16, 18)


REFUSALS = [
    (
        Fused,
        {"shard": "hybrid", "data_parallel_replicate_size": 3},
        r"^ValueError: FSDPOffloadStrategy\(data_parallel_replicate_size=3\) must divide the 2 processes\.$",
    ),
    (Different, {}, r"net\.head"),
]
if hasattr(optim, "Muon"):
    make_muon = partial(With, lambda parameters: optim.Muon([p for p in parameters if p.ndim == 2]))
    REFUSALS += [(make_muon, {}, "^ValueError: Muon cannot step on shards: it looks at the rows")]


@pytest.mark.parametrize(
    ("make", "arguments", "message"), REFUSALS, ids=["replicas", "modules", "Muon"][: len(REFUSALS)]
)
def test_what_two_ranks_cannot_do_is_refused_on_both(make, arguments, message, fit, tmp_path):
    with pytest.raises(Exception, match=r"terminated with the following error|exited"):
        fit(make, strategy=Telling(timeout=20, **arguments), devices=2)
    one, other = (file.read_text() for file in tmp_path.glob("rank*"))
    assert one == other
    assert re.search(message, one)


class Dropping(nn.Module):
    """Leaves its layer out as models of transformers do, by the same mark."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(layerdrop=1.0, encoder_layers=1)
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if getattr(self, "_is_fsdp_managed_module", False) else x


def test_on_one_device_layers_are_left_out_as_in_a_plain_run(mesh):
    net = Dropping()
    sharding = FullSharding(net, mesh, plan_sharding_groups(net, min_params=1), ShardingOptions())
    assert torch.equal(net(torch.ones(1, 4)), torch.ones(1, 4))
    sharding.remove()


def test_layers_that_are_not_left_out_on_several_ranks_are_warned_of():
    net = nn.Sequential(Dropping(), Dropping())
    with pytest.warns(UserWarning, match="layerdrop") as warnings:
        check_layer_drop(net, 2, "FSDPOffloadStrategy")
    assert [str(warning.message) for warning in warnings] == [
        "FSDPOffloadStrategy: config.layerdrop is 1.0, but all ranks must run the same layers, so models "
        "of transformers drop no layer, unlike on a single device. Set it to 0."
    ]
    check_layer_drop(net, 1, "FSDPOffloadStrategy")  # a warning is an error
    net[0].config.layerdrop = net[1].config.layerdrop = 0.0
    check_layer_drop(net, 2, "FSDPOffloadStrategy")


def test_sparse_gradients_are_refused(make_trainer):
    model = With(optim.SGD)
    model.net.embed = torch.nn.Embedding(17, 16, sparse=True)
    with pytest.raises(ValueError, match=r"reduces no sparse gradients: leave sparse=True out of net\.embed, Emb"):
        make_trainer(strategy=ForkingOffload()).fit(model)
