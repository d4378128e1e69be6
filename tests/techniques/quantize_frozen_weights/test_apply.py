"""Layers with weights in few bits compute what layers with the decoded weights do; nothing of these is kept."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from support.lora_nets import LENGTH, NUM_QUANTIZED, QUANTIZED, VOCAB_SIZE, LoRA, LoRANet
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.private_names.fsdp2 import shards_integers
from lightning_vram.techniques.quantize_frozen_weights import (
    dequantize_frozen_weights,
    quantize_frozen_weights,
    quantized_weight,
)


@pytest.fixture(params=[8, 4])
def bits(request):
    return request.param


@pytest.fixture
def pair(bits):
    """A model with weights in few bits, and one that has these weights in full."""
    return make_pair(LoRANet(), bits)


def make_pair(model, bits, **options):
    quantize_frozen_weights(model, bits, **options)
    return model, decoded(model)


def decoded(model):
    plain = copy.deepcopy(model)
    quantize_frozen_weights(plain, next(packing_of(model)).bits).remove()
    return plain


def packing_of(model):
    return (weight.form.packing for layer in model.modules() if (weight := quantized_weight(layer)) is not None)


def tokens():
    return torch.randint(VOCAB_SIZE, (4, LENGTH))


def train(model, batch, forward=None):
    output = (model if forward is None else forward)(batch)
    output.float().square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    model.zero_grad()
    return [output, *gradients]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def hf_conv1d():
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(64, 64)


LAYERS = {
    "linear": (lambda: nn.Linear(64, 64), (2, 3, 64)),
    "linear without bias": (lambda: nn.Linear(65, 70, bias=False), (5, 65)),
    "conv1d": (lambda: nn.Conv1d(32, 64, 3, stride=2, padding_mode="circular", padding=1), (2, 32, 9)),
    "conv2d": (lambda: nn.Conv2d(32, 64, 3, groups=4, padding="same"), (2, 32, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(16, 16, 3, dilation=2), (2, 16, 6, 6, 6)),
    "Conv1D of transformers": (hf_conv1d, (2, 3, 64)),
}


@pytest.mark.parametrize("make", [*LAYERS.values(), (LAYERS["linear"][0], (64,))], ids=[*LAYERS, "one row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast"], ids=str)
def test_a_layer_computes_with_the_decoded_weight(make, dtype, bits):
    is_autocast = dtype == "autocast"
    model, plain = make_pair(nn.Sequential(make[0]().requires_grad_(False)), bits)
    if not is_autocast:
        model.to(dtype)
        plain.to(dtype)
        assert model[0].weight.dtype is dtype
    numbers = torch.randn(make[1], dtype=torch.float32 if is_autocast else dtype)
    results = []
    for one in (model, plain):
        given = numbers.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            output = one(given)
        (gradient,) = torch.autograd.grad(output.float().square().sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), given)
        results.append([output, gradient, second])
    assert_same(*results)


@pytest.mark.parametrize("width", [64, 48], ids=["blocks within rows", "blocks across rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_looks_up_decoded_rows(width, dtype, bits):
    model, plain = make_pair(nn.Sequential(nn.Embedding(100, width, padding_idx=0).requires_grad_(False)), bits)
    indices = torch.randint(100, (3, 5))
    assert torch.equal(model.to(dtype)(indices), plain.to(dtype)(indices))
    assert model(indices).dtype is dtype
    for key in (3, slice(2, 5), indices, torch.arange(100) > 90):
        assert torch.equal(model[0].weight[key], plain[0].weight[key])


@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_model_with_adapters_trains_as_one_with_the_decoded_weights(is_autocast, pair):
    batch = tokens()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        assert_same(*(train(one, batch) for one in pair))


@pytest.mark.slow
def test_compiled_without_a_break_it_does_the_same_and_keeps_no_weight():
    pair, batch = make_pair(LoRANet(), 4), tokens()
    torch._dynamo.reset()
    compiled = [torch.compile(one, backend="aot_eager_decomp_partition", fullgraph=True) for one in pair]
    ours, theirs = (train(one, batch, each) for one, each in zip(pair, compiled, strict=True))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    bases = {layer.weight.numel() for name, layer in pair[1].named_modules() if name in QUANTIZED and name != "embed"}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        compiled[0](batch)
    assert any(tensor is pair[0].conv.weight.held for tensor in saved)  # the bytes, which are there anyway
    assert [tensor.shape for tensor in saved if type(tensor) is torch.Tensor and tensor.numel() in bases] == []


def live_bytes(model, *, is_autocast=False):
    with track_memory(model) as tracker, torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        output = model(tokens())
    del output
    return sum(event.change_bytes for event in tracker.timeline.events)


@pytest.mark.parametrize("share", [(8, 0.265625), (4, 0.140625)], ids=str)
def test_bytes_of_weights_and_of_a_forward(share):
    model = LoRANet()
    adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    plain = copy.deepcopy(model)
    quantized = quantize_frozen_weights(model, share[0])
    assert quantized.names == QUANTIZED
    assert sum(weight.packed.nbytes for weight in quantized.weights()) == share[1] * 4 * NUM_QUANTIZED
    others = sum(p.nbytes for n, p in plain.named_parameters() if p.dim() == 1)
    assert sum(p.nbytes for p in model.parameters()) == adapters + others + share[1] * 4 * NUM_QUANTIZED
    saved = 4 * NUM_QUANTIZED - share[1] * 4 * NUM_QUANTIZED
    # What is alive after a forward: the weights are all that differs, and no cast is kept, either.
    assert live_bytes(model) == live_bytes(plain) - saved
    assert live_bytes(model, is_autocast=True) < live_bytes(plain, is_autocast=True) - saved


@pytest.mark.parametrize(("bits", "least"), [(8, 0.99), (4, 0.97)])
def test_gradients_of_adapters_point_where_they_did(bits, least):
    torch.manual_seed(0)
    plain = LoRANet()
    nn.init.normal_(plain.up.lora_B.weight, std=0.1)
    model = copy.deepcopy(plain)
    quantize_frozen_weights(model, bits)
    batch = tokens()
    _, *ours = train(model, batch)
    _, *theirs = train(plain, batch)
    ours, theirs = (torch.cat([gradient.flatten() for gradient in each]) for each in (ours, theirs))
    assert F.cosine_similarity(ours, theirs, 0) >= least


def test_copies_and_pickles_are_quantized_and_independent(pair):
    model, plain = pair
    batch = tokens()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(train(twin, batch), train(plain, batch))
        twin.load_state_dict(LoRANet().state_dict())
        assert twin.head.weight.held is not model.head.weight.held
        quantize_frozen_weights(twin, model.head.weight.form.packing.bits).remove()
        assert type(twin.head.weight) is nn.Parameter
    assert_same(train(model, batch), train(plain, batch))
    for copied in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):  # parameters without their model
        assert_same(copied(list(model.parameters())), list(plain.parameters()))


def test_tied_layers_stay_tied(bits):
    model = LoRANet()
    model.head.weight = model.embed.weight
    quantized = quantize_frozen_weights(model, bits)
    assert model.head.weight.held is model.embed.weight.held
    assert len(list(quantized.weights())) == 4
    assert_same(train(model, batch := tokens()), train(decoded(model), batch))
    quantized.remove()
    assert model.head.weight is model.embed.weight


def test_removed_it_is_plain_and_has_what_was_decoded(pair):
    model, plain = pair
    before = {name: type(part) for name, part in LoRANet().named_modules()}
    quantized = quantize_frozen_weights(model, model.head.weight.form.packing.bits)
    quantized.remove()
    quantized.remove()
    assert {name: type(part) for name, part in model.named_modules()} == before
    assert vars(model.head).keys() == vars(LoRANet().head).keys()
    assert [name for name, _ in model.named_buffers()] == []
    assert not model.head._load_state_dict_pre_hooks
    assert not model.head._non_persistent_buffers_set
    for (name, ours), (other, theirs) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs)


READS = {
    "T": lambda weight: torch.ones(2, 64) @ weight.T,
    "matmul": lambda weight: torch.ones(2, 96) @ weight,
    "__getitem__": lambda weight: weight[0, 0],
    "cat": lambda weight: torch.cat([torch.ones(2, 64), weight]),
    "linear": lambda weight: F.linear(weight, torch.ones(2, 64)),
    "data": lambda weight: weight.data.pow(2).sum(),
    "numpy": lambda weight: torch.from_numpy(weight.detach().cpu().numpy()),
    "foreach": lambda weight: torch.stack(torch._foreach_norm([weight])),
    "average": lambda weight: torch.zeros(96, 64).lerp_(weight, 0.5),
    "vector": lambda weight: nn.utils.parameters_to_vector([weight]),
    "svd_lowrank": lambda weight: (torch.manual_seed(0), torch.svd_lowrank(weight, 4)[1])[1],
    "shape": lambda weight: torch.tensor([*weight.shape, weight.numel(), weight.ndim, weight.element_size()]),
}


@pytest.mark.parametrize("name", READS)
def test_who_reads_a_weight_elsewhere_reads_what_it_stands_for(name, pair):
    ours, theirs = (dict(one.named_parameters())["head.weight"] for one in pair)
    assert (ours.shape, ours.dtype, repr(ours), ours.requires_grad) == (theirs.shape, theirs.dtype, repr(theirs), False)
    for weight in (ours, pair[0].head.weight):
        assert isinstance(weight, nn.Parameter)
        assert torch.equal(READS[name](weight), READS[name](theirs))


def test_a_weight_that_functional_call_sets_is_the_weight(pair):
    given = {name: p.detach().clone() for name, p in pair[1].named_parameters()}
    assert torch.equal(*(torch.func.functional_call(one, given, (tokens().fill_(3),)) for one in pair))


WRITES = {
    "mul_": lambda weight: weight.mul_(2),
    "add_": lambda weight: weight.data.add_(1),
    "__setitem__": lambda weight: weight.__setitem__(0, 1.0),
    "sub_": lambda weight: weight.__isub__(1),
    "_foreach_mul_": lambda weight: torch._foreach_mul_([weight], 2),
    "normal_": lambda weight: nn.init.normal_(weight),
    "data": lambda weight: setattr(weight, "data", torch.ones(96, 64)),
    "lerp": lambda weight: torch.lerp(weight, torch.ones(96, 64), 0.1, out=weight),
    "min": lambda weight: torch.min(torch.ones(2, 64), 0, out=(weight.data, torch.tensor(0))),
    "relu": lambda weight: F.relu(weight, inplace=True),
    "requires_grad_": lambda weight: weight.requires_grad_(),
    "requires_grad": lambda weight: setattr(weight, "requires_grad", True),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_would_change_a_weight_is_refused(name, pair):
    message = (
        f"the weight of 'head' is quantized to {pair[0].head.weight.form.packing.bits} bits, and {name!r} would change "
        "it: "
        "call dequantize_frozen_weights(model) first, or exclude the layer with layers=."
    )
    for weight in (pair[0].head.weight, dict(pair[0].named_parameters())["head.weight"]):
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
            WRITES[name](weight)
        assert weight.requires_grad_(False) is weight  # whoever freezes all may go on
    assert torch.equal(pair[0].head.weight.dequantize(), pair[1].head.weight)


REPLACE = {
    "parametrize": parametrizations.weight_norm,
    "prune": partial(prune.random_structured, name="weight", amount=0.5, dim=0),
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("module", REPLACE)
def test_what_would_replace_a_weight_is_refused(module, pair):
    with pytest.raises(
        RuntimeError, match=rf"^the weight of 'head' is quantized to . bits, and 'torch\.nn\.utils\.{module}'"
    ):
        REPLACE[module](pair[0].head)


def test_dequantized_in_place_a_model_takes_what_it_refused(pair):
    model, _ = pair
    assert dequantize_frozen_weights(model) == QUANTIZED
    assert dequantize_frozen_weights(model) == []
    for one in pair:
        one.head.weight.data.mul_(2)
    assert_same(*(list(one.state_dict().values()) for one in pair))
    assert vars(model.head).keys() == vars(LoRANet().head).keys()


def test_layers_are_chosen_by_name_and_what_is_trained_inside_is_left(bits):
    model = LoRANet()
    assert quantize_frozen_weights(model, bits, layers=["up", "head"]).names == ["up.base_layer", "head"]
    assert quantized_weight(model.down.base_layer) is None
    assert quantize_frozen_weights(LoRANet(), bits, layers=LoRA).names == ["up.base_layer", "down.base_layer"]


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.trained = nn.Linear(64, 64)
        self.drawn = parametrizations.weight_norm(nn.Linear(64, 64)).requires_grad_(False)
        self.attention = nn.MultiheadAttention(64, 2).requires_grad_(False)
        self.renormed = nn.Embedding(64, 64, max_norm=1).requires_grad_(False)
        self.small = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.LayerNorm(64).requires_grad_(False)
        self.double = nn.Linear(64, 64).double().requires_grad_(False)
        self.tied = nn.Linear(64, 64).requires_grad_(False)
        self.holder = nn.ParameterList([self.tied.weight])
        self.block = nn.Sequential(nn.Linear(64, 64))


NOTHING = "has nothing to quantize: "
WHY_NOT = {
    "trained": f"{NOTHING}its weight is trained: freeze it with requires_grad_(False), or name other layers.",
    "drawn": f"{NOTHING}its weight is parametrized, so it is computed from others.",
    "attention.out_proj": f"{NOTHING}nn.MultiheadAttention reads its weight without calling it.",
    "renormed": f"{NOTHING}its max_norm writes to its weight.",
    "small": f"{NOTHING}its weight has fewer than 4096 numbers.",
    "norm": f"{NOTHING}it is a LayerNorm, not a linear layer, a convolution or an embedding.",
    "double": f"{NOTHING}its weight is a Parameter of torch.float64.",
    "tied": "shares its weight with a module that is not quantized: name other layers.",
    "block": f"{NOTHING}it is a",
}


@pytest.mark.parametrize("name", WHY_NOT)
def test_what_cannot_be_quantized_is_named_or_left_alone(name):
    model = Odd()
    with pytest.raises(ValueError, match=f"^{re.escape(f'layers={name!r} names {name!r}, which {WHY_NOT[name]}')}"):
        quantize_frozen_weights(model, layers=name)
    assert quantize_frozen_weights(model).names == []


@pytest.mark.distributed
@pytest.mark.skipif(not shards_integers, reason="FSDP2 shards integers as of torch 2.13")
def test_what_is_sharded_before_is_named_and_what_is_sharded_after_is_read_in_full(mesh):
    message = (
        "'embed' cannot be quantized: its weight is sharded already. Make and freeze the layer in __init__, or call "
        "quantize_frozen_weights(self, ...) in configure_model before fully_shard."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        quantize_frozen_weights(fully_shard(LoRANet(), mesh=mesh))
    model = LoRANet()
    quantized = quantize_frozen_weights(model, 4)
    before = model.head.weight.dequantize()
    fully_shard(model, mesh=mesh)
    assert model.head.weight.is_sharded
    assert torch.equal(model.head.weight.dequantize(), before)
    quantized.remove()
    assert model.head.weight.is_sharded  # nobody can put plain weights into the hands of FSDP2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("assign", [False, True])
def test_plain_checkpoints_load_as_if_they_had_been_loaded_before(dtype, assign, bits):
    other = LoRANet().to(dtype)
    model, before = LoRANet(), LoRANet()
    before.load_state_dict(other.state_dict())
    quantize_frozen_weights(before, bits)
    quantize_frozen_weights(model, bits)
    assert model.load_state_dict(other.state_dict(), assign=assign) == ([], [])
    assert_same(*(list(one.state_dict().values()) for one in (before, model.float())))
    assert torch.equal(*(one(tokens().fill_(3)) for one in (before, model)))
    again = LoRANet()
    quantize_frozen_weights(again, bits)
    again.load_state_dict(model.state_dict())
    assert_same(*(list(one.state_dict().values()) for one in (again, model)))


def test_a_checkpoint_of_other_blocks_is_refused():
    model, saved = LoRANet(), LoRANet()
    quantize_frozen_weights(model, 8)
    quantize_frozen_weights(saved, 4, block_size=32)
    with pytest.raises(
        RuntimeError, match=r"size mismatch for embed\.weight: .* with bits=8, block_size=64\. A quantized"
    ):
        model.load_state_dict(saved.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for head.weight: .*\[96, 32\].*\[96, 64\]"):
        model.load_state_dict({**LoRANet().state_dict(), "head.weight": torch.ones(96, 32)})


def test_loading_never_has_more_than_one_layer_in_full(bits, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_vram.techniques.quantize_frozen_weights.packing._PART", 4096)

    def make():
        return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8))).requires_grad_(False)

    torch.save(make().state_dict(), tmp_path / "full.pt")
    with torch.device("meta"):
        model = make()
    with track_memory() as tracker:
        quantize_frozen_weights(model, bits, give_memory=lambda layer: layer.to_empty(device="cpu"))
        model.load_state_dict(torch.load(tmp_path / "full.pt", mmap=True))
    packed = sum(parameter.nbytes for parameter in model.parameters())
    largest, part = 4 * 128 * 128, 8 * 4 * 4096  # bytes: of a layer, and of what is worked on
    assert packed == 8 * (64 * 64 // 64 * 4) * (bits * 8 + 4)
    assert tracker.timeline.peak_bytes <= packed + largest + part
