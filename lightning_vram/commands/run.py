"""Commands that make the classes of a configuration: ``fit`` and its like, ``estimate``, ``plan``."""

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress

from rich.console import RenderableType

import lightning_vram.public_names  # noqa: F401 - registers strategies, and lets classes be found by short names
from lightning_vram.commands.estimate import EstimateQuestion
from lightning_vram.commands.mistakes import is_mistake_of_user, one_line
from lightning_vram.commands.options import ESTIMATE, PLAN
from lightning_vram.commands.plan import PlanQuestion
from lightning_vram.commands.program import fail, is_debugging
from lightning_vram.commands.question import Question, QuestionCLI
from lightning_vram.commands.training import VRAMCLI
from lightning_vram.memory.device.allocator_settings import configure_allocator


def run(arguments: list[str], show: Callable[[RenderableType], None], *, is_process: bool) -> None:
    """Run a command; ``is_process``: with the arguments of this process, which launchers start again."""
    # Raised inside Lightning 2.6 on torch 2.13, once per run; nothing a user can do about it.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    with suppress(RuntimeError):  # called by a program that has used CUDA before
        configure_allocator()
    question = _question(arguments)
    kind: type[VRAMCLI] | type[QuestionCLI] = VRAMCLI if question is None else QuestionCLI
    cli = kind.__new__(kind)  # kept when its __init__, which runs the whole command, raises
    try:
        if question is None:
            cli.__init__(show, args=None if is_process else arguments)  # type: ignore[misc]
        else:
            with redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
                cli.__init__(question, arguments[1:])  # type: ignore[misc]
            for part in question.answer():
                show(part)
    except Exception as error:
        if is_debugging() or not is_mistake_of_user(error, is_running=cli.is_running):
            raise
        fail(one_line(error))
    if question is not None and question.exit_code:
        raise SystemExit(question.exit_code)


def _question(arguments: Sequence[str]) -> Question | None:
    """What is asked of a run, if the command makes none."""
    if arguments[:1] == [ESTIMATE]:
        return EstimateQuestion()
    return PlanQuestion(arguments[1:]) if arguments[:1] == [PLAN] else None
