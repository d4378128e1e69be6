"""Checkpoints of a sharded run, and its averages of weights.

After an interrupted save, the last good checkpoint of that name can be loaded. An error of one rank is raised on all.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.core.ranks import current_rank, gather_objects, num_ranks, on_all_ranks
from lightning_vram.optimizers.averages import HostAverage
from lightning_vram.optimizers.moment_forms import StateLayout, find_layout, is_elementwise
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.private_names.lightning import averaging_callbacks, is_local, load_on_host, save_whole
from lightning_vram.strategies.fsdp_offload.base import BaseStrategy
from lightning_vram.techniques.sharded_checkpoints import (
    MODULE_STATES,
    Pairs,
    ShardedFolder,
    check_archive,
    explained,
    first_names,
    gather_module_state,
    gather_optimizer_state,
    load_module_state,
    load_optimizer_state,
    match_parameters,
    prepare_path,
    read_values,
    read_whole,
    recover,
    remove,
    sharded_module_state,
    sharded_optimizer_state,
    snapshot,
    write_file,
    write_folder,
)

_WAY_OUT = "Return the optimizer the checkpoint was saved with: the same parameters, in the same order."
_PLAIN = {"capturable": False, "differentiable": False, "foreign": False, "fused": False}  # kernels change no state


def check_states(module: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any], index: int) -> None:
    """Compare shapes and names with the parameters; states of unknown optimizers are not checked.

    ``torch.optim`` only counts parameters, but fused kernels trust the shapes: with states of other parameters they
    write out of bounds. ``state_dict`` has a number for each parameter, in their order.
    """
    names = first_names(module)
    for place, (group, saved) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"], strict=True)):
        _check_names(group, saved, f"group {place} of optimizer {index}")
        if not is_elementwise(type(optimizer)):
            continue
        layout = find_layout(optimizer, {**group, **saved, **_PLAIN}, torch.float32)  # for its names
        for number, (key, parameter) in enumerate(zip(saved["params"], group["params"], strict=True)):
            complaint = _compare(state_dict["state"].get(key, {}), parameter, layout)
            if complaint:
                name = names.get(id(parameter), f"parameter {number} in group {place}")
                raise ValueError(
                    f"The checkpoint's state of {name} in optimizer {index} does not suit {type(optimizer).__name__}: "
                    f"{complaint}. {_WAY_OUT}"
                )


def _check_names(group: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    own_names, saved_names = group.get("param_names"), saved.get("param_names")
    if own_names and saved_names and list(own_names) != list(saved_names):
        own, other = next(pair for pair in zip(own_names, saved_names, strict=True) if pair[0] != pair[1])
        raise ValueError(f"The checkpoint has {other} where {where} has {own}. {_WAY_OUT}")


def _compare(state: Mapping[str, Any], parameter: Tensor, layout: StateLayout) -> str | None:
    elementwise = [name for name, _ in layout.elementwise]
    for name in (*elementwise, *layout.others) if state else ():
        if name not in state:
            return f"it has no {name}"
        value = state[name]
        if name in elementwise and isinstance(value, Tensor) and value.shape != parameter.shape:
            return f"its {name} has shape {list(value.shape)}, the parameter {list(parameter.shape)}"
    return None


def write_checkpoint(
    checkpoint: Mapping[str, Any], location: str, *, sharded: bool, group: dist.ProcessGroup | None
) -> None:
    """Replace the checkpoint at a path, or remote address, that is the same on every rank. A collective.

    On error, nothing changes at the path. A thread needs its own ``group``.
    """
    failed = f"The checkpoint {location} could not be saved"

    def on_main(action: Callable[[], None]) -> None:
        on_all_ranks(action if current_rank() == 0 else lambda: None, failed, group)

    if not is_local(location):
        on_main(lambda: save_whole(dict(checkpoint), location))
        return
    path = local_path(location)
    on_main(lambda: prepare_path(path))
    if sharded:
        on_all_ranks(partial(write_folder, checkpoint, path, group), failed, group)
    else:
        on_main(lambda: write_file(dict(checkpoint), path))


def remove_checkpoint(location: str) -> None:
    """Delete a checkpoint if it exists, or warn."""
    try:
        if is_local(location):
            remove(local_path(location))
        elif (files := get_filesystem(location)).exists(location):
            files.rm(location, recursive=True)
    except OSError as error:
        warnings.warn(f"The checkpoint {location} could not be removed: {error}.", stacklevel=3)


def local_path(location: str) -> Path:
    """Convert an address without a protocol, or with ``file://``, to a path."""
    return Path(location.removeprefix("file://"))


PathLike = str | os.PathLike[str]


class CheckpointStore:
    """Full or sharded checkpoints. All ranks make the same calls.

    With ``asynchronous``, a thread saves a copy in host memory; its error is raised by the next call. ``timeout``: of
    ranks in that thread; ``None``: as ``torch.distributed``. ``verify``: compare checksums when opening.
    """

    def __init__(
        self, *, sharded: bool, asynchronous: bool, timeout: timedelta | None = None, verify: bool = True
    ) -> None:
        self._sharded = sharded
        self._verify = verify
        self._saving = ""  # the location of the pending save
        self._jobs: list[Future[None]] = []  # the pending save, and removals after it
        self._states: dict[str, Any] = {}  # of the opened folder
        self._read: Callable[[Pairs], None] = read_whole  # tensors of the opened checkpoint
        self._threads = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        # Two threads on one gloo group mix up their messages and abort the process.
        is_distributed = dist.is_available() and dist.is_initialized()
        self._group = dist.new_group(backend="gloo", timeout=timeout) if asynchronous and is_distributed else None

    def save(self, checkpoint: Mapping[str, Any], path: PathLike) -> None:
        """Save a checkpoint of Lightning at rank 0's path, with states that are sharded or gathered. A collective."""
        self.wait()
        location = gather_objects(str(path))[0]
        if self._sharded and not is_local(location):
            raise ValueError(f"Sharded checkpoints need a local path, got {location!r}. Save full checkpoints there.")
        if self._threads is None:
            write_checkpoint(checkpoint, location, sharded=self._sharded, group=None)
            return
        gathered = () if self._sharded else (*MODULE_STATES, "optimizer_states")  # which are copies
        copied = on_all_ranks(
            lambda: {key: value if key in gathered else snapshot(value) for key, value in checkpoint.items()},
            f"The checkpoint {location} could not be copied",
        )
        job = self._threads.submit(write_checkpoint, copied, location, sharded=self._sharded, group=self._group)
        self._saving, self._jobs = location, [job]

    def open(self, path: PathLike, *, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, its tensors mapped from the file; of a folder, all but the states. A collective."""
        self.wait()
        self._states, self._read = {}, read_whole
        location = gather_objects(str(path))[0]
        failed = f"The checkpoint {location} could not be read"
        local = local_path(location)
        if not is_local(location):
            # By default, Lightning reads http addresses with weights_only=False.
            load = partial(load_on_host, location, weights_only=True if weights_only is None else weights_only)
            read = partial(explained, load, location)
        else:
            on_all_ranks(lambda: recover(local) if current_rank() == 0 else None, failed)
            if local.is_dir():
                folder = ShardedFolder(local, weights_only=weights_only, verify=self._verify)
                rest = folder.read_rest()
                self._states, self._read = folder.read_states(), folder.read_tensors
                return {**rest, "optimizer_states": []} if "optimizer_states" in self._states else rest
            if self._verify:
                on_all_ranks(lambda: check_archive(local, current_rank(), num_ranks()), failed)
            read = partial(read_values, local, weights_only=weights_only)
        checkpoint: dict[str, Any] = on_all_ranks(read, failed)
        return checkpoint

    def load_module(
        self, checkpoint: Mapping[str, Any], module: nn.Module, *, strict: bool, key: str = "state_dict"
    ) -> None:
        """Load a module in place from the opened checkpoint; on error nothing changes. A collective."""
        state = (self._states or checkpoint).get(key)
        if not isinstance(state, Mapping):
            raise ValueError("The file is not a Trainer checkpoint: it has no state_dict.")
        load_module_state(module, state, strict=strict, read=self._read)

    def load_optimizers(
        self, checkpoint: Mapping[str, Any], module: nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        """Load optimizers, in the saved order, from the opened checkpoint; on error nothing changes. A collective."""
        states = (self._states or checkpoint).get("optimizer_states") or []
        if len(states) != len(optimizers):
            raise ValueError(
                f"The checkpoint has the state of {len(states)} optimizers, but configure_optimizers returned "
                f"{len(optimizers)}; save_weights_only=True saves none."
            )
        states = [match_parameters(module, *pair) for pair in zip(optimizers, states, strict=True)]
        for index, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
            check_states(module, optimizer, state, index)
        for optimizer, state in zip(optimizers, states, strict=True):
            load_optimizer_state(optimizer, state, read=self._read)

    def remove(self, path: PathLike) -> None:
        """Delete a checkpoint if it exists; during a save, once that has succeeded."""
        location = str(path)
        if self._saving == location:
            self.wait()
        if current_rank() != 0:
            return
        if self._jobs and self._threads is not None:
            self._jobs.append(self._threads.submit(_remove_after, self._jobs[0], location))
        else:
            remove_checkpoint(location)

    def wait(self) -> None:
        """Wait for a pending save, and raise its error."""
        jobs, self._jobs, self._saving = self._jobs, [], ""
        for job in reversed(jobs):  # removals first: they never fail
            job.result()


def _remove_after(written: Future[None], location: str) -> None:
    if written.exception() is None:
        remove_checkpoint(location)


_AVERAGE, _CURRENT = MODULE_STATES
_REST = "averaging_state"  # key of other values of an average in a checkpoint


class CheckpointedStrategy(BaseStrategy):
    """A strategy with a sharded module, and full or sharded checkpoints."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._host_optimizers: HostOptimizers | None = None
        self._store: CheckpointStore | None = None
        self._to_load: tuple[Mapping[str, Any], bool] | None = None
        self._averages: list[HostAverage] = []  # of callbacks, which copy the module before it is sharded
        self._callback_patches: list[MethodPatch] = []

    def _finish_steps(self) -> None:
        if self._host_optimizers is not None:
            self._host_optimizers.finish()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._store is None:
            with self._named("setup"):
                self._store = self._make_store(asynchronous=self.arguments.async_save)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._finish_steps()
        state = self._gather_state(self.lightning_module)
        for group in self._sharding.groups if self._sharding is not None else ():
            if group.is_sharded:
                group.steps.rest()  # frees memory in which shards were read
        return state

    def _gather_state(self, module: nn.Module) -> dict[str, Any]:
        with self._named("gathering a checkpoint"):
            is_sharded = self.arguments.state_dict_type == "sharded"
            return sharded_module_state(module) if is_sharded else gather_module_state(module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._finish_steps()
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        with self._named("gathering a checkpoint"):
            if self.arguments.state_dict_type == "sharded":
                return sharded_optimizer_state(self.lightning_module, optimizer)
            return gather_optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("FSDPOffloadStrategy.save_checkpoint(storage_options=...) is not supported: leave it out.")
        if self._store is None and self.world_size > 1:
            raise MisconfigurationException(
                f"Trainer.save_checkpoint: the {self.world_size} processes connect in the first fit, validate, test or "
                "predict. Save after that, or save module.state_dict()."
            )
        with self._named("saving a checkpoint"):
            # before the first run there is nothing to overlap with
            store = self._store or self._make_store(asynchronous=False)
            store.save(checkpoint, filepath)
            trainer = self._trainer
            if trainer is None or trainer.state.status != TrainerStatus.RUNNING:  # the next run may resume from it
                store.wait()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self._store is not None
        with self._named("loading a checkpoint"):
            return self._store.open(checkpoint_path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Lightning calls this before the setup, as for one device: a later call would lose the user's weights_only.
        self._to_load = checkpoint, strict
        for callback in averaging_callbacks(self._trainer):
            if type(callback).on_load_checkpoint is WeightAveraging.on_load_checkpoint:  # it would load whole tensors
                patch = MethodPatch(callback, "on_load_checkpoint", replace_by(lambda *_: None))
                self._callback_patches.append(patch)
        if self._sharding is not None:  # a tuner restores its start
            self._load_module(self._sharding.module)

    def _load_module(self, module: nn.Module) -> None:
        to_load, self._to_load = self._to_load, None
        if to_load is not None:
            self._finish_steps()
            with self._named("loading a checkpoint"):
                self._load_weights(module, to_load[0], strict=to_load[1])

    def _load_weights(self, module: nn.Module, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load the module and the averages, as the callback does. A collective.

        From a checkpoint without averages they start from its weights.
        """
        assert self._store is not None
        has_average = _REST in checkpoint
        key = _CURRENT if has_average and self._averages else _AVERAGE
        self._store.load_module(checkpoint, module, strict=strict, key=key)
        for average in (one.average for one in self._averages):
            self._store.load_module(checkpoint, average.module, strict=strict and has_average, key=_AVERAGE)
            if has_average:
                average.load_state_dict(checkpoint[_REST], strict=False)
            else:
                rank_zero_warn("The checkpoint has no averaged weights: WeightAveraging starts from its weights.")

    def _remove_averages(self, *, make_whole: bool) -> None:
        """Unshard the averages; ``make_whole``: gather them (a collective)."""
        while self._callback_patches:
            self._callback_patches.pop().remove()
        while self._averages:
            self._averages.pop().remove(make_whole=make_whole)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._store is not None
        assert self.lightning_module is not None
        self._finish_steps()
        with self._named("loading a checkpoint"):
            self._store.load_optimizers(checkpoint, self.lightning_module, self.optimizers)

    def wait_for_checkpoints(self) -> None:
        """Wait for ``async_save``."""
        if self._store is not None:
            self._store.wait()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        assert self._store is not None
        self._store.remove(filepath)

    def _make_store(self, *, asynchronous: bool) -> CheckpointStore:
        arguments = self.arguments
        return CheckpointStore(
            sharded=arguments.state_dict_type == "sharded",
            asynchronous=asynchronous,
            timeout=arguments.timeout,
            verify=arguments.verify,
        )
