import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from support.helpers import LitTiny, TinyGPT, assert_equal_weights

from lightning_vram import LeanMixedPrecision

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path")  # without the ModelCheckpoint
SCHEMES = ["bf16+master", "bf16+split", "bf16+kahan", "bf16+stochastic"]


class Resumable(LitTiny):
    """Draws nothing in training: the generator is not part of a checkpoint."""

    def __init__(self):
        super().__init__(TinyGPT())
        for part in self.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
            if isinstance(part, torch.nn.MultiheadAttention):
                part.dropout = 0.0
        self.data = super().train_dataloader()

    def train_dataloader(self):
        return self.data


def make_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)  # overflows at first, and again


def make_plugin(name):
    if name == "fp16":
        return LeanMixedPrecision("fp16", scaler=make_scaler())
    return LeanMixedPrecision("bf16", parameters=name, recast_in_backward=True)


@pytest.fixture
def run(fit, tmp_path):
    """Train for some epochs, from a checkpoint if one is named."""

    def run(plugin, num_epochs, *callbacks, resumed=None, make=Resumable, **options):
        path = None if resumed is None else tmp_path / f"{resumed}.ckpt"
        return fit(make, *callbacks, plugins=plugin and [plugin], max_epochs=num_epochs, ckpt_path=path, **options)

    return run


class Saves(pl.Callback):
    """While weights are lean: after the fit a module in bfloat16 has lost what it lacks."""

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/half.ckpt")


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("name", ["fp16", "fp32", *SCHEMES])
def test_a_run_that_is_resumed_goes_on_to_the_bit(name, run):
    straight = run(make_plugin(name), 4)
    if name == "fp16":
        assert 2 < straight.trainer.precision_plugin.overflow_steps < 10  # of twelve
    run(make_plugin(name), 2, Saves())
    resumed = run(make_plugin(name), 4, resumed="half")
    assert_equal_weights(resumed, straight)
    assert resumed.trainer.precision_plugin.state_dict() == straight.trainer.precision_plugin.state_dict()
    for one, other in zip(resumed.trainer.optimizers, straight.trainer.optimizers, strict=True):
        for parameter, state in zip(one.state.values(), other.state.values(), strict=True):
            assert all(torch.equal(parameter[key], state[key]) for key in state)


@pytest.mark.parametrize("is_alone", [True, False], ids=["weights alone", "all"])
@pytest.mark.parametrize("name", ["bf16+split", "bf16+stochastic"])
def test_checkpoints_hold_the_weights_in_fp32(name, is_alone, run, tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, "last", save_weights_only=is_alone, save_on_train_epoch_end=True)
    model = run(make_plugin(name), 1, checkpoint, enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt")["state_dict"]
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[key], value) for key, value in model.state_dict().items())
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


@pytest.mark.parametrize("name", ["bf16+master", "bf16+split"])
def test_a_plain_run_resumes_from_lean_parameters_and_the_other_way_round(name, run):
    for first, second in ((make_plugin(name), None), (None, make_plugin(name))):
        model = run(first, 1)
        model.trainer.save_checkpoint(f"{model.trainer.default_root_dir}/half.ckpt")
        state = model.trainer.optimizers[0].state_dict()["state"]
        assert state[0]["exp_avg"].dtype is torch.float32
        resumed = run(second, 1, resumed="half")  # loads, and trains no further
        assert_equal_weights(resumed, model)
        for key, value in resumed.trainer.optimizers[0].state_dict()["state"][0].items():
            assert torch.equal(value, state[0][key])


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_module_in_bf16_is_resumed_with_what_it_lacks(run):
    options = {"make": lambda: Resumable().bfloat16()}
    straight = run(make_plugin("bf16+split"), 2, **options)
    run(make_plugin("bf16+split"), 1, Saves(), **options)
    assert_equal_weights(run(make_plugin("bf16+split"), 2, resumed="half", **options), straight)


class WithAFreshHead(Resumable):
    """Loads all but one layer, which it zeroes."""

    def load_state_dict(self, *args, **kwargs):
        loaded = super().load_state_dict(*args, **kwargs)
        torch.nn.init.zeros_(self.net.head.weight)
        return loaded


@pytest.mark.parametrize("name", ["bf16+master", "bf16+kahan"])
def test_what_the_user_makes_of_loaded_weights_stays(name, run):
    run(make_plugin(name), 1, Saves())
    resumed = run(make_plugin(name), 1, resumed="half", make=WithAFreshHead)
    assert not resumed.net.head.weight.any()


@pytest.mark.parametrize("name", ["bf16+split", "bf16+kahan"])
def test_a_search_for_the_learning_rate_changes_no_weight(name, run):
    searching = run(make_plugin(name), 1, LearningRateFinder(num_training_steps=3, update_attr=False))
    plain = run(make_plugin(name), 1)
    if name != "bf16+kahan":
        assert_equal_weights(searching, plain)
    for one, other in zip(searching.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # kahan has 16 bits of a weight


def test_lightnings_loss_scale_is_taken_over_and_left_for_it(run):
    plain = MixedPrecision("16-mixed", "cpu", make_scaler())
    run(plain, 1, Saves())
    scale = plain.scaler.state_dict()
    assert scale["scale"] != 2.0**22
    ours, again = LeanMixedPrecision("fp16"), MixedPrecision("16-mixed", "cpu")
    trainer = run(ours, 1, resumed="half").trainer
    assert ours.scaler.state_dict() == scale
    trainer.save_checkpoint(f"{trainer.default_root_dir}/ours.ckpt")
    run(again, 1, resumed="ours")
    assert again.scaler.state_dict() == scale


class Renamed(LeanMixedPrecision):
    """Lightning keeps states by the names of classes."""


def test_a_subclass_finds_the_state_of_its_parent(run):
    parent = run(make_plugin("fp16"), 1, Saves()).trainer.precision_plugin
    renamed = Renamed("fp16")
    run(renamed, 1, resumed="half")
    assert renamed.state_dict() == parent.state_dict()


def test_a_checkpoint_of_fp16_starts_a_run_in_bf16(run):
    run(make_plugin("fp16"), 1, Saves())
    assert run(make_plugin("bf16+split"), 2, resumed="half").trainer.precision == "bf16-mixed"
