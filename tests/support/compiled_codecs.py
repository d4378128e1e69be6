"""Codecs that are compiled at once, for any number of numbers."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import pytest

from lightning_vram.core.tensors import native_codecs
from lightning_vram.core.tensors.native_codecs import NativeCodecs

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@cache
def compiled() -> NativeCodecs:
    made = native_codecs.compile_codecs()
    assert made is not None
    return made


@contextmanager
def coded_in_c() -> Generator[list[int], None, None]:
    """Code all that can be in C for a while: without, nothing that tests do is enough for that.

    Yields:
        Numbers of weights that were stepped in C.
    """
    stepped: list[int] = []

    def step_adamw(codecs, step, tensors, *options):
        stepped.append(tensors[0].numel())
        return one_call(codecs, step, tensors, *options)

    def step_split(codecs, step, tensors, *options, **others):
        stepped.append(tensors[0].numel())
        return split_call(codecs, step, tensors, *options, **others)

    one_call, split_call = NativeCodecs.step_adamw, NativeCodecs.step_split
    codecs = compiled()
    with (
        patch.object(native_codecs, "_ask", lambda count: codecs),
        patch.object(native_codecs, "LEAST", 1),
        patch.object(NativeCodecs, "step_adamw", step_adamw),
        patch.object(NativeCodecs, "step_split", step_split),
    ):
        yield stepped
