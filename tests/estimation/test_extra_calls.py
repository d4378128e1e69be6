"""What of the user's code runs more often because a run is planned: the module's hooks, once, and nothing else."""

import os
from collections import Counter
from functools import partial, wraps

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader

from lightning_vram import (
    AutoVRAM,
    EmptyCache,
    MemoryBudget,
    QuantizationAwareTraining,
    VRAMMonitor,
    estimate_memory,
    plan_memory,
)
from lightning_vram.estimation.fake_trainer import is_run

CALLS = Counter()
QUIETLY = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
HOOKS_OF = (ModelHooks, DataHooks, CheckpointHooks, Callback, pl.LightningDataModule, Logger)
NOT_COUNTED = {"forward", "transfer_batch_to_device", "from_datasets", "load_from_checkpoint"}
STEPS_AND_A_VALIDATION = {
    **dict.fromkeys(("training_step", "on_before_zero_grad", "on_before_backward", "on_after_backward"), 2),
    **dict.fromkeys(("on_before_optimizer_step", "on_train_batch_start", "on_train_batch_end"), 2),
    **dict.fromkeys(("on_before_batch_transfer", "on_after_batch_transfer"), 3),
    **dict.fromkeys(("setup", "configure_callbacks", "configure_model", "configure_optimizers", "on_fit_start"), 1),
    **dict.fromkeys(("on_train_start", "on_train_epoch_start", "validation_step"), 1),
    **dict.fromkeys(("on_validation_start", "on_validation_epoch_start", "on_validation_end"), 1),
    **dict.fromkeys(("on_validation_batch_start", "on_validation_batch_end"), 1),
    **dict.fromkeys(("on_validation_model_eval", "on_validation_model_zero_grad"), 1),
}
"""Of the module, by one run on tensors without memory."""


def counted(kind):
    """Count all hooks of a class, those that it does not have itself as well."""

    def decorate(cls):
        owners = [base for base in cls.__mro__ if base is cls or base in HOOKS_OF]
        names = {name for owner in owners for name, value in vars(owner).items() if callable(value)}
        for name in names:
            if not name.startswith("_") and name not in NOT_COUNTED:
                setattr(cls, name, counting(f"{kind}.{name}", getattr(cls, name)))
        return cls

    return decorate


def counting(name, hook):
    @wraps(hook)
    def run(*args, **kwargs):
        CALLS[name] += 1
        return hook(*args, **kwargs)

    return run


@counted("module")
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def prepare_data(self):
        """Counted."""

    def configure_model(self):
        """Counted."""

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        self.logger.log_metrics({"mine": 1.0})
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).sum())

    def configure_callbacks(self):
        return [Watch(), EarlyStopping("val")]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class WithLoaders(Net):
    def train_dataloader(self):
        return DataLoader(torch.ones(16, 4), batch_size=4)

    val_dataloader = train_dataloader


@counted("data")
class Data(pl.LightningDataModule):
    def prepare_data(self):
        """Counted."""

    def train_dataloader(self):
        return DataLoader(torch.ones(16, 4), batch_size=4)

    val_dataloader = train_dataloader


@counted("callback")
class Watch(Callback):
    """Of the user."""


@counted("logger")
class Log(Logger):
    name = version = "log"

    def log_metrics(self, metrics, step=None):
        """Counted."""

    def log_hyperparams(self, *_, **__):
        """Counted."""


def calls_of(tmp_path, *features, before=None, module=Net, data=Data):
    """Count the hooks of a fit."""
    CALLS.clear()
    module, data = module(), data and data()
    arguments = {
        "callbacks": [Watch(), ModelCheckpoint(tmp_path / f"{len(os.listdir(tmp_path))}"), *features],
        "logger": Log(),
        "default_root_dir": tmp_path,
    }
    if before is not None:
        before(module, trainer=arguments, datamodule=data, device="cpu")
    pl.Trainer(**arguments, accelerator="cpu", max_epochs=1, log_every_n_steps=1, enable_progress_bar=False).fit(
        module, datamodule=data
    )
    return Counter(CALLS)


def more_calls(tmp_path, *features, before=None, **owners):
    plain = calls_of(tmp_path, **owners)
    assert plain["module.training_step"] == 4
    assert plain["logger.log_metrics"] > 4
    planned = calls_of(tmp_path, *features, before=before, **owners)
    assert not plain - planned
    return dict(planned - plain)


def of_module(**others):
    return {f"module.{name}": number for name, number in STEPS_AND_A_VALIDATION.items()} | others


FEATURES = {"AutoVRAM": lambda: [AutoVRAM()], "both": lambda: [MemoryBudget(), AutoVRAM()]}
BEFORE = {"estimate_memory": partial(estimate_memory, find_limits=False), "plan_memory": plan_memory}


@pytest.mark.parametrize("feature", FEATURES)
def test_callbacks_that_plan_run_the_modules_hooks_once_more(feature, tmp_path):
    callbacks = FEATURES[feature]()
    assert more_calls(tmp_path, *callbacks) == of_module(**{"data.train_dataloader": 1})
    found = more_calls(tmp_path, *callbacks, module=WithSetup, data=None)  # set up for its batch, too
    assert found == of_module(**{"module.setup": 2, "made loaders": 1})


class WithSetup(WithLoaders):
    def setup(self, stage):
        CALLS["module.setup"] += 1

    def train_dataloader(self):
        CALLS["made loaders"] += 1
        return super().train_dataloader()


@pytest.mark.parametrize("name", BEFORE)
def test_functions_that_plan_also_set_the_data_up(name, tmp_path):
    found = more_calls(tmp_path, before=BEFORE[name])
    assert found == of_module(**{"data.setup": 1, "data.train_dataloader": 1})


def test_prepare_data_runs_once_however_often_a_run_is_planned(tmp_path):
    def estimate_twice(*args, **kwargs):
        for _ in range(2):
            BEFORE["estimate_memory"](*args, **kwargs)

    module, data = WithLoaders(), Data()
    plain = calls_of(tmp_path)
    planned = calls_of(tmp_path, AutoVRAM(), before=estimate_twice)
    for name in ("data.prepare_data", "module.prepare_data"):
        assert plain[name] == planned[name] == 1
    CALLS.clear()
    estimate_twice(module, device="cpu")
    assert CALLS["module.prepare_data"] == 1
    trainer = pl.Trainer(**QUIETLY, max_epochs=1)
    module.training_step = lambda batch, batch_idx: module.layer(batch).sum()
    trainer.fit(module)
    assert CALLS["module.prepare_data"] == 1
    trainer.fit(module)  # as every fit
    assert CALLS["module.prepare_data"] == 2
    assert "prepare_data" not in vars(module) | vars(data)


@pytest.mark.parametrize(
    ("per_node", "local_rank", "node_rank", "number"),
    [(True, 0, 1, 1), (True, 1, 0, 0), (False, 0, 0, 1), (False, 0, 1, 0), (False, 1, 0, 0)],
)
def test_it_runs_on_the_ranks_on_which_lightning_runs_it(per_node, local_rank, node_rank, number, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("NODE_RANK", str(node_rank))
    data = Data()
    data.prepare_data_per_node = per_node
    CALLS.clear()
    BEFORE["estimate_memory"](Net(), datamodule=data, device="cpu")
    assert CALLS["data.prepare_data"] == number


class MyFinetuning(BaseFinetuning):
    """Of the user, of Lightning's."""


class MyEmptyCache(EmptyCache):
    """Of the user, of ours."""


def test_callbacks_that_change_the_step_are_run_and_others_are_not():
    others = [Watch(), ModelCheckpoint(), EarlyStopping("val"), VRAMMonitor(), AutoVRAM()]
    ours = [MyEmptyCache(), EmptyCache(), QuantizationAwareTraining()]
    lightnings = [MyFinetuning(), BackboneFinetuning(), WeightAveraging(), StochasticWeightAveraging(0.1)]
    lightnings.append(GradientAccumulationScheduler({0: 2}))
    assert not any(map(is_run, others))
    assert all(map(is_run, [*ours, *lightnings, ModelPruning("l1_unstructured")]))


class FreezeAndStop(EarlyStopping):
    """A subclass of Lightning's that changes the module, too."""

    def setup(self, trainer, pl_module, stage):
        pl_module.requires_grad_(False)
        pl_module.layer.bias.requires_grad_(True)


@pytest.mark.parametrize(
    ("named", "of_module"), [(FreezeAndStop, False), ("FreezeAndStop", True), (f"{__name__}.FreezeAndStop", False)]
)
def test_others_are_run_where_they_are_named(named, of_module):
    callbacks = [FreezeAndStop("val", strict=False)]

    def run(**arguments):
        module, trainer = Net(), {"callbacks": [] if of_module else callbacks}
        module.configure_callbacks = lambda: callbacks if of_module else []
        return BEFORE["estimate_memory"](module, torch.ones(4, 4), device="cpu", trainer=trainer, **arguments)

    left_out, found = run(), run(run_callbacks=[named])
    note = "Callbacks that were not run: FreezeAndStop. If one of them changes the module or the step, add it to "
    assert any(one == f"{note}run_callbacks." for one in left_out.notes)
    assert not any("FreezeAndStop" in one for one in found.notes)
    assert found.peak_bytes < left_out.peak_bytes


@pytest.mark.parametrize("feature", [AutoVRAM, MemoryBudget])
def test_callbacks_that_plan_run_them_too(feature, tmp_path):
    found = more_calls(tmp_path, feature(run_callbacks=[Watch]))
    assert (found["callback.setup"], found["callback.on_train_batch_end"]) == (1, 2)
    assert "callback.on_train_end" not in found


def test_a_name_that_no_callback_has_is_refused():
    for name in ("Freez", "EarlyStopping"):
        message = rf"^run_callbacks names '{name}', but the Trainer's own callbacks are: Watch\.$"
        arguments = {"trainer": {"callbacks": [EarlyStopping("val")]}, "run_callbacks": [name]}
        with pytest.raises(ValueError, match=message):
            BEFORE["estimate_memory"](WithLoaders(), torch.ones(4, 4), device="cpu", **arguments)
    with pytest.warns(UserWarning, match="AutoVRAM cannot plan this run: ValueError: run_callbacks names 'Freez'"):
        pl.Trainer(**QUIETLY, callbacks=[AutoVRAM(run_callbacks=["Freez"])], fast_dev_run=True).fit(Quiet())


class Quiet(WithLoaders):
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val", 0.0)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (AutoVRAM, "AutoVRAM"),
        (MemoryBudget, "MemoryBudget"),
        (partial(plan_memory, Net(), torch.ones(4, 4), device="cpu"), "plan_memory"),
        (partial(estimate_memory, Net(), torch.ones(4, 4), device="cpu"), "estimate_memory"),
    ],
)
def test_what_is_no_class_of_callbacks_is_refused(make, name):
    with pytest.raises(TypeError, match=rf"^{name}\(run_callbacks\) must be classes .*, got 3\.$"):
        make(run_callbacks=[3])


def test_a_second_fit_is_planned_anew():
    class Doubled(Quiet):
        size = 4

        def train_dataloader(self):
            return DataLoader(torch.ones(16, 4), batch_size=self.size)

    planned = []

    class Auto(AutoVRAM):
        def on_train_start(self, trainer, pl_module):
            planned.append(self._plan.decision.num_elements)
            super().on_train_start(trainer, pl_module)

    module, trainer = Doubled(), pl.Trainer(**QUIETLY, callbacks=[Auto()], max_epochs=1)
    trainer.fit(module)
    module.size, trainer.fit_loop.max_epochs = 8, 2
    trainer.fit(module)
    assert planned == [16, 32]
