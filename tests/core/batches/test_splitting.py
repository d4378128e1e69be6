"""BatchSplitter: what is cut, what goes into every part, and what is refused."""

import gc
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_flatten, tree_leaves
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from lightning_vram.core.batches.micro_batches import combine_outputs
from lightning_vram.core.batches.splitting import BatchSplitError, BatchSplitter

HOOK = "pass split= to MicroBatching, or define split_batch(batch, size) on the LightningModule."


def split(batch, *sizes, shared_keys=()):
    return BatchSplitter(shared_keys).split(batch, sizes)


def refusal(batch, shared_keys=()):
    with pytest.raises(BatchSplitError) as caught:
        BatchSplitter(shared_keys).batch_size(batch)
    return str(caught.value)


def rows(count, *shape):
    return torch.arange(count * torch.Size(shape).numel(), dtype=torch.float32).reshape(count, *shape)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    name: str = "n"
    total: torch.Tensor = field(init=False, default=None)

    def __post_init__(self):
        object.__setattr__(self, "total", self.x * 10)


Pair = namedtuple("Pair", ["x", "text"])


X = rows(5, 2)
CONTAINERS = {
    "tensor": (X, lambda part: part),
    "tuple": ((X, torch.arange(5)), lambda part: part[0]),
    "list": ([X, torch.arange(5)], lambda part: part[0]),
    "dict": ({"x": X}, lambda part: part["x"]),
    "ordered": (OrderedDict(x=X), lambda part: part["x"]),
    "default": (defaultdict(list, x=X), lambda part: part["x"]),
    "user dict": (UserDict(x=X), lambda part: part["x"]),
    "namedtuple": (Pair(X, list("abcde")), lambda part: part.x),
    "frozen dataclass": (Frozen(X), lambda part: part.x),
    "namespace": (SimpleNamespace(x=X), lambda part: part.x),
    "BatchEncoding": (BatchEncoding({"x": X}), lambda part: part.x),
    "ModelOutput": (BaseModelOutput(last_hidden_state=X), lambda part: part.last_hidden_state),
    "nest": ({"a": [Pair((X, None), list("abcde"))], "b": X}, lambda part: part["a"][0].x[0]),
}


@pytest.mark.parametrize(("batch", "read"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_keeps_its_type_around_views(batch, read):
    first, second = split(batch, 3, 2)
    assert type(first) is type(second) is type(batch)
    assert torch.equal(read(first), X[:3])
    assert torch.equal(read(second), X[3:])
    assert read(second).data_ptr() == X[3:].data_ptr()
    (whole,) = split(batch, 5)
    assert type(whole) is type(batch)
    assert read(whole) is X
    assert whole is X or whole is not batch


def test_a_step_that_changes_its_containers_does_not_change_the_batch():
    batch = {"x": X, "meta": {"ids": list("abcde")}, "targets": [{"boxes": rows(k, 4)} for k in range(5)]}
    for sizes in ((5,), (4, 1)):
        for part in split(batch, *sizes):
            part.pop("x")
            part["meta"].pop("ids")
            part["targets"][0].pop("boxes")
    assert list(batch) == ["x", "meta", "targets"]
    assert batch["meta"] == {"ids": list("abcde")}
    assert all(list(target) == ["boxes"] for target in batch["targets"])


def test_a_dataclass_is_not_constructed_again():
    first, second = split(Frozen(X), 3, 2)
    assert torch.equal(first.total, X[:3] * 10)
    assert second.total.data_ptr() != second.x.data_ptr()
    assert second.name == "n"


def test_an_encoding_of_the_tokenizer_follows_its_rows():
    batch = BatchEncoding({"input_ids": X}, encoding=[SimpleNamespace(word=i, n_sequences=1) for i in range(5)])
    second = split(batch, 3, 2)[1]
    assert [encoding.word for encoding in second.encodings] == [3, 4]
    assert len(batch.encodings) == 5
    assert second.to("cpu").input_ids.shape == (2, 2)


def test_what_belongs_to_no_sample_goes_into_every_part():
    color = Enum("Color", "RED")
    plain = [None, 3, True, "abcde", color.RED, Path("abcde"), torch.float16, torch.Size([5])]
    small = [torch.tensor(2.0), rows(1, 2), np.zeros(()), np.bool_(1)]
    same = {f"entry {number}": value for number, value in enumerate(plain + small)}
    for part in split({"x": X} | same, 3, 2):
        assert all(part[key] is same[key] for key in same)
        assert len(part["x"]) in (3, 2)


def test_memory_format_gradient_and_class_of_tensors_survive():
    class Tagged(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # comes back plain, as torchvision's tv_tensors

    images = rows(4, 3, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
    tagged = rows(4, 2).as_subclass(Tagged)
    tagged.canvas = (7, 9)
    parts = split({"images": images, "tagged": tagged}, 3, 1)
    assert all(part["images"].is_contiguous(memory_format=torch.channels_last) for part in parts)
    assert type(parts[1]["tagged"]) is Tagged
    assert parts[1]["tagged"].canvas == (7, 9)
    for part in parts:
        part["images"].sum().backward()
    assert torch.equal(images.grad, torch.ones(4, 3, 2, 2))


PICTURES = [rows(3, 4 + k, 5) for k in range(4)]
TARGETS = [{"boxes": rows(k, 4), "labels": torch.zeros(k)} for k in (2, 0, 5, 1)]
LOADERS = {
    "detection": ((PICTURES, TARGETS), 4, lambda part: part[0][0]),
    "detection by zip": (tuple(zip(*zip(PICTURES, TARGETS, strict=True), strict=True)), 4, lambda part: part[0][0]),
    "pictures with classes": ((PICTURES, torch.arange(4)), 4, lambda part: part[0][0]),
    "pictures of two kinds": ({"rgb": PICTURES * 2, "rgba": [rows(4, 5, 5)] * 8}, 8, lambda part: part["rgb"][0]),
    "samples as they are": ([{"image": p, "of": object()} for p in PICTURES], 4, lambda part: part[0]["image"]),
    "captions": ((list("abcd"), torch.arange(4)), 4, lambda part: part[0][0]),
    "more columns than samples": ((rows(6, 3),) * 8, 6, lambda part: part[7][0]),
    "a list of integers": ([rows(6).long()] * 5, 6, lambda part: part[0][0]),
    "lists of words": ({"x": rows(4), "words": [["a", "b"], ["c"], list("abcd"), []]}, 4, lambda p: p["words"][0]),
    "columns of words": ((rows(4), [("a",) * 4, ("b",) * 4]), 4, lambda part: part[1][1][0]),
    "several crops": (([rows(6, 3, 8, 8), rows(6, 3, 4, 4)], torch.arange(6)), 6, lambda part: part[0][1][0]),
    "columns of one kind": ([rows(4, 2), rows(4, 2)], 4, lambda part: part[1][0]),
    "two loaders of one size": ({"a": (rows(4, 2), rows(4)), "b": [rows(4)]}, 4, lambda part: part["b"][0][0]),
    "one sample": ((PICTURES[:1], TARGETS[:1]), 1, lambda part: part[0][0]),
    "one sample of tensors": ({"x": rows(1, 7), "size": (224, 224), "y": rows(1)}, 1, lambda part: part["x"]),
}


@pytest.mark.parametrize(("batch", "size", "read"), LOADERS.values(), ids=LOADERS)
def test_what_loaders_yield_is_read(batch, size, read):
    splitter = BatchSplitter()
    assert splitter.batch_size(batch) == size
    first, *others = (read(part) for part in splitter.split(batch, [1] * size))
    assert len(others) == size - 1
    whole = read(batch)
    assert torch.equal(first, whole) if isinstance(first, torch.Tensor) else first == whole


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ({1, 2}, 'batch["it"] has a type that cannot be split: set, '),
        ([rows(3), rows(4)], 'batch["it"][0] has 3 rows'),
        ([object()] * 3, 'batch["it"][0] has a type that cannot be split: object, '),
        (pack_sequence([rows(3), rows(1)]), 'batch["it"] has a type that cannot be split: PackedSequence, '),
        (
            torch.nested.nested_tensor([rows(3)], layout=torch.jagged),
            'batch["it"] has a type that cannot be split: nested float32, ',
        ),
        (rows(8).to_sparse(), 'batch["it"] has a type that cannot be split: float32[8], '),
        ({"deep": (1, rows(3))}, 'batch["it"]["deep"][1] has 3 rows'),
        (Pair(rows(3), "t"), 'batch["it"].x has 3 rows'),
        (np.zeros(3), 'batch["it"] has 3 rows'),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(entry, found):
    assert refusal({"x": rows(8), "y": rows(8), "it": entry}).startswith(found)


@pytest.mark.parametrize("batch", [None, torch.tensor(1.0), [], {"rate": 0.1}, rows(0, 3)])
def test_a_batch_without_samples_is_refused(batch):
    assert refusal(batch).startswith("No entry of the batch shows how many samples it has: ")


@pytest.mark.parametrize(
    "batch",
    [
        PICTURES,
        [{"image": picture, "label": 3} for picture in PICTURES],
        [(rows(8, 3), rows(8)), (rows(8, 3), rows(8))],
        [rows(5), rows(7), rows(4)],
        ([rows(2, 3), rows(2, 3)], rows(2)),
        {"views": [rows(8), rows(8)]},
        (PICTURES[:1], [{"boxes": rows(3, 4)}]),
        [rows(5).numpy()] * 3,
    ],
)
def test_a_batch_that_can_be_read_in_two_ways_is_refused(batch):
    assert HOOK in refusal(batch)


def test_refusals_name_all_readings_and_the_way_out():
    assert refusal({"x": rows(8, 3), "class_weights": rows(10), "y": rows(8)}) == (
        f'batch["class_weights"] has 10 rows (float32[10]), but the batch has 8 samples (batch["x"] has 8 '
        f'rows). If it belongs to all samples, name it: shared_keys=["class_weights"]; if not, {HOOK}'
    )
    assert refusal([rows(100)] * 8) == (
        f"The batch layout is ambiguous: 8 samples, or 8 columns of 100. To split it, {HOOK}"
    )
    assert refusal({"x": X, "in": {"w": rows(7)}}, ["weights"]) == (
        "shared_keys names 'weights', which is not in the batch; its keys: 'x', 'in', 'w'."
    )


def test_earlier_batches_settle_a_doubt():
    splitter = BatchSplitter()
    splitter.batch_size(([rows(5, 3), rows(5, 3)], rows(5)))
    first, _ = splitter.split(([rows(2, 3), rows(2, 3)], rows(2)), [1, 1])
    assert [column.shape for column in first[0]] == [(1, 3), (1, 3)]
    splitter = BatchSplitter()
    splitter.batch_size((PICTURES, TARGETS))
    assert splitter.batch_size((PICTURES[:1], [{"boxes": rows(3, 4), "labels": rows(3)}])) == 1


def test_a_list_of_samples_of_another_number_than_before_is_refused():
    splitter = BatchSplitter()
    splitter.batch_size({"x": rows(8), "clips": [rows(k + 2) for k in range(8)]})
    with pytest.raises(BatchSplitError, match=r'^batch\["clips"\]\[0\] has 5 rows .*, but the batch has 7 samples '):
        splitter.batch_size({"x": rows(7), "y": rows(7), "clips": [rows(5), rows(6), rows(9)]})


@pytest.mark.parametrize(
    ("batch", "key", "read"),
    [
        ({"x": X, "w": rows(5)}, "w", lambda part: part["w"]),
        ({"x": X, "in": {"w": rows(7)}}, "w", lambda part: part["in"]["w"]),
        ({"x": X, "in": {"w": rows(7)}}, "in.w", lambda part: part["in"]["w"]),
        ((X, {"w": rows(7)}), "1.w", lambda part: part[1]["w"]),
        ((X, Pair(rows(7), "t")), "x", lambda part: part[1].x),
        ({"x": X, "g": object()}, "g", lambda part: part["g"]),
    ],
)
def test_shared_keys_go_into_every_part_as_they_are(batch, key, read):
    splitter = BatchSplitter([key])
    assert splitter.batch_size(batch) == 5
    assert all(read(part) is read(batch) for sizes in ((3, 2), (5,)) for part in splitter.split(batch, sizes))


def test_shared_keys_of_the_wrong_kind_are_refused():
    message = r"^shared_keys must be a list of names of entries, such as \['mask'\] or \[\] for none, got 'weights'\.$"
    with pytest.raises(TypeError, match=message):
        BatchSplitter("weights")


@pytest.mark.parametrize("sizes", [[], [4], [6, -1]])
def test_sizes_of_other_parts_are_refused(sizes):
    with pytest.raises(ValueError, match=r"^split\(sizes\) must be numbers above 0 that add up to 5, got "):
        split(X, *sizes)


def test_a_mapping_that_refuses_its_parts_is_refused():
    class Fixed(UserDict):
        def __setitem__(self, key, value):
            if self.data and len(value) != 5:
                raise RuntimeError("batch size is 5.")
            super().__setitem__(key, value)

    with pytest.raises(BatchSplitError, match=r"^A micro-batch cannot be rebuilt: batch size is 5\. "):
        split(Fixed(x=X), 3, 2)


def test_shape_keys_are_equal_for_batches_that_cost_the_same():
    key = BatchSplitter().shape_key
    assert key({"x": rows(2, 3), "t": ["a", "b"]}) == key({"x": rows(2, 3) + 1, "t": ["c", "dd"]})
    assert key({"x": rows(2, 3), "t": ["a", "b"]}) == "dict(x: float32[2, 3], t: list(2 x str))"
    others = [{"x": rows(2, 3)}, {"y": rows(2, 3)}, {"x": rows(3, 3)}, {"x": rows(2, 3).double()}, [rows(2, 3)]]
    others += [pack_sequence([rows(3), rows(1)]), object()]
    assert len({key(other) for other in others}) == len(others)


def test_elements_are_those_of_tensors_that_are_not_shared():
    count = BatchSplitter(["w"]).elements
    assert count({"x": rows(5, 2), "w": rows(5), "s": torch.tensor(1)}) == 10
    assert count({"w": 1, "x": (PICTURES, TARGETS)}) == sum(p.numel() for p in PICTURES) + 8 * 5
    assert BatchSplitter().elements({"x": rows(5), "of": object()}) == 5


@st.composite
def batches(draw, size, depth=2):
    """A batch of ``size`` samples in random containers; at least one column of tensors."""
    kinds = st.sampled_from(["rows", "integers", "texts", "none", "number", "mask", "list", "dict", "pair"])
    kind = draw(kinds if depth else st.sampled_from(["rows", "integers", "texts", "none", "number", "mask"]))
    if kind in ("list", "dict", "pair"):
        parts = [torch.randn(size, 2), *(draw(batches(size, depth - 1)) for _ in range(draw(st.integers(0, 3))))]
        made = {"list": lambda: parts, "dict": lambda: dict(zip("abcd", parts, strict=False))}
        return made.get(kind, lambda: Pair(parts[0], parts[1:]))()
    return {
        "rows": torch.randn(size, draw(st.integers(0, 3))),
        "integers": torch.arange(size),
        "texts": [str(i) for i in range(size)],
        "none": None,
        "number": draw(st.floats(-5, 5)),
        "mask": torch.randn(1, 4),
    }[kind]


def assert_same(one, other):
    (leaves, structure), (others, other_structure) = tree_flatten(one), tree_flatten(other)
    assert structure == other_structure
    for left, right in zip(leaves, others, strict=True):
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def storages(batch):
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)}


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_parts_put_together_again_are_the_batch(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    size = sum(sizes) + 20 if len(sizes) > 1 else 21  # more samples than a list here has columns
    sizes = [*sizes, size - sum(sizes)]
    batch = {"x": torch.randn(size, 2), "more": data.draw(batches(size))}
    splitter = BatchSplitter()
    assert splitter.batch_size(batch) == size
    parts = splitter.split(batch, sizes)
    assert [len(part["x"]) for part in parts] == sizes
    assert storages(parts) <= storages(batch)
    assert_same(combine_outputs(parts, sizes, [part / size for part in sizes]), batch)


def test_a_batch_whose_list_fits_in_one_way_only_is_freed_at_once():
    """Readings that do not fit leave no cycle of errors and frames, which would hold the batch and its gradients."""
    images = [torch.zeros(3, 40, 40 + index) for index in range(4)]
    batch = (images, [{"boxes": torch.zeros(1 + index, 4)} for index in range(4)])
    alive = weakref.ref(images[0])
    gc.collect()
    gc.disable()
    try:
        BatchSplitter().split(batch, [2, 2])
        del batch, images
        assert alive() is None
    finally:
        gc.enable()
