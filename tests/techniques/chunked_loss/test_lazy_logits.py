"""Logits that are not there look like a tensor, and become one for whoever needs it."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_vram.private_names.torch import without_torch_function
from lightning_vram.techniques.chunked_loss import apply_chunked_loss, settle
from tests.techniques.chunked_loss.spellings import SHAPE, TARGET, VOCAB_SIZE, Net


class Lazy:
    """A network whose head is at work, and what needed whole logits."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net, self.told = Net(), []
        self.handle = apply_chunked_loss(self.net, chunk=5, tell=lambda head, why: self.told.append((head, why)))

    def __call__(self) -> Tensor:
        with self.handle.active():
            return self.net(TARGET)

    def plain(self) -> Tensor:
        return self.net(TARGET)  # outside of active()

    def compare(self, use: Callable[[Tensor], Tensor], **tolerance: float) -> None:
        """``use`` of lazy logits has the value and the gradients of that of plain ones."""
        found = []
        for make in (self, self.plain):
            value = use(make())
            value.backward()
            found.append([value.detach(), *(p.grad.clone() for p in self.net.parameters())])
            self.net.zero_grad()
        torch.testing.assert_close(*found, **tolerance)


@pytest.fixture
def lazy():
    return Lazy()


def test_it_answers_for_itself_without_values(lazy):
    logits, plain = lazy(), lazy.plain()
    assert isinstance(logits, Tensor)
    assert type(plain) is Tensor
    assert (logits.shape, logits.dtype, logits.device) == (plain.shape, plain.dtype, plain.device)
    assert (logits.size(-1), len(logits), logits.ndim, logits.numel()) == (VOCAB_SIZE, SHAPE[0], 3, plain.numel())
    assert logits.requires_grad
    assert logits.grad_fn is not None
    assert logits.is_floating_point()
    assert repr(logits) == f"LazyLogits({(*SHAPE, VOCAB_SIZE)})"
    assert lazy.told == []


def test_whole_logits_are_made_once_and_told_of(lazy):
    logits = lazy()
    assert torch.equal(logits.cumsum(-1), lazy.plain().cumsum(-1))
    assert torch.equal(logits.sort(-1).values, lazy.plain().sort(-1).values)
    assert lazy.told == [("head", "cumsum")]
    assert type(logits + 1) is Tensor


def test_without_gradients_there_are_none(lazy):
    with torch.no_grad():
        logits = lazy()
        loss = F.cross_entropy(logits.flatten(0, 1), TARGET.flatten())
    assert not logits.requires_grad
    assert not loss.requires_grad
    teacher = lazy().detach()
    assert not teacher.requires_grad
    assert not teacher.softmax(-1).sum(-1).requires_grad
    assert lazy.told == []


def view_after_a_write(lazy):
    logits = lazy()
    flat = logits.view(-1, VOCAB_SIZE)
    logits[..., 0] = 0
    return flat


def whole_view_after_a_write(lazy):
    logits = lazy()
    flat = logits.view(-1, VOCAB_SIZE)
    flat.sort(-1)  # whole from now on, as the other is from its write on
    logits[..., 0] = 0
    assert not logits[..., 0].any()
    return flat


def after_a_step(lazy):
    logits = lazy()
    with torch.no_grad():
        lazy.net.head.weight.add_(1)
    return logits


def after_a_write_to_the_mask(lazy):
    mask = torch.arange(VOCAB_SIZE) < 3
    logits = lazy().masked_fill(mask, -9)
    mask.fill_(value=True)
    return logits


@pytest.mark.parametrize(
    "change", [view_after_a_write, whole_view_after_a_write, after_a_step, after_a_write_to_the_mask]
)
def test_logits_of_what_has_changed_are_refused(lazy, change):
    logits = change(lazy)
    with pytest.raises(
        RuntimeError,
        match=r"^ChunkedLoss: logits of head are read after their input, weights, masks or a view of them have changed "
        r"or were freed\. Compute the loss before the optimizer step, store results instead of logits "
        r"\(logits\.argmax\(-1\), logits\.cpu\(\)\), and write logits = logits\.masked_fill\(\.\.\.\) or the like "
        r"instead of in place\.$",
    ):
        logits.logsumexp(-1)


def test_gradients_of_gradients_are_refused(lazy):
    logits = lazy()
    for loss in (F.cross_entropy(logits.flatten(0, 1), TARGET.flatten()), logits.logsumexp(-1).mean()):
        with pytest.raises(
            RuntimeError,
            match=r"^ChunkedLoss does not support gradients of gradients \(create_graph=True\)\. Leave it out\.$",
        ):
            torch.autograd.grad(loss, lazy.net.head.weight, create_graph=True)


def test_a_head_of_another_class_of_tensors_is_plain(lazy):
    with lazy.handle.active():
        logits = lazy.net.head(torch.nested.nested_tensor_from_jagged(torch.ones(5, 8), torch.tensor([0, 2, 5])))
    assert logits.is_nested
    assert lazy.told == [("head", "a tensor subclass (tensor parallelism, torchao, nested tensors)")]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo of torch 2.11 reads it
def test_a_compiled_loss_runs_as_it_is(lazy):
    graphs = []
    loss = torch.compile(
        lambda x: F.cross_entropy(x.flatten(0, 1), TARGET.flatten()), backend=lambda g, _: graphs.append(g) or g
    )
    for _ in range(3):
        torch.testing.assert_close(loss(lazy()), F.cross_entropy(lazy.plain().flatten(0, 1), TARGET.flatten()))
    assert lazy.told == []
    assert len(graphs) <= 3  # nothing of what computes the chunks


def test_settled_logits_stay_what_they_were(lazy):
    logits, plain = lazy(), lazy.plain()
    settle({"loss": 0, "logits": [logits]}, "what training_step returns")
    with torch.no_grad():
        lazy.net.head.weight.add_(1)
    assert torch.equal(logits.log_softmax(-1), plain.log_softmax(-1))
    assert not logits.log_softmax(-1).requires_grad
    assert lazy.told == [("head", "what training_step returns")]


def test_nothing_of_a_step_outlives_it(lazy):
    logits = lazy()
    hidden = weakref.ref(logits.node.args[0].values)
    loss = F.cross_entropy(logits.flatten(0, 1), TARGET.flatten())
    loss.backward()
    gc.disable()
    try:
        del logits
        assert hidden() is None  # without a collection, and though the loss is there
    finally:
        gc.enable()


def test_it_is_undone(lazy):
    lazy.handle.remove()
    with lazy.handle.active():
        assert type(lazy.net(TARGET)) is Tensor
    assert type(lazy.net.head) is torch.nn.Linear
    assert vars(lazy.net.head).keys() == vars(Net().head).keys()


def test_compiled_and_transformed_heads_return_plain_logits(lazy):
    with lazy.handle.active():
        assert type(torch.compile(lazy.net, backend="eager")(TARGET)) is Tensor
        state = dict(lazy.net.named_parameters())
        gradients = torch.func.grad(lambda s: torch.func.functional_call(lazy.net, s, (TARGET,)).sum())(state)
    assert type(gradients["head.weight"]) is Tensor
    assert lazy.told == []


def cross_entropy(logits):
    return F.cross_entropy(logits.flatten(0, 1), TARGET.flatten())


def weighted(values):
    return (values * torch.arange(1.0, values.numel() + 1).view(values.shape)).sum()


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[:, ::2],
        lambda x: x[1:, None, :-1, 5:50],
        lambda x: x.unsqueeze(0).squeeze(0).narrow(1, 2, 5).select(0, 1),
        lambda x: x.movedim(0, 1)[2:].flatten(0, 1).unflatten(0, (-1, 2)),
        lambda x: x.chunk(3, dim=-1)[1],
        lambda x: x[:, [True] * 4 + [False] * 5] if type(x) is Tensor else x[:, torch.arange(9) < 4],
    ],
)
def test_a_view_has_the_tokens_and_classes_of_whole_logits(lazy, cut):
    lazy.compare(lambda logits: weighted(cut(logits).logsumexp(-1)))
    assert lazy.told == []


def with_a_target_of_its_own(logits):
    with torch.no_grad():
        target = (logits / 2).softmax(-1)
    return -(target * logits.log_softmax(-1)).sum(-1).mean()


def after_a_look_without_gradients(logits):
    with torch.no_grad():
        assert logits.argmax(-1).shape == logits.cumsum(-1).shape[:-1]
    return cross_entropy(logits)


def past_functions_of_python(logits):
    with without_torch_function():
        total = logits.sum()
    return logits.cumsum(-1).mean() + total


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return 2 * gradient * logits


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.view(-1).sum(),
        lambda x: x.log_softmax(1).sum(),
        lambda x: x.split(30, dim=-1)[0].sum(),
        lambda x: x[None].sum() + x.sum(1).sum() + x.max().sum(),
        lambda x: torch.cat([x, x]).sum(),
        lambda x: (x + torch.ones(3, *SHAPE, 1)).sum(),
        lambda x: (x.transpose(1, 2) * torch.arange(SHAPE[1])).sum(),
        lambda x: x.mT.sum(-1).sum() + x.to(torch.float64).unbind(0)[0].std(),
        lambda x: x.gather(-1, TARGET[:2, :, None]).sum(),
        lambda x: x[:, 0, 3].sum() + x[:, [1, 2]].sum() + x[TARGET[0] % 4, 0].sum(),
        lambda x: F.cross_entropy(x, torch.zeros(SHAPE[0], VOCAB_SIZE, dtype=torch.int64)),
        lambda x: F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="none").sum(),
        lambda x: F.nll_loss(x.mT.log_softmax(1), TARGET, size_average=False),
        lambda x: Squares.apply(x.log_softmax(-1)),
        with_a_target_of_its_own,
        after_a_look_without_gradients,
        past_functions_of_python,
    ],
)
def test_any_other_use_is_right(lazy, use):
    lazy.compare(use, rtol=1e-4, atol=1e-5)
