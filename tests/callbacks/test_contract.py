"""What every callback of the package promises. A new one is covered by adding its file to configs/."""

import copy
import pickle

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import LateTiny, LitManual, LitTiny, TinyGPT, describe_module, fail_in
from support.pages import assert_documented
from support.parts import AUTOMATIC_ONLY, CALLBACKS, KEEPS_RESULT, NEEDS_HEAD, ROOT, from_config, net_for, snake_case

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # what a callback warns about is tested in its own file
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # LightningCLI 2.6 on jsonargparse 4.53; dynamo
]


@pytest.mark.parametrize("name", CALLBACKS)
def test_documented_and_tested(name):
    assert_documented(name)
    assert (ROOT / "tests" / "callbacks" / snake_case(name) / "test_callback.py").exists()


@pytest.mark.parametrize("name", CALLBACKS)
def test_survives_copy_and_pickle(name):
    callback = from_config(name)
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert vars(twin).keys() == vars(callback).keys()


@pytest.mark.quick_sample(6)
@pytest.mark.parametrize("name", KEEPS_RESULT)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}],
    ids=["eager", "accumulation and clipping", "autocast"],
)
def test_training_is_unchanged(name, arguments, make_case, same_as_baseline):
    same_as_baseline(make_case, from_config(name), max_epochs=2, limit_val_batches=1, **arguments)


@pytest.mark.quick_sample(4)
@pytest.mark.parametrize("name", KEEPS_RESULT)
@pytest.mark.parametrize(
    "make", [lambda: LitManual(TinyGPT()), LateTiny], ids=["manual optimization", "configure_model"]
)
def test_training_is_unchanged_in(name, make, same_as_baseline):
    if make is not LateTiny and name in AUTOMATIC_ONLY:
        pytest.skip("refused: see its own tests")
    same_as_baseline(make, from_config(name), max_epochs=2)


@pytest.mark.slow_except(
    *("cnn-whole-ActivationCheckpointing", "gpt-layer-ActivationCompression", "gpt-layer-InPlaceFusion")
)
@pytest.mark.parametrize("name", KEEPS_RESULT)
@pytest.mark.parametrize("part", ["whole", "layer"])
def test_training_is_unchanged_when_compiled(name, part, make_model, same_as_baseline):
    def make():
        torch._dynamo.reset()
        model = make_model()
        if part == "whole":
            return torch.compile(model, backend="aot_eager")
        layer = model.net.blocks[0] if isinstance(model.net, TinyGPT) else model.net
        layer.compile(backend="aot_eager")
        return model

    same_as_baseline(make, from_config(name))


@pytest.mark.quick_sample(6)
@pytest.mark.distributed
@pytest.mark.parametrize("name", KEEPS_RESULT)
def test_training_is_unchanged_on_two_ranks(name, make_model, same_as_baseline):
    two_ranks = {"strategy": "ddp_fork", "devices": 2}
    same_as_baseline(make_model, from_config(name), baseline=two_ranks, **two_ranks)


@pytest.mark.quick_sample(6)
@pytest.mark.parametrize("name", CALLBACKS)
def test_the_module_is_what_it_was_after_each_of_two_fits(name, make_case, make_trainer):
    callback, model = from_config(name), make_case()
    if name in NEEDS_HEAD and not any(isinstance(part, torch.nn.Embedding) for part in model.modules()):
        pytest.skip("no head")
    before = describe_module(model)
    for _ in range(2):
        trainer = make_trainer(callbacks=[callback], max_epochs=1)
        trainer.fit(model)
        for run in (trainer.validate, trainer.test, trainer.predict):
            if isinstance(model, LitTiny):
                run(model)
        assert describe_module(model) == before
        assert "setup" not in vars(trainer.strategy)


@pytest.mark.slow
def test_the_other_copy_of_lightning_is_told_in_one_message():
    other = pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.demos.boring_classes import BoringModel

    for name in CALLBACKS:
        trainer = other.Trainer(accelerator="cpu", callbacks=[from_config(name)], logger=False, fast_dev_run=True)
        expected = rf"^{name} works with lightning\.pytorch, got a Trainer of pytorch_"
        with pytest.raises(MisconfigurationException, match=expected):
            trainer.fit(BoringModel())


@pytest.mark.quick_sample(6)
@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("place", ["setup", "configure_optimizers", "training_step", "on_validation_end", "teardown"])
def test_a_fit_that_fails_leaves_the_module_as_it_was(name, place, make_trainer):
    callback, model = from_config(name), LitTiny(net_for(name))
    before = describe_module(model)
    trainer = make_trainer(callbacks=[callback])
    fail_in(model, place, trainer)
    assert describe_module(model) == before
    assert "setup" not in vars(trainer.strategy)
    make_trainer(callbacks=[callback], max_epochs=1).fit(model)
    assert describe_module(model) == before


@pytest.mark.quick_sample(1)
def test_all_together_change_nothing(make_case, same_as_baseline):
    callbacks = [from_config(name) for name in KEEPS_RESULT]
    same_as_baseline(make_case, *callbacks)


class PicklingLoader:
    """Pickles what a worker process would get with a collate function of a datamodule."""

    trainer = net = None
    num_pickled = 0

    def __iter__(self):
        self.num_pickled += len(pickle.dumps(self.trainer)) > 0
        return iter([self.net.samples(4).tensors])


@pytest.mark.quick_sample(8)
@pytest.mark.parametrize("name", CALLBACKS)
def test_the_trainer_can_be_pickled_where_loaders_start_their_workers(name, make_trainer):
    loader = PicklingLoader()
    loader.trainer = make_trainer(callbacks=[from_config(name)], limit_val_batches=0, max_epochs=1)
    loader.net = net_for(name)
    loader.trainer.fit(LitTiny(loader.net), loader)
    assert loader.num_pickled >= 1
