"""A run inside the user's own that leaves no trace: no output, no random numbers drawn, no settings changed."""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from lightning.pytorch.utilities.rank_zero import WarningCache, rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_vram.private_names.torch.fakes import disconnected

_TALKERS = ("lightning.pytorch", "lightning.fabric", "lightning_vram")


@contextmanager
def isolated(*, is_connected: bool = False) -> Iterator[None]:
    """Run a Trainer inside the block that leaves no trace: its output and settings end with it.

    Only with ``is_connected`` it sees the process groups of this process. Ctrl-C is a ``KeyboardInterrupt``, and works
    again afterwards: a Trainer turns it into ``SystemExit``, and ignores it from then on.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        with _state_restored(is_connected=is_connected):
            yield
    except SystemExit as end:
        if not isinstance(end.__context__, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, handler)
        raise end.__context__ from None


@contextmanager
def _state_restored(*, is_connected: bool) -> Iterator[None]:
    with ExitStack() as stack:
        random_numbers = isolate_rng()
        random_numbers.__enter__()
        stack.callback(random_numbers.__exit__, None, None, None)  # which restores nothing if it sees an error
        _restore_registries(stack)
        stack.enter_context(warnings.catch_warnings(record=True))  # also what a filter of the user's code lets through
        warnings.simplefilter("ignore")
        for name in _TALKERS:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        _silence_first_times(stack)
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.clear)
        _restore_switches(stack)
        if not is_connected:
            stack.enter_context(disconnected())
        yield


def _silence_first_times(stack: ExitStack) -> None:
    """What is said once in a process is not said here, nor noted as said: the run has yet to say it."""
    once = [name for name in dir(logging.Logger) if name.endswith("_once")]  # of transformers, for one
    for owner, names in ((WarningCache, ("warn", "deprecation", "info")), (logging.Logger, once)):
        for name in names:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, lambda *_, **__: None)
    stack.callback(torch.set_warn_always, torch.is_warn_always_enabled())
    torch.set_warn_always(True)


def _restore_registries(stack: ExitStack) -> None:
    """Keep Python's own notes of what it has warned of, which any change of filters makes void."""
    owners = [vars(module) for module in [*sys.modules.values()] if hasattr(module, "__dict__")]
    registries = [warnings.onceregistry, *(owner.get("__warningregistry__") for owner in owners)]  # type: ignore[attr-defined]
    version = _version_of_filters()
    valid = [(one, dict(one)) for one in registries if isinstance(one, dict) and one.get("version") == version]

    def restore() -> None:
        now = _version_of_filters()
        for registry, said in valid:
            registry.clear()
            registry.update(said, version=now)

    stack.callback(restore)


def _version_of_filters() -> int:
    """Return how often filters have changed, which a warning notes in its registry."""
    registry: dict[str, int] = {}
    shown, warnings.showwarning = warnings.showwarning, lambda *_, **__: None
    try:
        warnings.warn_explicit("", _Probe, "", 0, registry=registry)  # type: ignore[arg-type]
    except _Probe:  # the user's filters make errors of warnings
        pass
    finally:
        warnings.showwarning = shown
        warnings.onceregistry.pop(("", _Probe), None)  # type: ignore[attr-defined]
    return registry["version"]


class _Probe(Warning):
    """Shown to nobody."""


def _restore_switches(stack: ExitStack) -> None:
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
