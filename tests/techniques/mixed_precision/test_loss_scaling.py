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


def test_clipping_sees_unscaled_gradients_and_the_step_takes_what_it_left():
    parameter = weights(1.0, 1.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    backward(scaling, parameter, torch.tensor([3.0, 4.0]))
    scaling.unscale(optimizer)
    scaling.unscale(optimizer)
    assert nn.utils.clip_grad_norm_([parameter], 2.5).item() == 5
    scaling.step(optimizer)
    assert parameter.tolist() == pytest.approx([-0.5, -1.0], rel=1e-5)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    parameter, skipped = weights(1.0), []
    optimizer = sgd(parameter)
    scaling = make(optimizer, on_update=skipped.append)
    backward(scaling, parameter, INF)
    assert scaling.step(optimizer) is None
    assert parameter.item() == 1
    assert scaling.num_overflowed == 1
    scaling.update()
    scaling.update()  # of no step
    assert scaling.num_overflowed == 0
    assert scale_of(scaling) == SCALE / 2
    optimizer.zero_grad()
    backward(scaling, parameter, 0.25)
    scaling.step(optimizer)
    scaling.update()
    assert parameter.item() == 0.75
    assert skipped == [1, 0]


def test_the_scale_falls_where_the_user_takes_no_step_with_gradients_that_overflowed():
    parameter, skipped = weights(0.0), []
    optimizer = sgd(parameter)
    scaling = make(optimizer, on_update=skipped.append)
    for gradient in (INF, INF, 1.0):
        optimizer.zero_grad()
        backward(scaling, parameter, gradient)
        scaling.unscale(optimizer)
        if parameter.grad.isfinite():
            scaling.step(optimizer)
        scaling.update()
    assert parameter.item() == -1
    assert scale_of(scaling) == SCALE / 4
    assert skipped == [0]


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


def test_sparse_gradients_are_unscaled_and_follow_the_scale():
    embedding, other = nn.Embedding.from_pretrained(torch.zeros(4, 2), freeze=False, sparse=True), weights(1.0)
    optimizer, moving = sgd(*embedding.parameters()), sgd(other)
    scaling = make(optimizer, moving, interval=1)
    scaling.scale(embedding(torch.tensor([1, 1, 3])).sum() + other.sum()).backward()
    scaling.step(moving)
    scaling.update()
    scaling.step(optimizer)
    assert embedding.weight.tolist() == [[0, 0], [-2, -2], [0, 0], [-1, -1]]


def test_gradients_may_be_clipped_between_the_backwards_of_one_step():
    parameter = weights(0.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    for _ in range(2):
        backward(scaling, parameter, 3.0)
        scaling.unscale(optimizer)
        nn.utils.clip_grad_value_([parameter], 2.0)
        assert parameter.grad.item() == 2
    scaling.step(optimizer)
    assert parameter.item() == -2


def test_an_overflow_that_clipping_hid_still_skips_the_step_after_another_backward():
    one, two = weights(0.0), weights(0.0)
    first, second = sgd(one), sgd(two)
    scaling = make(first, second)
    for parameter, optimizer, gradient in ((one, first, INF), (two, second, 1.0)):
        backward(scaling, parameter, gradient)
        scaling.unscale(optimizer)
        nn.utils.clip_grad_value_([parameter], 2.0)
    for optimizer in (first, second):
        scaling.step(optimizer)
    assert (one.item(), two.item()) == (0, -1)
    first.zero_grad()
    backward(scaling, one, 1.0)
    scaling.step(first)
    assert one.item() == -1


def test_an_overflow_in_gradients_that_were_thrown_away_skips_nothing():
    parameter = weights(0.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    backward(scaling, parameter, INF)
    scaling.unscale(optimizer)
    optimizer.zero_grad()
    backward(scaling, parameter, 1.0)
    scaling.step(optimizer)
    assert parameter.item() == -1


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


def found_here_and(elsewhere, seen):
    def over_ranks(found_inf):
        seen.append((found_inf.item(), found_inf.dtype, found_inf.shape))
        return found_inf + elsewhere

    return over_ranks


@pytest.mark.parametrize("gradient", [1.0, INF, None], ids=["finite", "inf", "none"])
@pytest.mark.parametrize("elsewhere", [0.0, 1.0])
def test_the_ranks_agree_also_where_one_has_no_gradient(gradient, elsewhere):
    parameter, other, seen = weights(1.0), weights(1.0), []
    optimizer = sgd(parameter)
    scaling = make(optimizer, interval=1, over_ranks=found_here_and(elsewhere, seen))
    backward(scaling, other if gradient is None else parameter, gradient or 1.0)
    scaling.step(optimizer)
    overflowed = elsewhere > 0 or gradient == INF
    assert scaling.num_overflowed == overflowed
    assert seen == [(float(gradient == INF), torch.float32, ())]
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
