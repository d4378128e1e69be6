"""The ``lightning-vram`` command. The only place of the package that prints.

Help, the version, files that are only read, and mistakes in the name of a command are answered without PyTorch and
Lightning, whose imports take seconds. Mistakes of the user end in one line on stderr and exit code 2; set
``LIGHTNING_VRAM_DEBUG=1`` for a traceback.
"""

import os
import pickle
import sys
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console, RenderableType

from lightning_vram.commands import options
from lightning_vram.commands.files import FILE_COMMANDS
from lightning_vram.version import __version__

_MIN_TABLE_WIDTH, _MAX_TABLE_WIDTH = 100, 1000
_HELP = ("-h", "--help")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        args: Arguments after the program's name; ``None`` takes ``sys.argv``.

    Raises:
        SystemExit: With code 2 and one line on stderr if an argument or a configuration is wrong, with 3 if
            ``estimate`` or ``plan`` found that the run does not fit, with 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        if options.is_debugging():
            raise
        sys.exit(options.INTERRUPTED)
    except BrokenPipeError:  # `lightning-vram presets | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        sys.exit(options.BROKEN_PIPE)


def _run(arguments: list[str]) -> None:
    command = arguments[0] if arguments else ""
    if command in _HELP:
        options.main_parser().print_help()
    elif command in (options.ESTIMATE, options.PLAN) and not {*_HELP}.isdisjoint(arguments):
        options.dry_run_parser(command).print_help()
    elif command in (options.ESTIMATE, options.PLAN) and "--device=list" in map(
        str.lower, (*arguments, *map("=".join, pairwise(arguments)))
    ):
        _show(options.device_list())
    elif command == "--version":
        print(f"{options.PROGRAM} {__version__}")
    elif command in FILE_COMMANDS:
        _run_on_files(command, *arguments[1:])
    elif command in options.COMMANDS or command.startswith("-"):
        from lightning_vram.commands.run import run  # seconds

        run(arguments, _show)
    else:
        got = f"got {command!r}" if command else "got none"
        guess = options.did_you_mean(command, options.COMMANDS)
        options.fail(f"expected a command, one of {', '.join(options.COMMANDS)}, {got}.{guess}")


def _run_on_files(command: str, *args: str) -> None:
    try:
        for part in FILE_COMMANDS[command](args):
            _show(part)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, ModuleNotFoundError, pickle.UnpicklingError) as error:
        if options.is_debugging():
            raise
        options.fail(options.describe(error))


def _show(result: RenderableType) -> None:
    if isinstance(result, str):
        print(result)
        return
    console = Console()
    if not console.is_terminal:
        # In a log file there is no terminal to ask: a table cut to 80 columns would lose its numbers.
        console = Console(width=max(_MIN_TABLE_WIDTH, Console(width=_MAX_TABLE_WIDTH).measure(result).maximum))
    console.print(result)
