"""A run beside the user's own, which leaves no trace: no words, no draws of random numbers, no switches."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_vram.private_names.lightning.loops import AutomaticOptimization
from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.private_names.torch.distributed import disconnected

_TALKERS = ("lightning.pytorch", "lightning.fabric", "lightning_vram")
_FAKES = logging.getLogger(FakeTensor.__module__)


@contextmanager
def isolated(*, is_connected: bool = False) -> Iterator[None]:
    """Run a Trainer inside the block as if nobody had: what it says and switches ends with the block.

    Args:
        is_connected: Whether the block sees the process groups of this process.
    """
    with ExitStack() as stack:
        stack.enter_context(isolate_rng())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in _TALKERS:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        stack.callback(_FAKES.setLevel, _FAKES.level)
        _FAKES.setLevel(logging.CRITICAL)  # it shows errors that are caught
        _keep_environment(stack)
        _keep_switches(stack)
        _keep_warnings_to_come(stack)
        if not is_connected:
            stack.enter_context(disconnected())
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


def _keep_warnings_to_come(stack: ExitStack) -> None:
    """Lightning warns once of each thing: what it keeps to itself here is still to be said."""
    modules = [module for name, module in sys.modules.items() if name.startswith("lightning.")]
    for owner in (AutomaticOptimization, *modules):
        said = getattr(owner, "warning_cache", None)
        if isinstance(said, set):
            stack.callback(_set_back, said, set(said))


def _set_back(values: set[str], before: set[str]) -> None:
    values.clear()
    values.update(before)
