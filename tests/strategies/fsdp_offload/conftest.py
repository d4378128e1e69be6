import lightning.pytorch as pl
import pytest
from support.helpers import ForkingOffload, assert_equal_weights, describe_module
from support.host_layers import Layers
from support.offload_nets import MODES, leave_group

from lightning_vram.core.host import memory
from lightning_vram.optimizers import averages, step_loop


@pytest.fixture
def _small_parts(monkeypatch):
    """Weights in several parts, and parts of several weights."""
    for module in (averages, memory, step_loop):
        monkeypatch.setattr(module, "PART_ELEMENTS", 512)


@pytest.fixture(autouse=True)
def _nothing_is_left(leaves_nothing):
    """Module, Trainer, strategy and shards of every fit, also of one that fails."""
    yield
    leave_group()


@pytest.fixture
def same_in_modes(make_trainer):
    """``same_in_modes(make, modes, parts=dict, calls=("fit",), **options)``: compare with a plain run, to the bit.

    Weights are the same, what the module has ``seen`` and its ``losses``, and nothing is left on it. ``parts()`` are
    the callbacks and plugins of each run.
    """

    def compare(make, modes=("params",), *, parts=dict, calls=("fit",), **options):
        fitted = []
        for mode in (None, *modes):
            arguments = {"max_epochs": 1, "devices": 1, "limit_val_batches": 0, **options, **parts()}
            pl.seed_everything(0, verbose=False)
            model = make()
            before, parameters = describe_module(model), list(map(id, model.parameters()))
            strategy = "auto" if mode is None else ForkingOffload(**MODES[mode])
            trainer = make_trainer(strategy=strategy, **arguments)
            for call in calls:
                getattr(trainer, call)(model)
            assert describe_module(model) == before
            assert list(map(id, model.parameters())) == parameters
            fitted.append(model)
        for ours in fitted[1:]:
            assert_equal_weights(ours, fitted[0])
            for notes in ("seen", "losses"):
                assert getattr(ours, notes, None) == getattr(fitted[0], notes, None)

    return compare


@pytest.fixture
def fit_layers(fit):
    """``fit_layers(make, offload, **options)``: train in bf16-mixed, by a strategy with the arguments ``offload``."""

    def fit_layers(make=Layers, offload=None, **options):
        given = {"precision": "bf16-mixed", "use_distributed_sampler": False, **options}
        return fit(make, strategy=ForkingOffload(**(offload or {})), **given)

    return fit_layers
