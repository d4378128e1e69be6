"""ActivationCheckpointing: when it applies, what it says, what it refuses."""

import copy
from collections import UserDict

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import LitManual, LitTiny, TinyCNN, TinyGPT, describe_module
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_vram import ActivationCheckpointing
from lightning_vram.callbacks.activation_checkpointing.callback import _sizes_of
from lightning_vram.techniques.activation_checkpointing.apply import _STATE


class Spy(Callback):
    """Looks which modules are checkpointed while batches run."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def on_train_batch_start(self, trainer, pl_module, *_):
        self.names["train"] = [name for name, module in pl_module.named_modules() if _STATE in vars(module)]

    def on_test_batch_start(self, trainer, pl_module, *_):
        self.names["test"] = [name for name, module in pl_module.named_modules() if _STATE in vars(module)]


@pytest.fixture
def said(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("lightning_vram.callbacks.activation_checkpointing.callback.rank_zero_info", said.append)
    return said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["net.blocks.0", "net.blocks.1"]),
        ({"every_n_layers": 2}, ["net.blocks.0"]),
        ({"layers": ["TransformerEncoderLayer", "net.head"]}, ["net.blocks.0", "net.blocks.1", "net.head"]),
        ({"layers": nn.TransformerEncoderLayer}, ["net.blocks.0", "net.blocks.1"]),
    ],
)
def test_checkpoints_what_is_asked_for_while_fitting_only(arguments, expected, fit):
    spy = Spy()
    model = fit(lambda: LitTiny(TinyGPT()), ActivationCheckpointing(**arguments), spy, limit_train_batches=1)
    model.trainer.test(model)
    assert spy.names == {"train": expected, "test": []}


def test_says_what_it_recomputes(fit, said):
    fit(lambda: LitTiny(TinyGPT()), ActivationCheckpointing(["net.blocks.*", "**.linear1"]), limit_train_batches=1)
    assert said == [
        "ActivationCheckpointing recomputes 2 layers in backward: net.blocks.0 ... net.blocks.1. "
        "2 nested matches are skipped, such as net.blocks.0.linear1."
    ]


@pytest.mark.parametrize(
    ("make_net", "arguments", "message"),
    [
        (
            TinyGPT,
            [{"layers": "net.blok.*"}],
            r"^ActivationCheckpointing: layers='net\.blok\.\*' matches no module or class of LitTiny\. Close",
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 3)),
            [{}],
            r"^ActivationCheckpointing: layers='auto' finds no candidate in LitTiny: .* modules are 'net', 'net\.0'\.$",
        ),
        (TinyGPT, [{}, {"layers": "net.blocks.0"}], "checkpointed already"),
        (TinyGPT, [{"segments": 2}], r"segments finds no nn\.Sequential with 4 or more layers in LitTiny"),
        (
            TinyGPT,
            [{"layers": "net.blocks", "segments": 2}],
            r"segments needs nn\.Sequential bodies .* matches 'net\.blocks\.0' \(TransformerEncoderLayer\)",
        ),
        (TinyCNN, [{"segments": 9}], r"segments=9 is more than the 5 layers with param.* of 'net'"),
    ],
)
def test_refuses_what_it_cannot_find_and_changes_nothing(make_net, arguments, message, make_trainer):
    model = LitTiny(make_net())
    model.train_dataloader = model.val_dataloader = lambda: [torch.zeros(1)]
    before = describe_module(model)
    trainer = make_trainer(callbacks=[ActivationCheckpointing(**one) for one in arguments])
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(model)
    assert describe_module(model) == before
    assert "setup" not in vars(trainer.strategy)


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
        ({"skip_last": 1}, TypeError, r"^ActivationCheckpointing\(skip_last\) must be True or False, got 1 of"),
        ({"budget": -1}, ValueError, r"^ActivationCheckpointing\(budget\) must not be negative, got -1"),
        ({"budget": 0}, ValueError, r"^ActivationCheckpointing\(budget\) must be above 0, got 0\.$"),
        (
            {"budget": "0.5"},
            ValueError,
            r"^ActivationCheckpointing\(budget\) has no unit, got '0\.5': write '0\.5GiB'\.$",
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


class OuterCheckpoint(LitTiny):
    """The user's own checkpoint around all layers runs them again, as they were in the forward."""

    def training_step(self, batch, batch_idx):
        return torch.utils.checkpoint.checkpoint(super().training_step, batch, batch_idx, use_reentrant=False)


@pytest.mark.parametrize(
    ("make", "arguments", "options"),
    [
        (lambda: LitTiny(TinyGPT()), {"save": "matmuls"}, {"precision": "bf16-mixed"}),
        (lambda: LitTiny(TinyGPT()), {"budget": "120KiB"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (lambda: LitManual(TinyGPT()), {"budget": "120KiB"}, {}),
        (lambda: OuterCheckpoint(TinyGPT()), {"budget": "120KiB"}, {}),
        (lambda: LitTiny(TinyCNN()), {"save": "matmuls"}, {"accumulate_grad_batches": 2}),
        (lambda: LitTiny(TinyCNN()), {"budget": "36KiB"}, {}),
        (lambda: LitTiny(TinyCNN()), {"segments": "sqrt", "skip_last": True}, {}),
        (lambda: LitTiny(TinyCNN()), {"determinism_check": "operators"}, {}),
    ],
)
def test_training_is_unchanged(make, arguments, options, same_as_baseline):
    same_as_baseline(make, ActivationCheckpointing(**arguments), **options)


def test_warns_where_a_policy_keeps_nothing(fit):
    with pytest.warns(UserWarning, match=r"ActivationCheckpointing\(save='attention'\) saved nothing: no layer ran"):
        fit(lambda: LitTiny(TinyGPT()), ActivationCheckpointing(save="attention"))


# --- a budget ---


class LitLengths(LitTiny):
    """Its batches have these shapes."""

    def __init__(self, *shapes: tuple[int, int]) -> None:
        super().__init__(TinyGPT())
        self.shapes = shapes

    def train_dataloader(self):
        tokens = [torch.zeros(shape, dtype=torch.long) for shape in self.shapes]
        return DataLoader([(batch, batch) for batch in tokens], batch_size=None)


def test_tells_the_plan_and_plans_anew_for_a_larger_batch(fit, said):
    shapes = [(4, length) for length in (4, 8, 8, 6, 9)]
    fit(lambda: LitLengths(*shapes), ActivationCheckpointing(budget="1MiB"))
    assert len(said) == 3
    assert said[0].startswith("ActivationCheckpointing(budget='1MiB') planned:\nAll activations, ")
    assert said[0].endswith(" are within the budget of 1.00 MiB: nothing is recomputed.")
    assert said[1].startswith("ActivationCheckpointing(budget='1MiB') planned again, for a batch of 512 B: ")
    assert "576 B" in said[2]


def test_longer_sequences_of_as_many_bytes_are_planned_for_too(fit, said):
    fit(lambda: LitLengths((4, 4), (2, 8), (4, 4), (2, 8), (1, 8)), ActivationCheckpointing(budget="1MiB"))
    assert len(said) == 2
    assert "planned again, for a batch of 256 B: " in said[1]


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        ([torch.zeros(3, 4), {"labels": torch.zeros(5, dtype=torch.int64), "name": "a"}], [88, 5, 4]),
        (torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=torch.jagged), [80, 5, 4]),
        (UserDict(ids=torch.zeros(2, 3)), [24, 2, 3]),
        ("text", [0]),
    ],
)
def test_sizes_of_a_batch(batch, sizes):
    assert _sizes_of(batch) == sizes


def test_a_later_batch_that_cannot_fit_runs_checkpointed_with_a_warning(fit):
    message = r"recomputes all layers from now on, for a larger batch: budget=100\.00 KiB is"
    with pytest.warns(UserWarning, match=message):
        fit(lambda: LitLengths((4, 4), (4, 40), (4, 4)), ActivationCheckpointing(budget="100KiB"))


def test_a_budget_that_is_too_small_is_refused_before_any_weight_has_changed(make_trainer):
    model = LitTiny(TinyGPT())
    before = describe_module(model), copy.deepcopy(model.state_dict())
    with pytest.raises(
        MisconfigurationException, match=r"^ActivationCheckpointing: budget=1\.00 KiB is below the minimum of .* KiB"
    ):
        make_trainer(callbacks=[ActivationCheckpointing(budget="1KiB")]).fit(model)
    assert describe_module(model) == before[0]
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before[1].items())


# --- ranks ---


class Branching(LitTiny):
    """Parameters that some steps do not use, for ``find_unused_parameters``."""

    def __init__(self) -> None:
        super().__init__(TinyGPT())
        self.extra = nn.Linear(16, 16)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.extra(torch.ones(16)).sum() if batch_idx % 2 else loss


@pytest.mark.quick_sample(1)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("make", "option"), [(lambda: LitTiny(TinyGPT()), "static_graph"), (Branching, "find_unused_parameters")]
)
def test_training_within_a_budget_is_unchanged_under_ddp(make, option, fit, same_as_baseline):
    def strategy() -> dict[str, DDPStrategy]:
        return {"strategy": DDPStrategy(start_method="fork", **{option: True})}

    callback = ActivationCheckpointing(budget="120KiB")
    same_as_baseline(make, callback, **strategy(), baseline=strategy(), devices=2)


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


TWO_RANKS = {"strategy": "ddp_fork", "devices": 2, "use_distributed_sampler": False}


@pytest.mark.distributed
def test_all_ranks_recompute_the_same_layers(fit):
    fit(lambda: Uneven(TinyGPT()), ActivationCheckpointing(budget="120KiB"), Decisions(), **TWO_RANKS)


@pytest.mark.distributed
def test_all_ranks_refuse_a_budget_that_one_cannot_meet(fit):
    with pytest.raises(Exception, match="is below the minimum"):
        fit(lambda: Uneven(TinyGPT()), ActivationCheckpointing(budget="80KiB"), **TWO_RANKS)
