"""Every optimizer steps with the gradients it would have without scaling, whatever the scale does meanwhile."""

import copy
import gc
import pickle
import weakref

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

from lightning_vram.techniques.mixed_precision.loss_scaling import LossScaling, StepResult, unscale_part

SCALE = 2.0**10
INF = float("inf")
UNSCALED = r"^unscale_\(\) has already been called on this optimizer since the last update\(\)\.$"  # GradScaler


def make(*optimizers, scale=SCALE, interval=2000):
    return LossScaling(GradScaler("cpu", init_scale=scale, growth_interval=interval), optimizers)


def weights(*values, dtype=torch.float32):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def sgd(*parameters, lr=1.0, **kwargs):
    return torch.optim.SGD(parameters, lr=lr, **kwargs)


def backward(scaling, parameter, gradient):
    """Add ``gradient`` to that of ``parameter``, by way of a scaled loss."""
    scaling.scale((parameter * gradient).sum()).backward()


# one optimizer


def test_the_loss_and_its_gradients_are_scaled():
    parameter = weights(1.0, 2.0)
    scaling = make(scale=8.0)
    loss = scaling.scale(parameter.sum())
    loss.backward()
    assert loss.item() == 24
    assert parameter.grad.tolist() == [8, 8]
    assert scaling.scale_value == 8


def test_the_step_is_that_of_the_unscaled_gradient():
    parameter = weights(1.0, 2.0)
    optimizer = sgd(parameter)
    scaling = make()
    backward(scaling, parameter, 0.5)
    assert scaling.step(optimizer) == StepResult(overflowed=False, output=None)
    assert parameter.tolist() == [0.5, 1.5]
    assert parameter.grad.tolist() == [0.5, 0.5]
    assert scaling.update() is False


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


def test_a_float16_network_keeps_gradients_that_would_round_to_zero():
    def gradient(scaling):
        parameter = weights(1.0)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.linear(torch.full((1, 1), 2.0**-14), parameter[None]).sum() * 2.0**-12
        scaling.scale(loss).backward()
        scaling.unscale(sgd(parameter))
        return parameter.grad.item()

    assert gradient(LossScaling(GradScaler("cpu", enabled=False))) == 0
    assert gradient(make(scale=2.0**14)) == 2.0**-26


def test_an_overflow_skips_the_step_and_halves_the_scale():
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    backward(scaling, parameter, INF)
    assert scaling.step(optimizer) == StepResult(overflowed=True, output=None)
    assert parameter.item() == 1
    assert scaling.update() is True
    assert scaling.scale_value == SCALE / 2
    optimizer.zero_grad()
    backward(scaling, parameter, 0.25)
    assert not scaling.step(optimizer).overflowed
    assert parameter.item() == 0.75
    assert scaling.update() is False


def test_the_scale_grows_after_so_many_updates_without_overflow():
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer, interval=2)
    scales = []
    for gradient in (1.0, 1.0, 1.0, INF, 1.0, 1.0):
        optimizer.zero_grad()
        backward(scaling, parameter, gradient)
        scaling.step(optimizer)
        scaling.update()
        scales.append(scaling.scale_value / SCALE)
    assert scales == [1, 2, 2, 1, 1, 2]


def test_an_update_without_a_step_does_nothing():
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer, interval=1)
    assert scaling.update() is False
    backward(scaling, parameter, INF)
    scaling.unscale(optimizer)
    assert scaling.update() is False
    assert scaling.scale_value == SCALE
    scaling.step(optimizer)
    assert scaling.update() is True
    assert scaling.update() is False
    assert scaling.scale_value == SCALE / 2


def test_nothing_is_unscaled_before_anything_was_scaled():
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    parameter.grad = torch.tensor([0.5])
    scaling = make(optimizer, interval=1)
    scaling.unscale(optimizer)
    assert not scaling.step(optimizer).overflowed
    assert parameter.item() == 0.5
    assert parameter.grad.item() == 0.5
    scaling.update()
    assert scaling.scale_value == SCALE * 2
    assert not scaling.step(optimizer).overflowed
    assert parameter.item() == 0
    backward(scaling, parameter, 1.0)  # on top of the 0.5 from before
    scaling.step(optimizer)
    assert parameter.item() == -1.5


def test_gradients_from_before_the_first_scaled_loss_count():
    parameter = weights(0.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    parameter.sum().backward()
    backward(scaling, parameter, 2.0)
    scaling.step(optimizer)
    assert parameter.item() == -3


def test_arguments_reach_the_optimizer_and_its_output_comes_back():
    class Verbose(torch.optim.SGD):
        def step(self, closure=None, *, note):
            assert closure is None
            super().step()
            return note

    parameter = weights(1.0)
    optimizer = Verbose([parameter], lr=1.0)
    scaling = make(optimizer)
    backward(scaling, parameter, 1.0)
    assert scaling.step(optimizer, note="there", closure=None) == StepResult(overflowed=False, output="there")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_closure_is_refused(enabled):
    scaling = LossScaling(GradScaler("cpu", enabled=enabled))
    message = (
        r"^LossScaling\.step\(closure\) is not possible: run the closure first, then step without it\. Optimizers that "
        r"call it several times, such as LBFGS, need a run without loss scaling\.$"
    )
    with pytest.raises(ValueError, match=message):
        scaling.step(sgd(weights(1.0)), closure=lambda: None)


# kinds of optimizers and gradients


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_optimizers_step_as_others_and_stay_as_they_are_when_skipped(optimizer_class):
    def train(fused, scaling, gradients):
        parameter = weights(1.0, -2.0)
        optimizer = optimizer_class([parameter], lr=0.1, fused=fused)
        knows_scales = fused and (optimizer_class is not torch.optim.Adagrad or torch.__version__ >= (2, 12))
        assert hasattr(optimizer, "_step_supports_amp_scaling") is knows_scales
        for gradient in gradients:
            optimizer.zero_grad()
            backward(scaling, parameter, gradient)
            scaling.unscale(optimizer)
            nn.utils.clip_grad_norm_([parameter], 0.5)
            scaling.step(optimizer)
            scaling.update()
        return parameter, optimizer.state_dict()["state"]

    plain, plain_state = train(False, LossScaling(GradScaler("cpu", enabled=False)), (1.0, 2.0))
    fused, state = train(True, make(), (1.0, INF, 2.0, INF))
    assert torch.allclose(fused, plain, rtol=1e-6)
    assert [float(kept["step"]) for kept in state.values() if "step" in kept] == [
        float(kept["step"]) for kept in plain_state.values() if "step" in kept
    ]
    fused_only, fused_state = train(True, LossScaling(GradScaler("cpu", enabled=False)), (1.0, 2.0))
    assert torch.equal(fused, fused_only)
    for name, value in fused_state.get(0, {}).items():
        assert value is None or torch.equal(torch.as_tensor(state[0][name]), torch.as_tensor(value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_other_types_are_unscaled(dtype):
    parameter = weights(1.0, dtype=dtype)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    backward(scaling, parameter, 0.5)
    scaling.step(optimizer)
    assert parameter.tolist() == [0.5]


def test_float16_parameters_are_refused():
    parameter = weights(1.0, dtype=torch.float16)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    backward(scaling, parameter, 0.5)
    message = (
        r"^The gradients of SGD cannot be unscaled, as parameters are float16: keep them in float32, which autocast "
        r"casts, or use bfloat16\.$"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            scaling.unscale(optimizer)
    assert parameter.grad.item() == 0.5 * SCALE


def test_another_error_of_the_scaler_is_its_own():
    class Strict(GradScaler):
        def _unscale_grads_(self, *args):
            raise ValueError("not today")

    parameter = weights(1.0)
    scaling = LossScaling(Strict("cpu"))
    backward(scaling, parameter, 0.5)
    with pytest.raises(ValueError, match=r"^not today$"):
        scaling.step(sgd(parameter))


def test_sparse_gradients_are_unscaled_and_follow_the_scale():
    embedding, other = nn.Embedding.from_pretrained(torch.zeros(4, 2), freeze=False, sparse=True), weights(1.0)
    optimizer, moving = sgd(*embedding.parameters()), sgd(other)
    scaling = make(optimizer, moving, interval=1)
    scaling.scale(embedding(torch.tensor([1, 1, 3])).sum() + other.sum()).backward()
    scaling.step(moving)
    scaling.update()
    scaling.step(optimizer)
    assert embedding.weight.tolist() == [[0, 0], [-2, -2], [0, 0], [-1, -1]]


# several steps and optimizers


@pytest.mark.parametrize(
    ("gradients", "expected", "scales"),
    [((1.0, 0.5), (0.5, 0.5), (2, 4)), ((INF, 0.5), (1.5, 0.5), (0.5, 1))],
    ids=["grows", "shrinks"],
)
def test_two_optimizers_step_after_one_backward_and_the_scale_moves_once(gradients, expected, scales):
    one, two = weights(2.0), weights(2.0)
    optimizers = [sgd(one), sgd(two)]
    scaling = make(*optimizers, interval=1)
    for gradient, scale in zip(gradients, scales, strict=True):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaling.scale((one * gradient).sum() + (two * 0.75).sum()).backward()
        assert scaling.step(optimizers[0]).overflowed is (gradient == INF)
        assert not scaling.step(optimizers[1]).overflowed
        assert scaling.update() is (gradient == INF)
        assert scaling.scale_value == SCALE * scale
    assert (one.item(), two.item()) == expected


def test_the_same_optimizer_may_step_several_times_before_an_update():
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    for gradient in (0.5, INF, 0.25):
        optimizer.zero_grad()
        backward(scaling, parameter, gradient)
        assert scaling.step(optimizer).overflowed is (gradient == INF)
    assert parameter.item() == 0.25
    assert scaling.update() is True
    assert scaling.scale_value == SCALE / 2


def test_gradients_that_are_not_zeroed_after_a_step_go_on_growing():
    parameter = weights(0.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer, interval=1)
    for _ in range(3):
        backward(scaling, parameter, 1.0)
        scaling.step(optimizer)
        scaling.update()
    assert parameter.item() == -(1 + 2 + 3)


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


def test_an_overflow_that_clipping_hid_still_skips_the_step():
    parameter = weights(0.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    for gradient in (INF, 1.0):
        backward(scaling, parameter, gradient)
        scaling.unscale(optimizer)
        nn.utils.clip_grad_value_([parameter], 2.0)
    assert scaling.step(optimizer).overflowed
    optimizer.zero_grad(set_to_none=False)
    backward(scaling, parameter, 1.0)
    assert not scaling.step(optimizer).overflowed


def test_an_overflow_in_gradients_that_were_thrown_away_skips_nothing():
    parameter = weights(0.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    backward(scaling, parameter, INF)
    scaling.unscale(optimizer)
    optimizer.zero_grad()
    backward(scaling, parameter, 1.0)
    assert not scaling.step(optimizer).overflowed
    assert parameter.item() == -1


def test_overflowed_gradients_are_no_better_at_the_second_try():
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    backward(scaling, parameter, INF)
    assert scaling.step(optimizer).overflowed
    assert scaling.step(optimizer).overflowed
    assert parameter.item() == 1


@pytest.mark.parametrize("moving_gradient", [1.0, INF], ids=["grows", "shrinks"])
def test_gradients_that_wait_for_their_step_follow_the_scale(moving_gradient):
    waiting, moving = weights(0.0), weights(0.0)
    late, often = sgd(waiting), sgd(moving)
    scaling = make(late, often, interval=1)
    for gradient in (1.0, 2.0):
        often.zero_grad()
        scaling.scale((waiting * gradient).sum() + (moving * moving_gradient).sum()).backward()
        scaling.step(often)
        scaling.update()
    scaling.step(late)
    assert waiting.item() == -3


def test_gradients_that_were_unscaled_wait_as_they_are():
    waiting, moving = weights(0.0), weights(0.0)
    late, often = sgd(waiting), sgd(moving)
    scaling = make(late, often, interval=1)
    scaling.scale((waiting * 3).sum() + moving.sum()).backward()
    scaling.unscale(late)
    scaling.step(often)
    scaling.update()
    assert scaling.scale_value == SCALE * 2
    assert waiting.grad.item() == 3
    with pytest.raises(RuntimeError, match=UNSCALED):
        scaling.scaler.unscale_(late)
    scaling.step(late)
    assert waiting.item() == -3


def test_an_overflow_that_was_seen_before_an_update_counts_in_the_next():
    waiting, moving = weights(0.0), weights(0.0)
    late, often = sgd(waiting), sgd(moving)
    scaling = make(late, often)
    scaling.scale((waiting * INF).sum() + moving.sum()).backward()
    scaling.unscale(late)
    scaling.step(often)
    assert scaling.update() is False
    assert scaling.step(late).overflowed
    assert scaling.update() is True


def test_gradients_of_shared_parameters_follow_the_scale_once():
    shared, moving = weights(0.0), weights(0.0)
    late, later, often = sgd(shared), sgd(shared), sgd(moving)
    scaling = make(late, later, often, interval=1)
    scaling.scale((shared * 1.5).sum() + moving.sum()).backward()
    scaling.step(often)
    scaling.update()
    assert shared.grad.item() == 1.5 * SCALE * 2
    for optimizer in (late, later):
        scaling.step(optimizer)
        assert shared.grad.item() == 1.5
    assert shared.item() == -3


def test_an_overflow_in_a_shared_parameter_skips_all_its_optimizers():
    shared, own = weights(0.0), weights(0.0)
    one, two = sgd(shared), sgd(own, shared)
    scaling = make(one, two)
    scaling.scale((shared * INF).sum() + own.sum()).backward()
    scaling.unscale(one)
    nn.utils.clip_grad_value_([shared], 1.0)
    assert scaling.step(two).overflowed
    assert scaling.step(one).overflowed
    assert own.grad.item() == 1
    assert own.item() == shared.item() == 0


def test_an_optimizer_that_was_not_announced_is_watched_from_its_first_step_on():
    waiting, moving = weights(0.0), weights(0.0)
    late, often = sgd(waiting), sgd(moving)
    scaling = make(interval=1)
    for round_ in range(3):
        often.zero_grad()
        scaling.scale(waiting.sum() + moving.sum()).backward()
        scaling.step(often)
        if round_ != 1:
            scaling.step(late)
            late.zero_grad()
        scaling.update()
    assert waiting.item() == -3


def test_a_new_run_does_not_count_the_steps_of_the_one_before():
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    backward(scaling, parameter, INF)
    scaling.step(optimizer)
    backward(scaling, parameter, 1.0)
    scaling.unscale(optimizer)
    scaling.watch([sgd(weights(1.0))])
    assert scaling.update() is False
    assert scaling.scale_value == SCALE
    scaling.scaler.unscale_(optimizer)  # nobody remembers that it was


def test_optimizers_are_not_kept_alive():
    scaling = make()
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    backward(scaling, parameter, 1.0)
    scaling.step(optimizer)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    "moment", ["before another steps", "before the update", "before a backward", "before the step"]
)
def test_what_users_unscale_by_hand_is_not_unscaled_again(moment):
    one, two = weights(0.0), weights(0.0)
    optimizer, other = sgd(one), sgd(two)
    scaling = make(optimizer, other, interval=1)
    scaling.scale((one * 3).sum() + two.sum()).backward()
    for name, action in [
        ("before another steps", lambda: scaling.step(other)),
        ("before the update", scaling.update),
        ("before a backward", lambda: backward(scaling, one, 1.0)),
        ("before the step", lambda: scaling.step(optimizer)),
    ]:
        if name == moment:
            scaling.scaler.unscale_(optimizer)
            assert one.grad.item() == (4 if moment == "before the step" else 3)
        action()
    assert one.grad.item() == 4
    assert one.item() == -4


def test_what_users_unscale_by_hand_may_overflow():
    parameter = weights(0.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    backward(scaling, parameter, INF)
    scaling.scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_([parameter], 1.0)
    assert scaling.step(optimizer).overflowed
    assert scaling.update() is True


def test_what_is_unscaled_already_users_cannot_unscale_again():
    parameter = weights(0.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    backward(scaling, parameter, 3.0)
    scaling.unscale(optimizer)
    with pytest.raises(RuntimeError, match=UNSCALED):
        scaling.scaler.unscale_(optimizer)
    assert parameter.grad.item() == 3


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("backward"), st.sampled_from([0.5, 1.0, -3.0])),
        st.tuples(st.sampled_from(["step", "unscale", "zero", "zero in place"]), st.integers(0, 2)),
        st.tuples(st.sampled_from(["update", "overflow"]), st.none()),
    ),
    max_size=20,
)


def run(operations, scaling, optimizers, parameters):
    """Do as told; an overflow is that of a fourth optimizer, which moves the scale and nothing else."""
    fourth = weights(0.0, dtype=torch.float64)
    overflowing = sgd(fourth)
    for name, argument in operations:
        if name == "backward":
            loss = sum((parameter.square() * argument + parameter).sum() for parameter in parameters)
            scaling.scale(loss).backward()
        elif name == "overflow":
            fourth.grad = torch.full_like(fourth, INF)
            scaling.step(overflowing)
            fourth.grad = None
        elif name == "update":
            scaling.update()
        elif name.startswith("zero"):
            optimizers[argument].zero_grad(set_to_none=name == "zero")
        else:
            getattr(scaling, name)(optimizers[argument])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(OPERATIONS)
def test_any_program_trains_as_without_scaling(operations):
    results = []
    for enabled in (True, False):
        parameters = [weights(value, 1.0, dtype=torch.float64) for value in (0.5, 0.25, -1.0)]
        # The third parameter has two optimizers.
        optimizers = [sgd(parameters[0], parameters[2], lr=0.125), sgd(parameters[1]), sgd(parameters[2], lr=0.25)]
        scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=1, enabled=enabled)
        scaling = LossScaling(scaler, optimizers)
        run(operations, scaling, optimizers, parameters)
        for optimizer in optimizers:
            scaling.unscale(optimizer)
        results.append([(parameter, parameter.grad) for parameter in parameters])
    for (parameter, gradient), (expected, expected_gradient) in zip(*results, strict=True):
        assert torch.equal(parameter, expected)
        assert (gradient is None) == (expected_gradient is None)
        assert gradient is None or torch.equal(gradient, expected_gradient)


# several ranks


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
    scaling = make(optimizer, interval=1)
    backward(scaling, other if gradient is None else parameter, gradient or 1.0)
    result = scaling.step(optimizer, found_here_and(elsewhere, seen))
    overflowed = elsewhere > 0 or gradient == INF
    assert result.overflowed is overflowed
    assert seen == [(float(gradient == INF), torch.float32, ())]
    assert parameter.item() == (1 if overflowed or gradient is None else 0)
    assert scaling.update() is overflowed
    assert scaling.scale_value == (SCALE / 2 if overflowed else SCALE * 2)


def test_a_rank_without_a_loss_follows_the_scale_of_the_others():
    parameter, seen = weights(1.0), []
    optimizer = sgd(parameter)
    parameter.grad = torch.tensor([0.5])
    scaling = make(optimizer)
    assert scaling.step(optimizer, found_here_and(1.0, seen)).overflowed
    assert seen == [(0.0, torch.float32, ())]
    assert scaling.update() is True
    assert scaling.scale_value == SCALE / 2
    assert not scaling.step(optimizer).overflowed  # its gradient was never scaled
    assert parameter.item() == 0.5


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
        assert scaling.step(optimizer).overflowed is has_overflow  # only the shard of rank 1 has the inf
        assert scaling.update() is has_overflow
        assert scaling.scale_value == SCALE / 2
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
        assert scaling.step(optimizer).overflowed is (gradient == INF)
        scaling.update()
    assert here.item() == 0.5
    assert there.item() == 0
    assert scaling.scale_value == SCALE / 2


class OnDevice(torch.Tensor):
    """A number whose copy to the host is not there yet, unless one waits for it. Made by :func:`on_device`."""

    number: float

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return torch.tensor(float("nan") if kwargs.get("non_blocking") else args[0].number)
        return on_device(func(*(torch.tensor(a.number) if isinstance(a, cls) else a for a in args), **kwargs).item())


def on_device(number):
    tensor = torch.Tensor._make_wrapper_subclass(OnDevice, (), dtype=torch.float32, device="meta")
    tensor.number = number
    return tensor


@pytest.mark.parametrize(("gradient", "has_inf"), [(12.0, False), (INF, True)])
def test_gradients_on_the_host_wait_for_the_scale_from_the_device(gradient, has_inf, monkeypatch):
    monkeypatch.setattr(
        torch,
        "full",
        lambda *args, device, **kwargs: on_device(args[1]) if device.type == "meta" else torch.tensor(args[1]),
    )
    parameter = weights(1.0)
    parameter.grad = torch.tensor([gradient])
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scale = scaler._scale = on_device(8.0)
    (check,) = unscale_part(scaler, sgd(parameter), [parameter]).values()
    assert parameter.grad.item() == gradient / 8
    assert check.item() == has_inf
    assert scaler._scale is scale


# state


def test_the_state_is_that_of_the_scaler():
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer, interval=3)
    backward(scaling, parameter, 1.0)
    scaling.step(optimizer)
    scaling.update()
    state = scaling.state_dict()
    assert state == scaling.scaler.state_dict()
    assert state["scale"] == SCALE
    assert state["_growth_tracker"] == 1
    other = make(scale=2.0)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert other.scale_value == SCALE


def test_gradients_that_wait_follow_a_loaded_scale():
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    backward(scaling, parameter, 0.5)
    scaling.load_state_dict(make(scale=8.0).state_dict())
    assert parameter.grad.item() == 0.5 * 8
    scaling.step(optimizer)
    assert parameter.item() == 0.5


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda scaling: pickle.loads(pickle.dumps(scaling))])
@pytest.mark.parametrize("moment", ["start", "backward", "unscale", "step", "update"])
def test_a_copy_at_any_moment_has_the_scale_and_trains_on(duplicate, moment):
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer, interval=1)
    moments = ["backward", "unscale", "step", "update"]
    for name in moments[: moments.index(moment) + 1] if moment != "start" else []:
        if name == "backward":
            backward(scaling, parameter, 1.0)
        else:
            getattr(scaling, name)(*([optimizer] if name != "update" else []))
    state = scaling.state_dict()
    other = duplicate(scaling)
    assert other.state_dict() == state
    assert other.update() is False
    again = weights(1.0)
    optimizer_again = sgd(again)
    backward(other, again, 0.5)
    assert not other.step(optimizer_again).overflowed
    assert again.item() == 0.5
    assert scaling.state_dict() == state
    if moment == "unscale":  # the original goes on
        scaling.step(optimizer)
        assert parameter.item() == 0


def test_a_scaler_that_is_shared_stays_shared_in_a_copy():
    scaling = make()
    both = copy.deepcopy([scaling, scaling.scaler])
    assert both[0].scaler is both[1]
    assert both[1] is not scaling.scaler


def test_the_scaler_itself_can_be_pickled_after_a_step():
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    scaling = make(optimizer)
    backward(scaling, parameter, 1.0)
    scaling.step(optimizer)
    assert pickle.loads(pickle.dumps(scaling.scaler)).get_scale() == SCALE


def test_a_disabled_scaler_passes_everything_through():
    parameter = weights(1.0)
    optimizer = sgd(parameter)
    scaling = LossScaling(GradScaler("cpu", enabled=False), [optimizer])
    loss = parameter.sum()
    assert scaling.scale(loss) is loss
    loss.backward()
    scaling.unscale(optimizer)
    assert scaling.step(optimizer, found_here_and(1.0, [])) == StepResult(overflowed=False, output=None)
    assert parameter.item() == 0
    assert scaling.update() is False
    assert scaling.scale_value == 1
    assert scaling.state_dict() == {}
    scaling.load_state_dict({})
    assert pickle.loads(pickle.dumps(scaling)).scale_value == 1


def test_gradients_that_wait_are_unscaled_at_the_end_and_dropped_where_they_overflowed():
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    scaling = LossScaling(torch.amp.GradScaler("cpu", init_scale=8.0), optimizers)
    scaling.scale(weights[0].sum() + (weights[1] * float("inf")).sum()).backward()
    scaling.end()
    assert torch.equal(weights[0].grad, torch.ones(2))
    assert weights[1].grad is None
