"""Losses in chunks are those of whole logits, and so are their gradients, in the memory of a chunk."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lightning_vram import track_memory
from lightning_vram.techniques.chunked_loss import apply_chunked_loss
from lightning_vram.techniques.chunked_loss.lazy_logits import find_chunk_rows
from tests.techniques.chunked_loss.spellings import IN_CHUNKS, SHAPE, TARGET, VOCAB_SIZE, WHOLE, WIDTH, Loss, Net

CHUNK = 7  # tokens: neither a divisor of all nor a power of two


def train(
    net: nn.Module, loss: Loss, chunk: int | None, dtype: torch.dtype | None = None
) -> tuple[list[torch.Tensor], list[str]]:
    """Loss and gradients, and what needed whole logits."""
    told: list[str] = []
    handle = apply_chunked_loss(net, chunk=chunk, tell=lambda _, why: told.append(why)) if chunk else None
    tokens = torch.randint(VOCAB_SIZE, SHAPE, generator=torch.Generator().manual_seed(0))
    with handle.active() if handle else contextlib.nullcontext():
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            value = loss(net(tokens))
        assert type(value) is torch.Tensor
        value.backward()
    if handle is not None:
        handle.remove()
    found = [value.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
    net.zero_grad()
    return found, told


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    pairs = list(zip(one, other, strict=True))
    assert all(a.dtype == b.dtype for a, b in pairs)
    return max(((a - b).float().norm() / b.float().norm().clamp(min=1e-20)).item() for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32, untied", "float64, tied"])
@pytest.mark.parametrize("name", [*IN_CHUNKS, *WHOLE])
def test_a_loss_and_its_gradients_are_those_of_whole_logits(name, dtype):
    torch.manual_seed(0)
    is_double = dtype is torch.float64
    net = Net(is_tied=is_double, bias=not is_double).to(dtype)
    loss = {**IN_CHUNKS, **WHOLE}[name]
    (plain, _), (found, told) = (train(net, loss, chunk) for chunk in (None, CHUNK))
    is_rounded = not is_double or "float" in name or "shannon" in name
    assert distance(found[:1], plain[:1]) < (2e-6 if is_rounded else 1e-12)
    assert distance(found, plain) < (1e-5 if is_rounded else 1e-12)
    assert (len(told) > 0) == (name in WHOLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_under_autocast_they_are_as_near_to_float32_as_plain_ones(name, dtype):
    torch.manual_seed(0)
    net = Net()
    exact = train(net, IN_CHUNKS[name], None)[0]
    plain, found = (train(net, IN_CHUNKS[name], chunk, dtype)[0] for chunk in (None, CHUNK))
    assert [one.dtype for one in found] == [one.dtype for one in plain]
    far, near = (distance([one.float() for one in some], exact) for some in (plain, found))
    assert near < 1.5 * far + 1e-3


OPTIONS = st.fixed_dictionaries(
    {
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 0.9]),
        "ignore_index": st.sampled_from([-100, 0, 3]),
        "weight": st.booleans(),
        "is_first": st.booleans(),
        "share_ignored": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        "temperature": st.sampled_from([None, 0.5, "learned"]),
        "chunk": st.integers(1, 40),
        "bias": st.booleans(),
        "is_probability": st.booleans(),
    }
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(options=OPTIONS)
def test_options_of_cross_entropy_in_any_combination(options):
    torch.manual_seed(0)
    net = Net(bias=options["bias"]).double()
    net.temperature = nn.Parameter(torch.tensor(1.3).double()) if options["temperature"] == "learned" else None
    weight = torch.rand(VOCAB_SIZE).double() if options["weight"] else None
    target = TARGET.masked_fill(torch.rand(SHAPE) < options["share_ignored"], options["ignore_index"])
    settings = {name: options[name] for name in ("reduction", "label_smoothing", "ignore_index")}
    if options["is_probability"]:
        del settings["ignore_index"]
        target = torch.randn(*SHAPE, VOCAB_SIZE).double().softmax(-1)
    scales = torch.rand(SHAPE).double()

    def loss(logits: torch.Tensor) -> torch.Tensor:
        temperature = options["temperature"] if net.temperature is None else net.temperature
        logits = logits if temperature is None else logits / temperature
        chosen = target
        if options["is_first"]:
            logits, chosen = logits.transpose(1, 2), target.movedim(-1, 1) if options["is_probability"] else target
        else:
            logits = logits.reshape(-1, VOCAB_SIZE)
            chosen = target.reshape(-1, VOCAB_SIZE) if options["is_probability"] else target.flatten()
        found = F.cross_entropy(logits, chosen, weight, **settings)
        return (found.view(SHAPE) * scales).sum() if found.dim() else found

    plain, found = (train(net, loss, chunk)[0] for chunk in (None, options["chunk"]))
    for one, other in zip(found, plain, strict=True):
        if options["share_ignored"] < 1 or options["is_probability"] or not other.dim():
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11, equal_nan=True)
        else:  # of no token: with smoothing torch's gradient is NaN
            assert not one.any()


def test_two_heads_are_distilled_token_by_token():
    torch.manual_seed(0)
    pair = nn.ModuleDict({"student": Net(), "teacher": Net()})

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher = pair["teacher"](tokens)
        student = pair["student"](tokens)
        one = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True)
        return one + F.cross_entropy(student.flatten(0, 1), teacher.softmax(-1).flatten(0, 1))

    found, told = [], []
    for chunk in (None, CHUNK):
        handle = apply_chunked_loss(pair, chunk=chunk, tell=lambda _, why: told.append(why)) if chunk else None
        with handle.active() if handle else contextlib.nullcontext():
            value = loss(TARGET)
        value.backward()
        assert told == []
        found.append([value.detach(), *(p.grad for p in pair["student"].parameters())])
        assert all(p.grad is None for p in pair["teacher"].parameters())
        pair.zero_grad()
    assert distance(*found) < 1e-5


def test_a_retained_graph_gives_the_gradient_twice():
    torch.manual_seed(0)
    net = Net()
    handle = apply_chunked_loss(net, chunk=CHUNK)
    with handle.active():
        loss = IN_CHUNKS["view"](net(TARGET))
    loss.backward(retain_graph=True)
    once = net.head.weight.grad.clone()
    loss.backward()
    assert torch.allclose(net.head.weight.grad, 2 * once)
    assert once.shape == (VOCAB_SIZE, WIDTH)


def peak_bytes(num_tokens: int, vocab_size: int, width: int, *, is_chunked: bool) -> int:
    """Of the head and its loss alone, forward and backward; without the weight and its gradient, which both have."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size, bias=False))
    net[0].requires_grad_(requires_grad=False)
    tokens = torch.randint(vocab_size, (num_tokens + 1,))[None]
    handle = apply_chunked_loss(net) if is_chunked else None
    with track_memory(net) as tracker:
        with handle.active() if handle else contextlib.nullcontext():
            loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    return tracker.timeline.peak_bytes - 3 * net[0].weight.nbytes


def test_head_and_loss_take_a_tenth_and_twice_the_tokens_only_their_hidden_states():
    num_tokens, vocab_size, width = 2048, 5000, 16
    plain = peak_bytes(num_tokens, vocab_size, width, is_chunked=False)
    one, two = (peak_bytes(count, vocab_size, width, is_chunked=True) for count in (num_tokens, 2 * num_tokens))
    assert plain > 2.9 * num_tokens * vocab_size * 4  # logits, their logarithms and a gradient
    assert one < 0.10 * plain
    rows = find_chunk_rows("auto", torch.empty(num_tokens, width), num_tokens, vocab_size)
    hidden_bytes, chunk_bytes = num_tokens * width * 4, rows * vocab_size * 4
    assert one < 4 * chunk_bytes + 3 * hidden_bytes + 4 * vocab_size * width * 4  # the last: two gradients
    assert two - one < num_tokens * (width * 4 * 3 + 8 * 6)  # hidden states, their gradient; targets, places
