"""Plans of earlier runs, in the folder of logs: a run like one of them takes its plan, and traces no step.

The key is a hash of everything a trace depends on, as far as it can be read without running the user's code. In doubt
a value is part of the key: a needless one costs one planning, a missing one gives a wrong plan. Free memory is not
part of it, since it varies from run to run.
"""

import hashlib
import inspect
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import Enum
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_vram.estimation.fake_trainer import parts_of
from lightning_vram.estimation.running_trainer import RunningTrainer
from lightning_vram.estimation.step_time import StepTime
from lightning_vram.memory.device.accelerators import can_limit, total_bytes
from lightning_vram.memory.estimate.caching_allocator import read_settings
from lightning_vram.planner.scheme import Exactness, Found, Measured, Part, Scheme
from lightning_vram.version import __version__

_OURS = "lightning_vram."
_NOT_READ = ("torch", "lightning", "builtins", "abc", "typing")  # packages, by their versions
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DEPTH = 4  # of objects within objects
_MOST = 1000  # of a list
_MORE_BUDGET = 1.1  # times the budget that a plan was made for: with more, a faster plan may fit


def plan_folder(trainer: pl.Trainer) -> Path | None:
    """Return the folder of plans, next to those of runs; ``None`` if it is remote, or the run writes nothing."""
    folders = (logger.save_dir for logger in trainer.loggers)
    root = str(next(filter(None, folders), trainer.default_root_dir))
    return None if "://" in root or trainer.fast_dev_run else Path(root) / "auto_vram"  # type: ignore[attr-defined]


@contextmanager
def _errors_cost_only_cache(path: Path) -> Iterator[None]:
    """An error in a file, or in the user's attributes that are read, costs the cache, not the run."""
    try:
        yield
    except Exception as error:
        text = str(error).partition("\n")[0]
        rank_zero_info(f"AutoVRAM: cached plans are not used, {path}: {type(error).__name__}: {text}.")


def load_plan(path: Path | None, budget_bytes: int) -> Found | None:
    """Return the plan of an earlier run; ``None`` if there is none for this budget."""
    found = None
    if path is not None and path.is_file():
        with _errors_cost_only_cache(path):
            saved = json.loads(path.read_text(encoding="utf-8"))
            tried = tuple(map(_read_measured, saved["tried"]))
            most_bytes = budget_bytes if saved["best"] == saved["plain"] else _MORE_BUDGET * saved["budget_bytes"]
            if tried[saved["best"]].needed_bytes <= budget_bytes <= most_bytes:
                found = Found(tried[saved["best"]], tried[saved["plain"]], tried)
    return found


def save_plan(path: Path | None, found: Found | None, budget_bytes: int) -> None:
    """Write a plan, whole or not at all."""
    if path is None or found is None:
        return
    with _errors_cost_only_cache(path):
        places = {"best": found.tried.index(found.taken), "plain": found.tried.index(found.plain)}
        text = json.dumps({"budget_bytes": budget_bytes, **places, "tried": list(map(asdict, found.tried))}, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


def _read_measured(saved: dict[str, Any]) -> Measured:
    scheme = Scheme(tuple(map(_read_part, saved["scheme"]["parts"])))
    return Measured(**{**saved, "scheme": scheme, "time": _read_time(saved["time"])})


def _read_part(saved: dict[str, Any]) -> Part:
    if not saved["class_path"].startswith(_OURS):  # a file of plans must not run other code
        raise ValueError(f"{saved['class_path']!r} is not a class of lightning_vram")
    return Part(**{**saved, "exactness": Exactness(saved["exactness"]), "replaces": tuple(saved["replaces"])})


def _read_time(saved: dict[str, Any]) -> StepTime:
    return StepTime(**{**saved, "backward": saved["backward"] and _read_time(saved["backward"])})


def plan_path(folder: Path | None, run: RunningTrainer, asked: Sequence[Any]) -> Path | None:
    """Return the file for the plan of a run."""
    path = None
    if folder is not None:
        with _errors_cost_only_cache(folder):
            path = folder / f"{plan_key(run, asked)}.json"
    return path


def plan_key(run: RunningTrainer, asked: Sequence[Any]) -> str:
    """Hash everything a plan depends on, except free memory."""
    arguments, device = run.fit.trainer_arguments, torch.device(run.device.name)
    describe = _Description()
    parts = {
        "module": _describe_module(run.module),
        "batch": describe(run.batch, has_values=False),
        "trainer": describe({**arguments, **parts_of(arguments, run.fit.run_callbacks)}),
        "ranks": (run.fit.num_ranks, run.num_devices),
        "device": describe(replace(run.device, name=_name_of(device), memory_bytes=1)),
        "device_bytes": total_bytes(device) if can_limit(device) else None,
        "settings": (describe(read_settings()), torch.get_float32_matmul_precision()),
        "asked": describe([*asked, run.fit.run_callbacks]),
        "versions": (__version__, torch.__version__, version("lightning"), platform.python_version()),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _name_of(device: torch.device) -> str:
    name = getattr(torch.get_device_module(device), "get_device_name", lambda _: device.type)
    return f"{device.type} {name(device)} {torch.version.cuda} {torch.version.hip}"


def _describe_module(module: pl.LightningModule) -> list[Any]:
    """Describe its weights, the attributes of its submodules, and their code."""
    describe, places = _Description(has_private=False), dict[int, int]()
    named = chain(*(names(remove_duplicate=False) for names in (module.named_parameters, module.named_buffers)))
    tensors = [(name, places.setdefault(id(one), len(places)), describe(one)) for name, one in named]
    parts = [
        (name, _qualified(type(part)), describe(describe.attributes(part))) for name, part in module.named_modules()
    ]
    kinds = dict.fromkeys(kind for part in module.modules() for kind in type(part).__mro__)
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _NOT_READ]
    return [tensors, parts, describe(dict(module.hparams)), sorted({_source(kind) for kind in own})]


def _source(kind: type) -> str:
    """Hash the file of a class, or its functions if it has no file, as in a notebook."""
    try:
        source = Path(inspect.getsourcefile(kind) or "").read_bytes()
    except (OSError, TypeError):
        functions = {name: value for name, value in vars(kind).items() if isinstance(value, FunctionType)}
        source = json.dumps(_Description()(functions), sort_keys=True).encode()
    return f"{_qualified(kind)} {hashlib.sha256(source).hexdigest()}"


def _qualified(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _Description:
    """Turns values into JSON, the same in each process: tensors as shapes, functions as their code."""

    def __init__(self, *, has_private: bool = True) -> None:
        self._has_private = has_private  # whether private attributes count: a user's may be of one run
        # Objects that many parts share, such as a configuration, are described once. References keep ids valid.
        self._seen: dict[int, Any] = {}

    def __call__(self, value: Any, depth: int = _DEPTH, *, has_values: bool = True) -> Any:
        """Describe a value; without ``has_values`` by types and shapes alone."""
        describe = partial(self.__call__, depth=depth, has_values=has_values)
        if isinstance(value, Tensor):
            shape = None if is_lazy(value) else list(value.shape)
            return [str(value.dtype), shape, value.device.type, value.requires_grad]
        if value is None or isinstance(value, str | int | float):
            return repr(value) if has_values else type(value).__name__
        if isinstance(value, Mapping):
            return [[str(key), describe(one)] for key, one in value.items()]
        if isinstance(value, list | tuple):
            return [len(value), *map(describe, value[:_MOST])]
        if isinstance(value, type | partial | MethodType | FunctionType):
            return self._callable(value, depth)
        return self._object(value, depth, has_values=has_values)

    def _callable(self, value: Any, depth: int) -> Any:
        if isinstance(value, type):
            return _qualified(value)
        if isinstance(value, partial):
            return self([value.func, value.args, value.keywords], depth)
        if isinstance(value, MethodType):
            return self(value.__func__, depth)
        cells = [cell.cell_contents for cell in value.__closure__ or ()] if depth > 0 else []
        return [_qualified(value), _code(value.__code__), self([*cells, value.__defaults__], depth - 1)]

    def _object(self, value: Any, depth: int, *, has_values: bool) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        if not hasattr(value, "__dict__") or isinstance(value, Enum):
            return _ADDRESS.sub("", repr(value))
        if depth <= 0 or id(value) in self._seen or isinstance(value, nn.Module | pl.Trainer):
            return _qualified(type(value))
        self._seen[id(value)] = value
        return [_qualified(type(value)), self(self.attributes(value), depth - 1, has_values=has_values)]

    def attributes(self, value: Any) -> dict[str, Any]:
        return {name: one for name, one in vars(value).items() if self._has_private or not name.startswith("_")}


def _code(code: CodeType) -> list[Any]:
    constants = [sorted(map(repr, one)) if isinstance(one, frozenset) else one for one in code.co_consts]
    texts = [_code(one) if isinstance(one, CodeType) else repr(one) for one in constants]
    return [code.co_code.hex(), code.co_names, texts]
