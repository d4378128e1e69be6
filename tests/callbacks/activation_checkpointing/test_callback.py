"""ActivationCheckpointing: when it applies, what it says, what it refuses."""

import copy
import os
import re
from collections import UserDict

import pytest
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.devices import ACCELERATOR, DEVICE
from support.helpers import LateTiny, LitManual, LitTiny, TinyCNN, TinyGPT, assert_equal_weights, describe_module
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_vram import ActivationCheckpointing, SavePolicy
from lightning_vram.callbacks.activation_checkpointing.callback import _sizes_of
from lightning_vram.core.recomputed_saves import RecomputationError
from lightning_vram.memory.units import parse_bytes
from lightning_vram.techniques.activation_checkpointing.apply import _STATE, apply_activation_checkpointing


class Spy(Callback):
    """Looks which modules are checkpointed while batches run."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def _look(self, stage: str, pl_module: nn.Module) -> None:
        self.names[stage] = [name for name, module in pl_module.named_modules() if _STATE in vars(module)]

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._look("train", pl_module)

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self._look("test", pl_module)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["net.blocks.0", "net.blocks.1"]),
        ({"every_n_layers": 2}, ["net.blocks.0"]),
        ({"layers": "net.blocks.1"}, ["net.blocks.1"]),
        ({"layers": ["TransformerEncoderLayer", "net.head"]}, ["net.blocks.0", "net.blocks.1", "net.head"]),
        ({"layers": nn.TransformerEncoderLayer}, ["net.blocks.0", "net.blocks.1"]),
    ],
)
def test_checkpoints_what_is_asked_for_while_fitting_only(arguments, expected, make_trainer):
    spy, model = Spy(), LitTiny(TinyGPT())
    trainer = make_trainer(callbacks=[ActivationCheckpointing(**arguments), spy])
    trainer.fit(model)
    trainer.test(model)
    assert spy.names == {"train": expected, "test": []}


def test_finds_layers_made_in_configure_model(make_trainer):
    spy = Spy()
    make_trainer(callbacks=[ActivationCheckpointing(), spy]).fit(LateTiny())
    assert spy.names["train"] == ["net.blocks.0", "net.blocks.1"]


def test_says_what_it_recomputes(make_trainer, monkeypatch):
    said = []
    monkeypatch.setattr("lightning_vram.callbacks.activation_checkpointing.callback.rank_zero_info", said.append)
    layers = ["net.blocks.*", "**.linear1"]
    make_trainer(callbacks=[ActivationCheckpointing(layers)]).fit(LitTiny(TinyGPT()))
    assert said == [
        "ActivationCheckpointing recomputes 2 layers in backward: net.blocks.0 ... net.blocks.1. "
        "2 nested matches are skipped, such as net.blocks.0.linear1."
    ]


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        (
            LitTiny(TinyGPT()),
            "net.blok.*",
            r"^ActivationCheckpointing: layers='net\.blok\.\*' matches no module or class of LitTiny\. Close",
        ),
        (
            LitTiny(nn.Sequential(nn.Linear(3, 3))),
            "auto",
            r"^ActivationCheckpointing: layers='auto' finds no candidate in LitTiny: .* modules are 'net', 'net\.0'\.$",
        ),
    ],
)
def test_refuses_what_it_cannot_find_and_changes_nothing(model, layers, message, make_trainer):
    model.train_dataloader = model.val_dataloader = lambda: [torch.zeros(1)]
    before = describe_module(model)
    trainer = make_trainer(callbacks=[ActivationCheckpointing(layers)])
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(model)
    assert describe_module(model) == before
    assert "setup" not in vars(trainer.strategy)


def test_two_on_the_same_layers_are_refused_and_both_undone(make_trainer):
    model = LitTiny(TinyGPT())
    before = describe_module(model)
    trainer = make_trainer(callbacks=[ActivationCheckpointing(), ActivationCheckpointing("net.blocks.0")])
    with pytest.raises(MisconfigurationException, match="checkpointed already"):
        trainer.fit(model)
    assert describe_module(model) == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every_n_layers": 0}, ValueError, r"^ActivationCheckpointing\(every_n_layers\) must be at least 1, got 0\.$"),
        ({"every_n_layers": 1.5}, TypeError, r"^ActivationCheckpointing\(every_n_layers\) must be an int, got 1\.5 of"),
        (
            {"layers": []},
            ValueError,
            r"^ActivationCheckpointing\(layers\) must name at least one layer, got \[\]\. 'auto'",
        ),
        (
            {"layers": ""},
            ValueError,
            r"^ActivationCheckpointing\(layers\) must name at least one layer, got ''\. 'auto'",
        ),
        (
            {"layers": None},
            TypeError,
            r"^ActivationCheckpointing\(layers\) must be 'auto', .*, got None of type NoneType",
        ),
        ({"layers": ["a", 3]}, TypeError, r"^ActivationCheckpointing\(layers\) must be .*, got 3 of type int\.$"),
        ({"layers": int}, TypeError, r"^ActivationCheckpointing\(layers\) must be .* of type type\.$"),
        ({"save": "matmul"}, ValueError, r"^ActivationCheckpointing\(save\): 'matmul' is not a family .* 'matmuls'"),
        (
            {"save": ["aten.mn"]},
            ValueError,
            r"^ActivationCheckpointing\(save\): .*'aten\.mn' is not an operator of",
        ),
        (
            {"save": ["matmuls"]},
            ValueError,
            r"^ActivationCheckpointing\(save\): operators='matmuls' is not an operator of torch\.ops",
        ),
        ({"save": []}, ValueError, r"^ActivationCheckpointing\(save\): the list of operators is empty\. Use 'inputs'"),
        (
            {"save": 3},
            TypeError,
            r"^ActivationCheckpointing\(save\): SavePolicy\(operators\) must be .*, got 3 of",
        ),
        ({"segments": 1}, ValueError, r"^ActivationCheckpointing\(segments\) must be at least 2, got 1\.$"),
        ({"segments": "all"}, TypeError, r"^ActivationCheckpointing\(segments\) must be an int, 'sqrt' or None"),
        ({"segments": True}, TypeError, r"^ActivationCheckpointing\(segments\) must be an int, 'sqrt' or None"),
        ({"skip_last": 1}, TypeError, r"^ActivationCheckpointing\(skip_last\) must be True or False, got 1 of"),
        ({"budget": "6 apples"}, ValueError, r"^ActivationCheckpointing\(budget\) must be a number and one of B, KiB"),
        ({"budget": -1}, ValueError, r"^ActivationCheckpointing\(budget\) must not be negative, got -1"),
        ({"budget": 0}, ValueError, r"^ActivationCheckpointing\(budget\) must be above 0, got 0\.$"),
        ({"budget": "0.5B"}, ValueError, r"^ActivationCheckpointing\(budget\) must be above 0, got '0\.5B'\.$"),
        (
            {"budget": "0.5"},
            ValueError,
            r"^ActivationCheckpointing\(budget\) has no unit, got '0\.5': write '0\.5GiB'\.$",
        ),
        (
            {"budget": 6},
            ValueError,
            r"^ActivationCheckpointing\(budget\) has no unit, got 6: write '6GiB'",
        ),
        (
            {"budget": "6GiB", "every_n_layers": 2},
            ValueError,
            r"^ActivationCheckpointing\(budget='6GiB'\) chooses .* excludes every_n_layers=2\. Remove",
        ),
        (
            {"budget": "6GiB", "save": "matmuls", "skip_last": True},
            ValueError,
            r"^ActivationCheckpointing\(budget='6GiB'\) .* excludes save='matmuls' and skip_last=True\. Remove",
        ),
        (
            {"determinism_check": "yes"},
            ValueError,
            r"^ActivationCheckpointing\(determinism_check\) must be 'outputs', 'operators' or 'none', got 'yes'",
        ),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        ActivationCheckpointing(**arguments)


def test_resumes_from_a_checkpoint_of_either_kind(make_trainer, tmp_path):
    def fit(callbacks, ckpt_path=None, max_epochs=2):
        torch.manual_seed(0)
        model = LitTiny(TinyCNN())
        trainer = make_trainer(callbacks=callbacks, max_epochs=max_epochs)
        trainer.fit(model, ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
        return trainer, model

    trainer, _ = fit([ActivationCheckpointing()], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "packed.ckpt")
    trainer, _ = fit([], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    _, from_packed = fit([], tmp_path / "packed.ckpt")
    _, from_plain = fit([ActivationCheckpointing()], tmp_path / "plain.ckpt")
    assert_equal_weights(from_packed, from_plain)


def test_weight_averaging_sees_the_same_weights(make_trainer):
    averages = []
    for callbacks in ([], [ActivationCheckpointing()]):
        torch.manual_seed(0)
        model = LitTiny(TinyCNN())
        make_trainer(callbacks=[*callbacks, WeightAveraging(use_buffers=True)], limit_val_batches=0).fit(model)
        averages.append(model)
    assert_equal_weights(*averages)


@pytest.mark.device
@pytest.mark.parametrize("net", [TinyCNN, TinyGPT])
def test_training_is_unchanged_on_a_gpu(net, make_trainer):
    fitted = []
    for callbacks in ([], [ActivationCheckpointing()]):
        torch.manual_seed(0)
        model = LitTiny(net())
        make_trainer(accelerator=ACCELERATOR, devices=1, callbacks=callbacks, deterministic=True).fit(model)
        fitted.append(model.cpu())
    assert_equal_weights(*fitted)


class ByKeyword(nn.Module):
    """Gets its tensors inside a dict: torch's checkpoint would not find the device to keep random numbers of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, *, state: dict) -> torch.Tensor:
        return self.down(nn.functional.dropout(self.up(state["hidden"]), 0.5))


@pytest.mark.device
def test_dropout_masks_are_the_same_on_a_gpu_when_tensors_come_by_keyword():
    gradients = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        net = nn.ModuleList([ByKeyword(), ByKeyword()]).to(DEVICE)
        if checkpoint:
            apply_activation_checkpointing(net)
        hidden = torch.randn(8, 16, device=DEVICE)
        for layer in net:
            hidden = layer(state={"hidden": hidden})
        hidden.sum().backward()
        gradients.append([p.grad for p in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


MODES = {
    "matmuls": {"save": "matmuls"},
    "policy": {"save": SavePolicy(["aten.addmm", "aten.convolution"], every_n=2)},
    "skip_last": {"skip_last": True},
    "budget": {"budget": "1MiB"},
    "tight budget": {"budget": 0},  # filled in: what the model needs at least, and some more
    "operators": {"determinism_check": "operators"},
}
MINIMUM_BYTES = re.compile(r"below the minimum of ([\d.]+ \w+)")


def make_callback(mode: str, make_model, make_trainer) -> ActivationCheckpointing:
    arguments = MODES[mode]
    if arguments.get("budget") == 0:
        with pytest.raises(MisconfigurationException) as caught:
            make_trainer(callbacks=[ActivationCheckpointing(budget="1B")], max_steps=1).fit(make_model())
        arguments = {"budget": f"{parse_bytes(MINIMUM_BYTES.search(str(caught.value))[1]) * 11 // 10}B"}
    return ActivationCheckpointing(**arguments)


HOW = {
    "eager": ({}, MODES),
    "accumulation and clipping": (
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        ["matmuls", "tight budget"],
    ),
    "autocast": ({"precision": "bf16-mixed"}, ["matmuls", "tight budget"]),
}


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize(
    ("mode", "arguments"),
    [pytest.param(mode, arguments, id=f"{mode}, {how}") for how, (arguments, modes) in HOW.items() for mode in modes],
)
def test_training_is_unchanged(mode, arguments, make_case, make_trainer):
    callback = make_callback(mode, make_case, make_trainer)
    plain, saving = make_case(), None
    make_trainer(**arguments).fit(plain)
    saving = make_case()
    make_trainer(callbacks=[callback], **arguments).fit(saving)
    assert_equal_weights(saving, plain)


@pytest.mark.parametrize("mode", ["matmuls", "budget"])
def test_training_is_unchanged_with_manual_optimization(mode, make_trainer):
    fitted = []
    for callbacks in ([], [ActivationCheckpointing(**MODES[mode])]):
        torch.manual_seed(0)
        model = LitManual(TinyGPT())
        make_trainer(callbacks=callbacks).fit(model)
        fitted.append(model)
    assert_equal_weights(*fitted)


@pytest.mark.slow_except("gpt-layer")
@pytest.mark.parametrize("part", ["whole", "layer"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # dynamo's, and ours
def test_training_is_unchanged_when_compiled(part, make_model, make_trainer):
    fitted = []
    for callbacks in ([], [ActivationCheckpointing(save="matmuls")]):
        torch._dynamo.reset()
        model = make_model()
        if part == "layer":
            layer = model.net.blocks[0] if isinstance(model.net, TinyGPT) else model.net
            layer.compile(backend="aot_eager")
        make_trainer(callbacks=callbacks, max_epochs=1, limit_val_batches=0).fit(
            torch.compile(model, backend="aot_eager") if part == "whole" else model
        )
        fitted.append(model)
    assert_equal_weights(*fitted)


class Branching(LitTiny):
    """Parameters that some steps do not use, for ``find_unused_parameters``."""

    def __init__(self) -> None:
        super().__init__(TinyGPT())
        self.extra = nn.Linear(16, 16)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.extra(torch.ones(16)).sum() if batch_idx % 2 else loss


class OuterCheckpoint(LitTiny):
    """The user's own checkpoint around all layers runs them again, as they were in the forward."""

    def training_step(self, batch, batch_idx):
        return torch.utils.checkpoint.checkpoint(super().training_step, batch, batch_idx, use_reentrant=False)


def test_training_is_unchanged_inside_of_an_outer_checkpoint(make_trainer):
    fitted = []
    for callbacks in ([], [ActivationCheckpointing(budget="400KiB")]):
        torch.manual_seed(0)
        model = OuterCheckpoint(TinyGPT())
        make_trainer(callbacks=callbacks).fit(model)
        fitted.append(model)
    assert_equal_weights(*fitted)


@pytest.mark.quick_sample(2)
@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["matmuls", "budget", "tight budget"])
@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_training_is_unchanged_under_ddp(mode, options, make_trainer):
    fitted = []
    module = Branching if "find_unused_parameters" in options else lambda: LitTiny(TinyGPT())
    callback = make_callback(mode, module, make_trainer)
    for callbacks in ([], [callback]):
        torch.manual_seed(0)
        model = module()
        strategy = DDPStrategy(start_method="fork", **options)
        make_trainer(callbacks=callbacks, strategy=strategy, devices=2, max_epochs=1, limit_val_batches=0).fit(model)
        fitted.append(model)
    assert_equal_weights(*fitted)


class Uneven(LitTiny):
    """The second rank gets longer sequences, and needs another plan than the first."""

    def train_dataloader(self):
        length = 6 + 5 * self.global_rank
        tokens = torch.randint(17, (12, length + 1))
        return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4)


class Decisions(Callback):
    """Gathers what each rank recomputes."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        mine = [
            "plain" if (how := vars(layer)[_STATE].parts[None].recomputing) is None else how.save is None
            for layer in pl_module.net.blocks
        ]
        everybodys = [None] * trainer.world_size
        torch.distributed.all_gather_object(everybodys, mine)
        assert everybodys[0] == everybodys[1]


@pytest.mark.distributed
def test_all_ranks_recompute_the_same_layers(make_trainer):
    torch.manual_seed(0)
    callbacks = [ActivationCheckpointing(budget="200KiB"), Decisions()]
    make_trainer(
        callbacks=callbacks,
        strategy="ddp_fork",
        devices=2,
        max_epochs=1,
        limit_val_batches=0,
        use_distributed_sampler=False,
    ).fit(Uneven(TinyGPT()))


@pytest.mark.distributed
def test_all_ranks_refuse_a_budget_that_one_cannot_meet(make_trainer):
    trainer = make_trainer(
        callbacks=[ActivationCheckpointing(budget="80KiB")],
        strategy="ddp_fork",
        devices=2,
        max_epochs=1,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    with pytest.raises(Exception, match="is below the minimum"):
        trainer.fit(Uneven(TinyGPT()))


def test_tells_the_plan_and_plans_anew_for_a_larger_batch(make_trainer, monkeypatch):
    said = []
    monkeypatch.setattr("lightning_vram.callbacks.activation_checkpointing.callback.rank_zero_info", said.append)

    class Growing(LitTiny):
        def train_dataloader(self):
            tokens = [torch.zeros(4, length, dtype=torch.long) for length in (4, 8, 8, 6, 9)]
            return DataLoader([(batch, batch) for batch in tokens], batch_size=None)

    make_trainer(callbacks=[ActivationCheckpointing(budget="1MiB")], max_epochs=1, limit_val_batches=0).fit(
        Growing(TinyGPT())
    )
    assert len(said) == 3
    assert said[0].startswith("ActivationCheckpointing(budget='1MiB') planned:\nAll activations, ")
    assert said[0].endswith(" are within the budget of 1.00 MiB: nothing is recomputed.")
    assert said[1].startswith("ActivationCheckpointing(budget='1MiB') planned again, for a batch of 512 B: ")
    assert "576 B" in said[2]


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (torch.zeros(2, 8), [64, 2, 8]),
        ([torch.zeros(3, 4), {"labels": torch.zeros(5, dtype=torch.int64), "name": "a"}], [88, 5, 4]),
        (torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=torch.jagged), [80, 5, 4]),
        (UserDict(ids=torch.zeros(2, 3)), [24, 2, 3]),
        ("text", [0]),
    ],
)
def test_sizes_of_a_batch(batch, sizes):
    assert _sizes_of(batch) == sizes


def test_longer_sequences_of_as_many_bytes_are_planned_for_too(make_trainer, monkeypatch):
    said = []
    monkeypatch.setattr("lightning_vram.callbacks.activation_checkpointing.callback.rank_zero_info", said.append)

    class Bucketed(LitTiny):
        def train_dataloader(self):
            tokens = [torch.zeros(shape, dtype=torch.long) for shape in ((4, 4), (2, 8), (4, 4), (2, 8), (1, 8))]
            return DataLoader([(batch, batch) for batch in tokens], batch_size=None)

    callback = ActivationCheckpointing(budget="1MiB")
    make_trainer(callbacks=[callback], max_epochs=1, limit_val_batches=0).fit(Bucketed(TinyGPT()))
    assert len(said) == 2
    assert "planned again, for a batch of 256 B: " in said[1]


def test_a_later_batch_that_cannot_fit_runs_checkpointed_with_a_warning(make_trainer):
    class Exploding(LitTiny):
        def train_dataloader(self):
            tokens = [torch.zeros(4, length, dtype=torch.long) for length in (4, 40, 4)]
            return DataLoader([(batch, batch) for batch in tokens], batch_size=None)

    callback = ActivationCheckpointing(budget="100KiB")
    with pytest.warns(
        UserWarning, match=r"recomputes all layers from now on, for a larger batch: budget=100\.00 KiB is"
    ):
        make_trainer(callbacks=[callback], max_epochs=1, limit_val_batches=0).fit(Exploding(TinyGPT()))


def test_a_budget_that_is_too_small_is_refused_before_any_weight_has_changed(make_trainer):
    model = LitTiny(TinyGPT())
    before = describe_module(model), copy.deepcopy(model.state_dict())
    with pytest.raises(
        MisconfigurationException, match=r"^ActivationCheckpointing: budget=1\.00 KiB is below the minimum of .* KiB"
    ):
        make_trainer(callbacks=[ActivationCheckpointing(budget="1KiB")]).fit(model)
    assert describe_module(model) == before[0]
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before[1].items())


def test_warns_where_a_policy_keeps_nothing(make_trainer):
    with pytest.warns(UserWarning, match=r"ActivationCheckpointing\(save='attention'\) saved nothing: no layer ran"):
        make_trainer(callbacks=[ActivationCheckpointing(save="attention")]).fit(LitTiny(TinyGPT()))


def test_a_layer_that_nobody_rewinds_is_an_error(make_trainer):
    class Noise(nn.Linear):
        def forward(self, hidden):
            return torch.tanh(super().forward(hidden) * float(os.urandom(1)[0] + 1))

    net = TinyCNN()
    net[8] = Noise(8, 10)
    with pytest.raises(RecomputationError, match=r"^recomputation of layer net\.8 \(Noise\) diverged from the forward"):
        make_trainer(callbacks=[ActivationCheckpointing("Noise")]).fit(LitTiny(net))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("auto", r"segments finds no nn\.Sequential with 4 or more layers in LitTiny"),
        ("net.blocks", r"segments needs nn\.Sequential bodies .* matches 'net\.blocks\.0' \(TransformerEncoderLayer\)"),
    ],
)
def test_segments_of_what_is_no_sequential_are_refused(layers, message, make_trainer):
    with pytest.raises(MisconfigurationException, match=message):
        make_trainer(callbacks=[ActivationCheckpointing(layers, segments=2)]).fit(LitTiny(TinyGPT()))


def test_more_segments_than_layers_are_refused(make_trainer):
    with pytest.raises(MisconfigurationException, match=r"segments=9 is more than the 5 layers with param.* of 'net'"):
        make_trainer(callbacks=[ActivationCheckpointing(segments=9)]).fit(LitTiny(TinyCNN()))


def test_segments_train_the_same(make_trainer):
    fitted = []
    for callbacks in ([], [ActivationCheckpointing(segments="sqrt", skip_last=True)]):
        torch.manual_seed(0)
        model = LitTiny(TinyCNN())
        make_trainer(callbacks=callbacks).fit(model)
        fitted.append(model)
    assert_equal_weights(*fitted)
