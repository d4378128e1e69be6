"""Optimizers that share no parameters step with the gradients that they would have without scaling."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import DEVICE
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_vram.techniques.mixed_precision.loss_scaling import LossScaling

SCALE = 2.0**10
INF = float("inf")


def make(*optimizers, scale=SCALE, interval=2000, **options):
    return LossScaling(GradScaler("cpu", init_scale=scale, growth_interval=interval), optimizers, **options)


def weights(*values, dtype=torch.float32):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def sgd(*parameters, lr=1.0, **kwargs):
    return torch.optim.SGD(parameters, lr=lr, **kwargs)


def backward(scaling, parameter, gradient):
    """Add ``gradient`` to that of ``parameter``, by way of a scaled loss."""
    scaling.scale((parameter * gradient).sum()).backward()


def scale_of(scaling):
    return scaling.scaler.get_scale()


SCRIPTS = {
    "an overflow skips the step": (
        [INF, "step", "update", "update", "zero", 0.25, "step", "update"],
        -0.25,
        1 / 2,
        [1, 0],
    ),
    "no step is taken with what overflowed": (
        [INF, "unscale", "update", "zero", INF, "unscale", "update", "zero", 1.0, "unscale", "step", "update"],
        -1,
        1 / 4,
        [0],
    ),
    "clipping sees unscaled gradients": ([3.0, "unscale", "unscale", "clip", "step"], -2, 1, []),
    "clipping between the backwards of a step": ([1.0, "unscale", "clip", 0.5, "unscale", "clip", "step"], -1.5, 1, []),
    "clipping hid an overflow": (
        [INF, "unscale", "clip", 1.0, "step", "zero", 1.0, "step", "update"],
        -1,
        1 / 4,  # what waits is nan from then on
        [1, 0],
    ),
    "gradients that overflowed are thrown away": ([INF, "unscale", "zero", 1.0, "step"], -1, 1 / 2, []),
}


@pytest.mark.parametrize(("script", "weight", "scale", "skipped"), SCRIPTS.values(), ids=SCRIPTS)
def test_of_one_optimizer(script, weight, scale, skipped):
    """Numbers are gradients of a backward; clipping is to 2."""
    parameter, seen = weights(0.0), []
    optimizer = sgd(parameter)
    scaling = make(optimizer, on_update=seen.append)
    calls = {
        "step": lambda: scaling.step(optimizer),
        "update": scaling.update,
        "zero": optimizer.zero_grad,
        "unscale": lambda: scaling.unscale(optimizer),
        "clip": lambda: nn.utils.clip_grad_value_([parameter], 2.0),
    }
    for one in script:
        if isinstance(one, str):
            calls[one]()
        else:
            backward(scaling, parameter, one)
    assert parameter.item() == weight
    assert scale_of(scaling) == SCALE * scale
    assert seen == skipped


def test_a_run_begins_anew_after_one_that_was_interrupted():
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    backward(scaling, parameter, INF)
    scaling.step(optimizer)
    other = LossScaling(scaling.scaler, [optimizer])
    other.update()
    assert scale_of(other) == SCALE


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_optimizers_step_as_without_scaling_and_stay_as_they_are_when_skipped(optimizer_class):
    def train(gradients, scaled):
        parameter = weights(1.0, -2.0)
        optimizer = optimizer_class([parameter], lr=0.1, fused=True)
        scaling = make(optimizer)
        for gradient in gradients:
            optimizer.zero_grad()
            loss = (parameter * gradient).sum()
            (scaling.scale(loss) if scaled else loss).backward()
            if scaled:
                scaling.unscale(optimizer)
            nn.utils.clip_grad_norm_([parameter], 0.5)
            scaling.step(optimizer) if scaled else optimizer.step()
        return parameter, optimizer.state_dict()["state"]

    plain, plain_state = train((1.0, 2.0), scaled=False)
    fused, state = train((1.0, INF, 2.0, INF), scaled=True)
    assert torch.equal(fused, plain)
    for name, value in plain_state.get(0, {}).items():
        assert value is None or torch.equal(torch.as_tensor(state[0][name]), torch.as_tensor(value))


def test_gradients_that_wait_are_unscaled_when_scaling_stops_and_dropped_where_they_overflowed():
    ours = [weights(0.0), weights(0.0)]
    scaling = make(*map(sgd, ours))
    scaling.scale(ours[0].sum() + (ours[1] * INF).sum()).backward()
    scaling.stop()
    assert ours[0].grad.item() == 1
    assert ours[1].grad is None


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("backward"), st.sampled_from([0.5, 1.0, -3.0])),
        st.tuples(st.sampled_from(["step", "step in place", "unscale", "zero"]), st.integers(0, 1)),
        st.tuples(st.sampled_from(["update", "overflow"]), st.none()),
    ),
    max_size=20,
)


def run(operations, scaling, optimizers, parameters):
    """Do as told, without scaling if there is none; an overflow is that of a third optimizer."""
    third = weights(0.0, dtype=torch.float64)
    overflowing = sgd(third)
    for name, argument in operations:
        if name == "backward":
            loss = sum((parameter.square() * argument + parameter).sum() for parameter in parameters)
            (scaling.scale(loss) if scaling else loss).backward()
        elif name == "zero":
            optimizers[argument].zero_grad()
        elif name.startswith("step"):
            scaling.step(optimizers[argument]) if scaling else optimizers[argument].step()
            optimizers[argument].zero_grad(set_to_none=name == "step")
        elif scaling and name == "overflow":
            third.grad = torch.full_like(third, INF)
            scaling.step(overflowing)
        elif scaling and name == "update":
            scaling.update()
        elif scaling:
            scaling.unscale(optimizers[argument])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(OPERATIONS)
def test_any_program_that_zeroes_gradients_after_a_step_trains_as_without_scaling(operations):
    results = []
    for is_scaled in (True, False):
        parameters = [weights(value, 1.0, dtype=torch.float64) for value in (0.5, 0.25)]
        optimizers = [sgd(parameter, lr=0.125) for parameter in parameters]
        scaling = make(*optimizers, interval=1) if is_scaled else None
        begin = [("backward", 1.0)]  # the scale exists from the first loss on
        run(begin + operations, scaling, optimizers, parameters)
        if scaling:
            scaling.update()
            scaling.stop()
        results.append([(parameter, parameter.grad) for parameter in parameters])
    for (parameter, gradient), (expected, expected_gradient) in zip(*results, strict=True):
        assert torch.equal(parameter, expected)
        assert (gradient is None) == (expected_gradient is None)
        assert gradient is None or torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("gradient", [1.0, INF, None], ids=["finite", "inf", "none"])
@pytest.mark.parametrize("elsewhere", [0.0, 1.0])
def test_the_ranks_agree_also_where_one_has_no_gradient(gradient, elsewhere):
    parameter, other, seen = weights(1.0), weights(1.0), []
    optimizer = sgd(parameter)
    scaling = make(optimizer, interval=1, over_ranks=lambda found_inf: seen.append(found_inf) or found_inf + elsewhere)
    backward(scaling, other if gradient is None else parameter, gradient or 1.0)
    scaling.step(optimizer)
    overflowed = elsewhere > 0 or gradient == INF
    assert scaling.num_overflowed == overflowed
    (found_inf,) = seen
    assert (found_inf.item(), found_inf.dtype, found_inf.shape) == (gradient == INF, torch.float32, ())
    assert parameter.item() == (1 if overflowed or gradient is None else 0)
    scaling.update()
    assert scale_of(scaling) == (SCALE / 2 if overflowed else SCALE * 2)


def train_on_one_of_two_ranks(rank, path):
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    plain, whole = weights(1.0), nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    sharded = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = sgd(plain, whole, sharded)
    scaling = make(optimizer)
    for has_overflow in (True, False):
        optimizer.zero_grad()
        factor = distribute_tensor(torch.tensor([1.0, 1.0, 1.0, INF if has_overflow else 1.0]), mesh, [Shard(0)])
        scaling.scale((sharded * factor).sum().full_tensor() + whole.sum().full_tensor() + plain.sum()).backward()
        scaling.step(optimizer)
        assert scaling.num_overflowed == has_overflow  # only the shard of rank 1 has the inf
        scaling.update()
        assert scale_of(scaling) == SCALE / 2
        expected = 1.0 if has_overflow else 0.0
        for parameter in (plain, whole.to_local(), sharded.to_local()):
            assert parameter.tolist() == [expected] * parameter.numel()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_an_inf_in_one_shard_skips_the_step_on_all_ranks(tmp_path):
    mp.start_processes(train_on_one_of_two_ranks, (str(tmp_path),), nprocs=2, start_method="fork")


@pytest.mark.device
def test_gradients_on_the_host_are_unscaled_beside_those_on_the_device():
    here, there = weights(1.0), nn.Parameter(torch.ones(1, device=DEVICE))
    optimizer = sgd(here, there)
    scaling = LossScaling(GradScaler(DEVICE, init_scale=SCALE), [optimizer])
    for gradient in (0.5, INF):
        optimizer.zero_grad()
        scaling.scale(there.sum() + (here * gradient).sum().to(DEVICE)).backward()
        scaling.step(optimizer)
        assert scaling.num_overflowed == (gradient == INF)
        scaling.update()
    assert here.item() == 0.5
    assert there.item() == 0
    assert scale_of(scaling) == SCALE / 2
