"""Where memory ran out, read from the frames of an error."""

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import FrameType

from torch import nn

from lightning_vram.report.out_of_memory.facts import Place, Work

_STAGES = ("train", "validation", "test", "predict")
_BY_FUNCTION = {
    **dict.fromkeys(("training_step", "validation_step", "test_step", "predict_step"), Work.FORWARD),
    **dict.fromkeys((f"on_{stage}_{end}" for stage in _STAGES for end in ("epoch_end", "end")), Work.EPOCH_END),
    "on_run_end": Work.EPOCH_END,  # where Lightning computes the metrics that are logged
    "model_to_device": Work.MOVING,
    **dict.fromkeys(("save_checkpoint", "dump_checkpoint"), Work.SAVING),
    **dict.fromkeys(
        ("restore", "resume_start", "restore_training_state", "restore_optimizers", "load_checkpoint"), Work.RESTORING
    ),
}
_MOST_CHARACTERS_OF_LINE = 100
_IN_BACKWARD = {"backward", "_engine_run_backward"}
_OWN_FOLDER = str(Path(__file__).parents[2])
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def read_place(errors: Sequence[BaseException], module: nn.Module) -> Place:
    """Find out what was being done when memory ran out; ``errors`` from the outermost to the out-of-memory error."""
    names = {id(part): name for name, part in module.named_modules()}
    work, inner, line, function = Work.OTHER, "", "", ""
    for frame, number in chain.from_iterable(traceback.walk_tb(error.__traceback__) for error in errors):
        work = _work_of(frame) or work
        inner = names.get(id(frame.f_locals.get("self")), "") or inner
        path = frame.f_code.co_filename
        if path.endswith("nn/functional.py"):
            function = frame.f_code.co_name
        if _is_users(path):
            line = f"{Path(path).name}:{number}: {linecache.getline(path, number).strip():.{_MOST_CHARACTERS_OF_LINE}}"
    return Place(work, "" if work in (Work.RESTORING, Work.SAVING, Work.MOVING) else inner, line, function)


def _work_of(frame: FrameType) -> Work | None:
    path, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
    if "/torch/optim/" in path or "/lightning_vram/optimizers/" in path:
        return Work.OPTIMIZER_STEP
    if name in _IN_BACKWARD and ("/torch/autograd/" in path or path.endswith("/torch/_tensor.py")):
        return Work.BACKWARD
    return _BY_FUNCTION.get(name)


def _is_users(path: str) -> bool:
    is_file = not path.startswith("<") and path != sys.executable
    return is_file and not path.startswith((_OWN_FOLDER, *_LIBRARIES)) and "site-packages" not in path
