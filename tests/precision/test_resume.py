import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from support.helpers import LitTiny, TinyGPT, assert_equal_weights

from lightning_vram import LeanMixedPrecision

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path")  # without the ModelCheckpoint
SCHEMES = ["bf16+master", "bf16+split", "bf16+kahan", "bf16+stochastic"]


class SavesAtTheEnd(pl.Callback):
    """While weights are lean: after the fit a module in bfloat16 has lost what it lacks."""

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def build(module=LitTiny):
    pl.seed_everything(0, verbose=False)
    model = module(TinyGPT())
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):  # the generator is not part of a checkpoint
            part.p = 0.0
        if isinstance(part, torch.nn.MultiheadAttention):
            part.dropout = 0.0
    data = model.train_dataloader()
    model.train_dataloader = lambda: data
    return model


def make_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)  # overflows at first, and again


def make_plugin(name):
    if name == "fp16":
        return LeanMixedPrecision("fp16", scaler=make_scaler())
    return LeanMixedPrecision("bf16", parameters=name, recast_in_backward=True)


def run(make_trainer, plugin, num_epochs, path=None, module=LitTiny, saves=None, **options):
    model = build(module)
    if saves is not None:
        options["callbacks"] = [SavesAtTheEnd(saves)]
    trainer = make_trainer(plugins=[plugin] if plugin else None, max_epochs=num_epochs, **options)
    trainer.fit(model, ckpt_path=path)
    return model, trainer


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("name", ["fp16", "fp32", *SCHEMES])
def test_a_run_that_is_resumed_goes_on_to_the_bit(name, make_trainer, tmp_path):
    straight, trainer = run(make_trainer, make_plugin(name), 4)
    if name == "fp16":
        assert 2 < trainer.precision_plugin.overflow_steps < 10  # of twelve
    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="half", save_on_train_epoch_end=True)
    run(make_trainer, make_plugin(name), 2, callbacks=[checkpoint], enable_checkpointing=True)
    resumed, again = run(make_trainer, make_plugin(name), 4, tmp_path / "half.ckpt")
    assert_equal_weights(resumed, straight)
    assert again.precision_plugin.state_dict() == trainer.precision_plugin.state_dict()
    for one, other in zip(again.optimizers, trainer.optimizers, strict=True):
        for parameter, state in zip(one.state.values(), other.state.values(), strict=True):
            assert all(torch.equal(parameter[key], state[key]) for key in state)


@pytest.mark.parametrize("is_alone", [True, False], ids=["weights alone", "all"])
@pytest.mark.parametrize("name", SCHEMES)
def test_checkpoints_hold_the_weights_in_fp32(name, is_alone, make_trainer, tmp_path):
    options = {"dirpath": tmp_path, "filename": "last", "save_on_train_epoch_end": True}
    checkpoint = ModelCheckpoint(save_weights_only=is_alone, **options)
    model, _ = run(make_trainer, make_plugin(name), 2, callbacks=[checkpoint], enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt")["state_dict"]
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[key], value) for key, value in model.state_dict().items())
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


@pytest.mark.parametrize("name", ["bf16+master", "bf16+split"])
def test_a_plain_run_resumes_from_lean_parameters_and_the_other_way_round(name, make_trainer, tmp_path):
    for first, second in ((make_plugin(name), None), (None, make_plugin(name))):
        model, trainer = run(make_trainer, first, 2)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        state = trainer.optimizers[0].state_dict()["state"]
        assert state[0]["exp_avg"].dtype is torch.float32
        resumed, again = run(make_trainer, second, 2, tmp_path / "half.ckpt")  # loads, and trains no further
        assert_equal_weights(resumed, model)
        for key, value in again.optimizers[0].state_dict()["state"][0].items():
            assert torch.equal(value, state[0][key])


class InBfloat16(LitTiny):
    def __init__(self, net):
        super().__init__(net.bfloat16())


@pytest.mark.parametrize("name", ["bf16+master", "bf16+split"])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_module_in_bf16_is_resumed_with_what_it_lacks(name, make_trainer, tmp_path):
    straight, _ = run(make_trainer, make_plugin(name), 4, module=InBfloat16)
    run(make_trainer, make_plugin(name), 2, module=InBfloat16, saves=tmp_path / "half.ckpt")
    resumed, _ = run(make_trainer, make_plugin(name), 4, tmp_path / "half.ckpt", module=InBfloat16)
    assert_equal_weights(resumed, straight)


class WithAFreshHead(LitTiny):
    """Loads all but one layer, which it zeroes."""

    def load_state_dict(self, *args, **kwargs):
        loaded = super().load_state_dict(*args, **kwargs)
        torch.nn.init.zeros_(self.net.head.weight)
        return loaded


@pytest.mark.parametrize("name", SCHEMES)
def test_what_the_user_makes_of_loaded_weights_stays(name, make_trainer, tmp_path):
    _, trainer = run(make_trainer, make_plugin(name), 2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = run(make_trainer, make_plugin(name), 2, tmp_path / "half.ckpt", module=WithAFreshHead)
    assert not resumed.net.head.weight.any()


@pytest.mark.parametrize("name", SCHEMES)
def test_a_search_for_the_learning_rate_changes_no_weight(name, make_trainer):
    fitted = []
    for searches in (False, True):
        model, trainer = build(), make_trainer(plugins=[make_plugin(name)], limit_val_batches=0)
        if searches:
            trainer.callbacks.append(LearningRateFinder(num_training_steps=3, update_attr=False))
        trainer.fit(model)
        fitted.append(model)
    if name != "bf16+kahan":
        assert_equal_weights(*fitted)
    for one, other in zip(*(model.parameters() for model in fitted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # kahan has 16 bits of a weight


def test_lightnings_loss_scale_is_taken_over_and_left_for_it(make_trainer, tmp_path):
    plain = MixedPrecision("16-mixed", "cpu", make_scaler())
    _, trainer = run(make_trainer, plain, 2)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    scale = plain.scaler.state_dict()
    assert scale["scale"] != 2.0**22
    ours = LeanMixedPrecision("fp16")
    _, trainer = run(make_trainer, ours, 2, tmp_path / "plain.ckpt")
    assert ours.scaler.state_dict() == scale
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    again = MixedPrecision("16-mixed", "cpu")
    run(make_trainer, again, 2, tmp_path / "ours.ckpt")
    assert again.scaler.state_dict() == scale


def test_a_checkpoint_of_fp16_starts_a_run_in_bf16(make_trainer, tmp_path):
    _, trainer = run(make_trainer, make_plugin("fp16"), 1)
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    _, trainer = run(make_trainer, make_plugin("bf16+split"), 2, tmp_path / "ours.ckpt")
    assert trainer.precision == "bf16-mixed"
