"""A sharded checkpoint: a folder to which each rank writes its part, and from which any number of ranks read theirs.

The layout is that of Lightning's ``ModelParallelStrategy``: ``torch.distributed.checkpoint`` with the keys
``state_dict``, ``optimizer_0``, ... and ``meta.pt`` with the rest. ``checksums.json``, written last, is ours. No rank
ever holds more than its part; what is the same on all ranks, such as buffers, rank 0 writes.
"""

import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.core.ranks import current_rank, gather_objects, num_ranks, on_all_ranks
from lightning_vram.core.tensors.codecs import decoded
from lightning_vram.private_names.fsdp2 import read_metadata
from lightning_vram.techniques.sharded_checkpoints.files import (
    CHECKSUM_FILE,
    CheckedWriter,
    check_folder,
    explained,
    read_values,
    save_values,
)
from lightning_vram.techniques.sharded_checkpoints.states import (
    check_fit,
    clean_name,
    count_bytes,
    is_sharded_state,
    map_leaves,
    names_in_optimizer,
    parameters_by_name,
)

METADATA_FILE, REST_FILE = ".metadata", "meta.pt"
MODULE_STATES = ("state_dict", "current_model_state")  # with averaged weights, these are in the first
Path_ = tuple[str | int, ...]  # of a value in the nested state
# of a module, its optimizer, the saved state of each parameter, the saved groups, the optimizer's index
StateCheck = Callable[[nn.Module, Optimizer, Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], int], None]


def is_sharded_folder(path: Path) -> bool:
    """Whether this is a complete sharded checkpoint."""
    return (path / REST_FILE).is_file() and (path / METADATA_FILE).is_file()


class ShardedFolder:
    """A folder of :func:`write_folder`, the same for all ranks. All calls are collectives.

    Errors of one rank are raised on all: ``CheckpointError`` if the folder cannot be read or is damaged,
    ``pickle.UnpicklingError`` for what ``weights_only`` (see ``torch.load``) does not allow. ``verify``: compare the
    files with their checksums, if there are any.
    """

    def __init__(self, folder: Path, *, weights_only: bool | None = None, verify: bool = True) -> None:
        self._folder = folder
        self._weights_only = weights_only
        if verify:
            self._read(lambda: check_folder(folder, current_rank(), num_ranks()))
        self._metadata: Metadata = self._read(lambda: explained(partial(_read_metadata, folder), METADATA_FILE))
        self._paths: dict[str, Path_] = dict(self._metadata.planner_data or {})

    @property
    def has_optimizers(self) -> bool:
        """Whether optimizer state was saved."""
        return self.has_state("optimizer_0")

    def has_state(self, key: str) -> bool:
        """Whether a state was saved under this key."""
        return any(path[0] == key for path in self._paths.values())

    def read_rest(self) -> dict[str, Any]:
        """Read everything but the states of modules and optimizers."""
        path, weights_only = self._folder / REST_FILE, self._weights_only
        rest: dict[str, Any] = self._read(partial(read_values, path, weights_only=weights_only))
        return rest

    def read_states(self, on_progress: Callable[[float], None] = lambda done: None) -> dict[str, Any]:
        """Read all states as whole tensors, without a module, in one process; ``on_progress`` gets the finished share.

        Optimizer state has names of parameters instead of numbers.
        """
        return self._load({key: self._make_target(key) for key in self._paths}, on_progress)

    def load_module(self, module: nn.Module, *, strict: bool, key: str = "state_dict") -> None:
        """Load parameters and buffers in place; on ``ValueError``, if they do not fit, nothing has changed."""
        own = module.state_dict()
        own_keys, own_state = {clean_name(key): key for key in own}, {clean_name(key): own[key] for key in own}
        stored = {stored_key: path for stored_key, path in self._paths.items() if path[0] == key}
        entries = {
            clean_name(str(path[1])): self._entry(stored_key) if len(path) == 2 else None
            for stored_key, path in stored.items()
        }
        shapes: dict[str, Sequence[int] | None] = {
            name: tuple(entry.size) if entry is not None else None for name, entry in entries.items()
        }
        shapes |= {name: None for name, value in own_state.items() if value == {}}  # empty extra states are not stored
        check_fit(own_state, shapes, strict=strict)
        wanted = {}
        for stored_key, path in stored.items():
            if (name := clean_name(str(path[1]))) in own_state:
                value = own_state[name]
                wanted[stored_key] = value if isinstance(value, Tensor) else self._make_target(stored_key)
        loaded = self._load(wanted).get(key, {})
        state = {clean_name(str(name)): value for name, value in loaded.items()}
        state |= {name: value for name, value in own_state.items() if value == {}}
        module.load_state_dict({own_keys[name]: value for name, value in state.items()}, strict=strict)

    def load_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer], *, check_states: StateCheck) -> None:
        """Load a module's optimizers, in the order in which they were saved; states become sharded as parameters are.

        ``check_states`` sees all states before one is loaded, and raises. On ``ValueError`` nothing has changed on any
        rank.
        """
        own_names = [names_in_optimizer(module, optimizer) for optimizer in optimizers]
        roots = [f"optimizer_{index}" for index in range(len(optimizers))]
        parts = {key: path for key, path in self._paths.items() if path[0] in roots}
        others = self._load({key: self._make_target(key) for key, path in parts.items() if path[1] != "state"})
        for index, (root, names) in enumerate(zip(roots, own_names, strict=True)):
            self._check_groups(index, others.get(root), names)
            saved_states = self._find_states(index, names)
            check_states(module, optimizers[index], saved_states, others[root]["param_groups"], index)
        aliases = parameters_by_name(module)
        targets = {
            key: self._make_state(key, path, aliases, optimizers[roots.index(str(path[0]))])
            for key, path in parts.items()
            if path[1] == "state"
        }
        states = self._load(targets)
        for root, names, optimizer in zip(roots, own_names, optimizers, strict=True):
            state = states.get(root, {}).get("state", {})
            optimizer.load_state_dict(_to_integers({**others[root], "state": state}, names))

    def _check_groups(self, index: int, saved: dict[str, Any] | None, names: list[list[str]]) -> None:
        if saved is None or "param_groups" not in saved:
            raise ValueError(
                f"The checkpoint {self._folder} has no state of optimizer {index}: it was saved with fewer, or "
                "with save_weights_only=True. Use it for validate, test and predict."
            )
        saved_names = [sorted(map(clean_name, group["params"])) for group in saved["param_groups"]]
        if saved_names != [sorted(group) for group in names]:
            raise ValueError(
                f"Optimizer {index} has {[len(group) for group in saved_names]} parameters in {self._folder}, and "
                f"{[len(group) for group in names]} or other ones in configure_optimizers. Return the optimizer "
                "that the checkpoint was saved with."
            )

    def _find_states(self, index: int, names: list[list[str]]) -> list[dict[str, Any]]:
        """Return the saved metadata of each parameter's state, in the order of ``names``."""
        states: dict[str, dict[str, Any]] = {}
        for key, path in self._paths.items():
            if path[:2] == (f"optimizer_{index}", "state") and len(path) == 4:
                states.setdefault(clean_name(str(path[2])), {})[str(path[3])] = self._entry(key)
        return [states.get(name, {}) for group in names for name in group]

    def _entry(self, key: str) -> TensorStorageMetadata | None:
        """Return the metadata of a tensor; ``None`` for a pickled value."""
        entry = self._metadata.state_dict_metadata[key]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def _make_target(self, key: str) -> Tensor | None:
        entry = self._entry(key)
        return None if entry is None else torch.empty(entry.size, dtype=entry.properties.dtype)

    def _make_state(
        self, key: str, path: Path_, parameters: dict[str, nn.Parameter], optimizer: Optimizer
    ) -> Tensor | None:
        entry, parameter = self._entry(key), parameters.get(clean_name(str(path[2])))
        if parameter is not None and entry is not None:
            current = optimizer.state.get(parameter, {}).get(path[3]) if len(path) == 4 else None
            if is_sharded_state(entry.size, parameter, current):
                return torch.empty_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
        return self._make_target(key)

    def _load(self, flat: dict[str, Any], on_progress: Callable[[float], None] = lambda done: None) -> dict[str, Any]:
        """Read into the tensors of a flat state; return it nested."""
        planner = _LoadPlanner(count_bytes(flat), on_progress, weights_only=self._weights_only)
        reader = _Reader(self._folder, self._metadata)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may read a folder
            read = partial(load, flat, storage_reader=reader, planner=planner)
            self._read(lambda: explained(read, "one of its files"))
        nested: dict[Any, Any] = {}
        for key, value in flat.items():
            inner, (*path, last) = nested, self._paths[key]
            for step in path:
                inner = inner.setdefault(step, {})
            inner[last] = value
        result: dict[str, Any] = _with_lists(nested)
        return result

    def _read(self, action: Any) -> Any:
        return on_all_ranks(action, f"The checkpoint {self._folder} could not be read")


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return [_with_lists(tree[key]) for key in sorted(tree)]
    return {key: _with_lists(value) for key, value in tree.items()}


def _to_integers(saved: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Number the parameters of a state dict as the optimizer does."""
    numbers: dict[str, int] = {}
    groups = []
    for group, own_names in zip(saved["param_groups"], names, strict=True):
        own_numbers = range(len(numbers), len(numbers) + len(own_names))
        numbers.update(zip(own_names, own_numbers, strict=True))
        groups.append({**group, "params": list(own_numbers)})
    state = {numbers.get(clean_name(str(key)), key): values for key, values in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


def _read_metadata(folder: Path) -> Metadata:
    with (folder / METADATA_FILE).open("rb") as file:
        index = read_metadata(file)
    if set(index.planner_data or ()) - set(index.state_dict_metadata):
        raise KeyError("an entry is not described")
    return index


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index  # torch would unpickle it, and run any code


class _LoadPlanner(DefaultLoadPlanner):
    """For a flat state."""

    def __init__(self, num_bytes: int, on_progress: Callable[[float], None], *, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._num_bytes, self._read_bytes, self._on_progress = num_bytes, 0, on_progress
        self._weights_only = weights_only

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._read_bytes += tensor.nbytes
        self._on_progress(self._read_bytes / max(1, self._num_bytes))

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self.state_dict[key] = explained(lambda: torch.load(value, weights_only=self._weights_only), key)


def sharded_module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's own tensors, not gathered, under clean names."""
    return {clean_name(key): value for key, value in module.state_dict().items()}


def sharded_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's own state, not gathered, with clean names instead of numbers; creates no state."""
    packed = optimizer.state_dict()
    names: dict[Any, str] = {}
    groups = []
    for group, own_names in zip(packed["param_groups"], names_in_optimizer(module, optimizer), strict=True):
        names.update(zip(group["params"], own_names, strict=True))
        groups.append({**group, "params": own_names})
    state = {names.get(key, key): values for key, values in packed["state"].items()}
    return {**packed, "state": state, "param_groups": groups}


class _SavePlanner(DefaultSavePlanner):
    """Dequantizes low-bit state to fp32, one tensor at a time."""

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        return decoded(super().lookup_object(index))


def write_folder(
    state: Mapping[str, Any], rest: Mapping[str, Any], folder: Path, process_group: dist.ProcessGroup | None
) -> None:
    """Write a checkpoint into an empty folder, the same for all ranks. A collective.

    ``state``: ``state_dict`` and ``optimizer_0``, ... as the functions above return them; ``rest``: rank 0's is
    written. A thread needs its own ``process_group``. If a rank cannot write its part, all raise
    ``CheckpointException``; rank 0 alone raises an ``OSError`` of the rest.
    """
    writer = CheckedWriter(folder)
    save(
        map_leaves(dict(state), lambda leaf: leaf),  # new dicts: torch may flatten them
        storage_writer=writer,
        planner=_SavePlanner(dedup_save_to_lowest_rank=True),
        process_group=process_group,
    )
    of_ranks = gather_objects(writer.files.checksums, process_group)
    if current_rank() == 0:
        with writer.files.create_stream(folder / REST_FILE, "wb") as file:
            save_values(dict(rest), file)
        of_ranks.append(writer.files.checksums)  # with that of the rest
        checksums = {name: asdict(checksum) for each in of_ranks for name, checksum in each.items()}
        (folder / CHECKSUM_FILE).write_text(json.dumps(dict(sorted(checksums.items()))))
