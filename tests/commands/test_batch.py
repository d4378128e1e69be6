"""Batches out of shapes on the command line."""

import re

import pytest
import torch

from lightning_vram.commands.run import make_batch


def test_several_tensors_of_their_own_dtypes():
    assert make_batch([8, 3]).dtype is torch.float32
    assert make_batch([8], "uint8", 256).dtype is torch.uint8
    images, labels = make_batch([[8, 3, 4, 4], [8]], ["bfloat16", "int64"], high=1000)
    assert (images.dtype, labels.dtype) == (torch.bfloat16, torch.int64)
    assert images.shape == (8, 3, 4, 4)
    assert labels.shape == (8,)


def test_nests():
    batch = make_batch(
        {"tokens": [2, 9], "views": [[2, 3], [2, 4]], "mask": [2, 9]},
        {"tokens": "int64", "views": "float16", "mask": "bool"},
        {"tokens": 50, "views": 2, "mask": 2},
    )
    assert list(batch) == ["tokens", "views", "mask"]
    assert batch["mask"].dtype is torch.bool
    assert [view.shape for view in batch["views"]] == [(2, 3), (2, 4)]
    assert isinstance(batch["views"], tuple)


def test_whole_numbers_are_drawn_below_the_given_one():
    tokens = make_batch([10_000], "int64", high=7)
    assert set(tokens.tolist()) == set(range(7))
    assert set(make_batch([100], "int64").tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (8,),
            "batch.shape must be sizes, as in '[8, 3, 224, 224]', or several of them, as in '[[8, 3, 224, 224], [8]]' "
            "or '{tokens: [8, 1024]}', got 8.",
        ),
        (([8, "a"],), "batch.shape must be an int, got 'a' of type str."),
        (([8, [3]],), "batch.shape must be an int, got [3] of type list."),
        (([8, -1],), "batch.shape must be at least 1, got -1."),
        (
            ([8], "float31"),
            "batch.dtype must be 'float32', 'float16', 'bfloat16', 'float64', 'int64', 'int32', 'int16', 'int8', "
            "'uint8' or 'bool', got 'float31'.",
        ),
        (([8], "int64", 0), "batch.high must be at least 1, got 0."),
        (([8], "uint8", 257), "batch.high is 257, more than uint8 can hold."),
        (([[8], [8]], ["int64"]), "batch.dtype has no entry for tensor 1 of batch.shape, got ['int64']."),
        (({"a": [8]}, {"b": "bool"}), "batch.dtype has no entry for tensor 'a' of batch.shape, got {'b': 'bool'}."),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        make_batch(*arguments)
