"""What ``OptimizerInBackward`` refuses, and what it tells of, each with the way out."""

import re
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import Forking, LitManual, TinyGPT
from support.host_layers import Layers
from support.offload_nets import leave_group
from torch.distributed.fsdp import fully_shard

from lightning_vram import AccumulationScheduler, LeanMixedPrecision, MicroBatching, OptimizerInBackward
from lightning_vram.optimizers.in_backward import BackwardSteps, Clipping

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:(?!lightning_vram)")


def assert_refused(trainer: pl.Trainer, model: pl.LightningModule, message: str, error: Any = None) -> None:
    with pytest.raises(error or MisconfigurationException, match=f"^{re.escape(message)}$"):
        trainer.fit(model)


NORMS = "(max_norm) must be 'two-pass', 'previous' or None, got"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_norm": 1.0}, TypeError, f"{NORMS} 1.0 of type float."),
        ({"max_norm": "exact"}, ValueError, f"{NORMS} 'exact'."),
        ({"keep_gradients": 0}, TypeError, "(keep_gradients) must be True or False, got 0 of type int."),
    ],
)
def test_other_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"^OptimizerInBackward{re.escape(message)}$"):
        OptimizerInBackward(**arguments)


class Decays(Layers):
    def optimizer_zero_grad(self, *unused: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.9)


class Zeros(Layers):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    "hook", ["backward", "on_before_optimizer_step", "configure_gradient_clipping", "on_after_backward"]
)
def test_hooks_of_the_module_that_may_use_gradients_are_refused(hook, make_trainer):
    message = (
        f"OptimizerInBackward does not work with Using.{hook}, which may use gradients: they are used up by "
        "then. Remove it, or leave OptimizerInBackward out."
    )
    kind = type("Using", (Layers,), {hook: lambda *args, **kwargs: None})
    assert_refused(make_trainer(callbacks=[OptimizerInBackward()]), kind(num_batches=1), message)


class Sharded(Layers):
    def configure_model(self) -> None:
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


def test_hooks_of_callbacks_that_may_use_gradients_are_refused(make_trainer):
    callback = LambdaCallback(on_before_optimizer_step=lambda *_: None)
    message = (
        "OptimizerInBackward does not work with LambdaCallback.on_before_optimizer_step, which may use gradients: they "
        "are used up by then. Set uses_gradients = False in LambdaCallback if it leaves them alone, or leave "
        "OptimizerInBackward out."
    )
    assert_refused(make_trainer(callbacks=[callback, OptimizerInBackward()]), Layers(num_batches=1), message)


def test_manual_optimization_is_refused(make_trainer):
    message = (
        "OptimizerInBackward does not work with manual optimization: it cannot see which backward belongs to which "
        "step. Set automatic_optimization=True."
    )
    assert_refused(make_trainer(callbacks=[OptimizerInBackward()]), LitManual(TinyGPT()), message)


@pytest.mark.parametrize(
    ("max_norm", "plugin"), [(None, MixedPrecision("16-mixed", "cpu")), ("previous", LeanMixedPrecision("fp16"))]
)
def test_a_scaler_takes_two_passes(max_norm, plugin, make_trainer):
    message = (
        f"OptimizerInBackward(max_norm={max_norm!r}) does not work with a GradScaler, which checks all gradients "
        "before any step: use max_norm='two-pass' (exact; runs each backward twice) or "
        "precision='bf16-mixed'."
    )
    trainer = make_trainer(callbacks=[OptimizerInBackward(max_norm)], plugins=[plugin])
    assert_refused(trainer, Layers(num_batches=1), message)


def test_a_scaler_under_fsdp2_is_refused(make_trainer):
    message = (
        "OptimizerInBackward does not work with a GradScaler under Forking: use precision='bf16-mixed', 'ddp' or a "
        "single device."
    )
    plugin = MixedPrecision("16-mixed", "cpu")
    trainer = make_trainer(callbacks=[OptimizerInBackward("two-pass")], plugins=[plugin], strategy=Forking(), devices=2)
    with pytest.raises(Exception, match=re.escape(message)):  # of another process
        trainer.fit(Sharded(num_batches=1))


def test_clipping_by_norm_is_asked_for_by_name(make_trainer):
    message = (
        "OptimizerInBackward cannot clip by norm, which needs all gradients at once, got gradient_clip_val=0.5: use "
        "max_norm='two-pass' (exact; runs each backward twice), max_norm='previous' (by the norm of the step before) "
        "or gradient_clip_algorithm='value'."
    )
    trainer = make_trainer(callbacks=[OptimizerInBackward()], gradient_clip_val=0.5)
    assert_refused(trainer, Layers(num_batches=1), message)


def test_fsdp_offload_is_refused(make_trainer):
    message = (
        "OptimizerInBackward does not work with FSDPOffloadStrategy, which steps itself as gradients become ready: "
        "leave "
        "OptimizerInBackward out."
    )
    trainer = make_trainer(callbacks=[OptimizerInBackward()], strategy="fsdp_offload", devices=1)
    assert_refused(trainer, Layers(num_batches=1), message)
    leave_group()


ABLE = "Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, ASGD, Muon, NAdam, RAdam, RMSprop, Rprop, SGD"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            torch.optim.LBFGS,
            f"OptimizerInBackward cannot step LBFGS: use one of torch.optim's {ABLE}, a subclass with the same step, "
            "or leave OptimizerInBackward out.",
        ),
        (
            partial(torch.optim.Adam, differentiable=True),
            "OptimizerInBackward cannot step Adam(differentiable=True): leave that off.",
        ),
    ],
)
def test_optimizers_that_step_otherwise_are_refused(make, message, make_trainer):
    assert_refused(make_trainer(callbacks=[OptimizerInBackward()]), Layers(make, num_batches=1), message, ValueError)


def test_what_steps_already_is_refused(make_trainer):
    message = (
        "OptimizerInBackward cannot step this AdamW: something else steps it already, as "
        "LeanMixedPrecision(parameters=...) and torch.compile do. Leave one of the two out."
    )
    plugin = LeanMixedPrecision("bf16", parameters="bf16+kahan")
    trainer = make_trainer(callbacks=[OptimizerInBackward()], plugins=[plugin])
    assert_refused(trainer, Layers(num_batches=1), message, ValueError)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"find_unused_parameters": True}, "find_unused_parameters=True"),
        ({"static_graph": True}, "static_graph=True, which fails in a first backward under no_sync"),
    ],
)
def test_what_only_the_reducer_of_ddp_can_do_is_refused(option, reason, make_trainer):
    message = (
        f"OptimizerInBackward does not work with {reason}: it steps when DDP has reduced a bucket. Use "
        "strategy='ddp' without that option."
    )
    trainer = make_trainer(callbacks=[OptimizerInBackward()], strategy=DDPStrategy(**option), devices=1)
    assert_refused(trainer, Layers(num_batches=1), message)
    leave_group()


@pytest.mark.parametrize("kind", [Decays, Zeros])
def test_zeroing_that_leaves_gradients_is_refused(kind, make_trainer):
    message = (
        "OptimizerInBackward does not work with an optimizer_zero_grad that leaves gradients or zeros: they are used "
        "up by then. Call optimizer.zero_grad() in there, or leave OptimizerInBackward out."
    )
    assert_refused(make_trainer(callbacks=[OptimizerInBackward()]), kind(num_batches=2), message)


class Wraps(Layers):
    """What its closure does to gradients is heard: none is stepped with before."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        def halve() -> Any:
            loss = closure()
            for parameter in self.parameters():
                parameter.grad.mul_(1 + parameter.ndim % 2)
            return loss

        optimizer.step(closure=halve)


class CallsFirst(Wraps):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        self.clip_gradients(optimizer, 0.01, "norm")
        optimizer.step()


class GoesPast(Wraps):
    """No hook and no clipping comes between."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.optimizer.step(closure)


class Scaled(Precision):
    def post_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        module.net[0].weight.grad.mul_(2)
        return super().post_backward(tensor, module)


VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("make", "options"),
    [(Wraps, {"accumulate_grad_batches": 2}), (CallsFirst, {}), (GoesPast, VALUE)],
    ids=["wraps", "calls it first", "goes past"],
)
def test_what_an_optimizer_step_does_around_its_closure_is_heard_and_told(make, options, same_as_baseline):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        same_as_baseline(partial(make, num_batches=4), OptimizerInBackward("two-pass"), **options)
    assert [str(one.message) for one in warned if "after the backward" in str(one.message)] == [
        "OptimizerInBackward steps after the backward, one parameter at a time, and all gradients are in memory at "
        "once, because the module's optimizer_step may use them."
    ]


@pytest.mark.filterwarnings("ignore:OptimizerInBackward steps")
@pytest.mark.parametrize("make", [Wraps, CallsFirst])
def test_gradients_that_are_taken_in_are_refused_to_what_is_around_a_closure(make, make_trainer):
    message = (
        "OptimizerInBackward(keep_gradients=False) does not work with an optimizer_step that calls its closure or "
        "wraps it, which may use gradients: those of all but the last micro-batch are used up by then. Call "
        "optimizer.step(closure=closure) with the closure that it gets, or use keep_gradients=True."
    )
    trainer = make_trainer(callbacks=[OptimizerInBackward(keep_gradients=False)], accumulate_grad_batches=2)
    assert_refused(trainer, make(num_batches=2), message, RuntimeError)


def test_a_plugin_of_your_own_has_all_gradients(make_trainer):
    trainer = make_trainer(callbacks=[OptimizerInBackward()], plugins=[Scaled()], max_epochs=1)
    with pytest.warns(UserWarning, match="in memory at once, because Scaled may use them"):
        trainer.fit(Layers(num_batches=1))


@pytest.mark.parametrize("other", [MicroBatching(2), AccumulationScheduler({0: 2})])
def test_it_tells_of_callbacks_that_use_gradients(other, make_trainer):
    message = (
        "OptimizerInBackward steps after the backward, one parameter at a time, and all gradients are in memory at "
        f"once, because {type(other).__name__} may use them."
    )
    trainer = make_trainer(callbacks=[other, OptimizerInBackward()], max_epochs=1)
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        trainer.fit(Layers(num_batches=2))


def test_it_tells_that_gradients_are_kept_in_an_accumulation(fit, caplog):
    message = (
        "OptimizerInBackward keeps gradients until the last micro-batch of each optimizer step: "
        "accumulate_grad_batches=4."
    )
    with caplog.at_level("INFO"):
        fit(partial(Layers, num_batches=2), OptimizerInBackward(), accumulate_grad_batches=4)
    assert message in caplog.messages


def test_a_backward_after_it_was_undone_under_ddp_is_an_error(one_rank):
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    steps = BackwardSteps(ddp, Clipping())
    steps.let_go()
    del steps
    message = "OptimizerInBackward was undone: wrap the module in a new DistributedDataParallel."
    with pytest.raises(RuntimeError, match=re.escape(message)):
        ddp(torch.ones(1, 2)).sum().backward()
