"""A run beside the user's own, which leaves no trace: no words, no draws of random numbers, no switches."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng

_TALKERS = ("lightning.pytorch", "lightning.fabric", "lightning_vram")


@contextmanager
def isolated() -> Iterator[None]:
    """Run a Trainer inside the block as if nobody had: what it says and switches ends with the block."""
    with ExitStack() as stack:
        stack.enter_context(isolate_rng())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in _TALKERS:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        _keep_environment(stack)
        _keep_switches(stack)
        yield


def _keep_environment(stack: ExitStack) -> None:
    before = dict(os.environ)

    def restore() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)

    stack.callback(restore)


def _keep_switches(stack: ExitStack) -> None:
    known = vars(rank_zero_only)
    if "rank" in known:
        stack.callback(known.__setitem__, "rank", known["rank"])
    is_deterministic, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    stack.callback(torch.use_deterministic_algorithms, is_deterministic, warn_only=warns)
    stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    stack.callback(torch.set_num_threads, torch.get_num_threads())
