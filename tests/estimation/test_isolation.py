"""What an estimate leaves behind: nothing, whatever runs in it and however it ends."""

import copy
import gc
import logging
import os
import random
import signal
import sys
import warnings

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.rank_zero import WarningCache, rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from support.helpers import LitTiny, TinyCNN, TinyGPT, describe_module
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from lightning_vram import ActivationCheckpointing, AutoVRAM, LeanMixedPrecision, MicroBatching, estimate_memory
from lightning_vram.demos import ByteGPT
from lightning_vram.estimation.fake_trainer import isolated

OWNERS = (
    *(torch, torch._C, Tensor, F, nn, nn.Module, nn.init, torch.autograd, torch.optim, torch.utils, torch.accelerator),
    *(torch.cuda, torch.cuda.amp, torch.amp, torch.random, torch.nn.utils, torch.backends.cuda, torch.backends.cudnn),
    *(torch.serialization, torch.storage, torch.Generator, torch.nn.Parameter, nn.MultiheadAttention),
    *(dist, dist.distributed_c10d, dist.DeviceMesh, torch.utils.checkpoint, torch.autograd.graph),
    *(pl.Trainer, pl.LightningModule, pl.callbacks.Callback, pl.strategies.Strategy, torch.optim.Optimizer),
)
NOT_KEPT = {"_jit_internal", "__warningregistry__"}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def describe_process():
    """All that a run in a run might have changed."""
    return {
        "functions": {
            (getattr(owner, "__name__", str(owner)), name): id(value)
            for owner in OWNERS
            for name, value in vars(owner).items()
            if callable(value) and name not in NOT_KEPT
        },
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "environment": dict(os.environ),
        "loggers": {name: logging.getLogger(name).level for name in ("", "lightning.pytorch", "lightning.fabric")},
        "warnings": list(warnings.filters),
        "random": (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "threads": torch.get_num_threads(),
        "determinism": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.get_float32_matmul_precision(),
        ),
        "autograd": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_anomaly_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cpu"),
            torch.get_autocast_dtype("cuda"),
            torch.is_autocast_cache_enabled(),
        ),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "hooks": [len(hooks) for hooks in _global_hooks()],
        "modes": torch._C._len_torch_dispatch_stack() + torch.overrides._len_torch_function_stack(),
        "groups": (dist.is_initialized(), dict(dist.distributed_c10d._world.pg_names)),
        "rank": vars(rank_zero_only).get("rank"),
        "device modules": sorted(name for name in sys.modules if name == "torch.lazy"),
        "folder": sorted(set(os.listdir()) - {".hypothesis"}),  # of tests beside this one
        "default groups": dict(dist.Backend.default_device_backend_map),
    }


def _global_hooks():
    from torch.nn.modules import module

    return [value for name, value in vars(module).items() if name.startswith("_global_") and isinstance(value, dict)]


def assert_no_trace(run):
    before = describe_process()
    run()
    after = describe_process()
    for name, value in before.items():
        if isinstance(value, dict):
            changed = {key for key in value.keys() | after[name].keys() if value.get(key) != after[name].get(key)}
            assert not changed, name
        assert after[name] == value, name


def estimate(module=None, **arguments):
    if module is None:
        with isolate_rng():
            module = LitTiny(TinyGPT())
    return estimate_memory(
        module,
        [torch.zeros(4, 11, dtype=torch.int64)] * 2,
        **{"device": "rtx4090", "find_limits": False, **arguments},
    )


RUNS = {
    "plain": {},
    "deterministic": {"deterministic": True, "benchmark": True, "precision": "bf16-mixed"},
    "parts": {"callbacks": [ActivationCheckpointing(), MicroBatching(2)], "plugins": [LeanMixedPrecision("fp16")]},
    "sharded": {"strategy": "fsdp_offload"},
}


@pytest.fixture(autouse=True, scope="module")
def imported():
    """What is imported and registered once is there."""
    estimate()


@pytest.fixture
def seeded(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


@pytest.mark.slow_except("plain")
@pytest.mark.parametrize("name", RUNS)
def test_an_estimate_leaves_no_trace(name, seeded):
    parts = [one for several in ("callbacks", "plugins") for one in RUNS[name].get(several, [])]
    known = [dict(vars(one)) for one in parts]
    assert_no_trace(lambda: estimate(trainer=RUNS[name]))
    assert [vars(one) for one in parts] == known


@pytest.mark.slow_except("training_step")
@pytest.mark.parametrize("hook", ["training_step", "configure_optimizers"])
def test_one_that_fails_leaves_none(hook, seeded):
    module = LitTiny(TinyGPT())

    def fail(*_, **__):
        raise ValueError("on purpose")

    setattr(module, hook, fail)

    def run():
        with pytest.raises(ValueError, match="on purpose"):
            estimate(module)

    before = describe_module(module)
    assert_no_trace(run)
    assert describe_module(module) == before


def test_a_compiled_module_is_traced_uncompiled_and_left_alone(seeded):
    module, images = LitTiny(TinyCNN()), [torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)]
    before, weights = describe_module(module), copy.deepcopy(module.state_dict())
    compiled = pl.utilities.compile.from_compiled(torch.compile(module, backend="eager"))
    arguments = {"device": "rtx4090", "find_limits": False, "trainer": {"callbacks": [ActivationCheckpointing()]}}
    expected, found = (estimate_memory(each, images, **arguments) for each in (LitTiny(TinyCNN()), compiled))
    assert found.peak_bytes == expected.peak_bytes
    assert describe_module(module) == before
    torch.testing.assert_close(module.state_dict(), weights, rtol=0, atol=0)


def test_what_a_callback_changes_or_writes_is_undone(seeded):
    class Changes(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            os.environ["CHANGED"] = "1"
            os.environ.pop("PL_GLOBAL_SEED")
            random.random()
            logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)
            warnings.simplefilter("error")
            with open(os.path.join(trainer.log_dir, "notes.txt"), "w") as file:
                file.write("notes")

    assert_no_trace(lambda: estimate(trainer={"callbacks": [Changes()]}, run_callbacks=[Changes]))


def test_no_cache_of_warnings_is_used_up(make_trainer, monkeypatch):
    own = type("Mine", (WarningCache,), {})()
    caches = {id(one): (one, set(one)) for one in gc.get_objects() if isinstance(one, WarningCache)}

    class Says(LitTiny):  # and forgets its loss
        def training_step(self, batch, batch_idx):
            own.warn("mine")
            self.loss(batch)

    monkeypatch.setattr("lightning_vram.estimation.traced_fit._MOST_BATCHES", 2)
    monkeypatch.setattr(Closure, "warning_cache", WarningCache())
    with pytest.raises(ValueError, match="No optimizer has stepped"):
        estimate(Says(TinyGPT()))
    assert all(one == before for one, before in caches.values())
    assert not Closure.warning_cache
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        make_trainer(max_epochs=1, callbacks=[AutoVRAM()]).fit(Says(TinyGPT()))
    texts = [str(one.message) for one in seen]
    assert texts.count("mine") == 1
    assert sum("`training_step` returned `None`" in text for text in texts) == 1


@pytest.mark.slow
def test_a_fit_goes_on_around_one(make_trainer, seeded):
    seen = []

    class Nested(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            self.look(trainer, pl_module)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.look(trainer, pl_module)

        def look(self, trainer, pl_module):
            before = describe_process(), describe_module(pl_module), pl_module.trainer, trainer._results
            estimate_memory(pl_module, [torch.zeros(4, 11, dtype=torch.int64)] * 2, device="rtx4090", find_limits=False)
            after = describe_process(), describe_module(pl_module), pl_module.trainer, trainer._results
            seen.append(before == after)

    make_trainer(callbacks=[Nested()], max_epochs=1).fit(LitTiny(TinyGPT()))
    assert seen == [True] * 4


def test_a_process_that_is_connected_finds_its_groups(one_rank):
    extra = dist.new_group([0])
    mesh = init_device_mesh("cpu", (1,))
    with isolated():
        assert not dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert init_device_mesh("cpu", (1,)) != mesh
        dist.destroy_process_group()
    assert dist.get_world_size(extra) == 1
    tensor = dist.distributed_c10d._resolve_process_group(mesh.get_group().group_name)
    assert tensor is mesh.get_group()
    assert init_device_mesh("cpu", (1,)) == mesh
    total = torch.ones(2)
    dist.all_reduce(total, group=extra)
    assert total.tolist() == [1, 1]


@pytest.mark.slow
def test_sharded_estimates_within_a_connected_process(one_rank):
    assert_no_trace(lambda: estimate(trainer={"strategy": "fsdp_offload"}, devices=4))


def test_ctrl_c_is_an_interrupt_and_works_again():
    """Lightning's Trainer makes an end of the program of it, and ignores others."""

    class Interrupted(ByteGPT):
        def training_step(self, batch):
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        estimate_memory(Interrupted(num_layers=1, width=32), torch.zeros(2, 33, dtype=torch.int64), device="cpu")
    assert signal.getsignal(signal.SIGINT) is before


def test_other_ends_of_the_program_are_none_of_ctrl_c():
    with pytest.raises(SystemExit, match="3"), isolated():
        raise SystemExit(3)
