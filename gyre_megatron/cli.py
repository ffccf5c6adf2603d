"""The program `gyre` (also `python -m gyre_megatron`): one subcommand for each thing to do.

Owns the table of subcommands, the exit codes and how an error is shown. Invariant: a subcommand's
module is imported only after it was chosen, so that `gyre --help` needs neither torch nor pydantic.

Exit codes: 0 done, 1 it failed, 2 wrong usage or configuration, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from gyre_megatron import __version__
from gyre_megatron.errors import ConfigError, GyreError

USAGE_EXIT = 2
INTERRUPTED_EXIT = 130  # what shells give for SIGINT

COMMANDS = {
    "train": ("gyre_megatron.commands.train", "train an agent; starts torchrun, or runs under it"),
    "plan": ("gyre_megatron.commands.plan", "forecast a reshard of weights, without the weights"),
    "simulate": ("gyre_megatron.simulation.command", "compare policies on a modelled cluster"),
    "report": ("gyre_megatron.observe.report", "tables and plots of a run"),
    "trajectory": ("gyre_megatron.trajectory.__main__", "look into the executions of a run"),
    "export": (
        "gyre_megatron.commands.export",
        "write a run's weights as a Hugging Face checkpoint",
    ),
    "proxy": ("gyre_megatron.proxy.standalone", "record what any harness does with an engine"),
    "config": ("gyre_megatron.config.__main__", "show a configuration and where it comes from"),
    "doctor": ("gyre_megatron.commands.doctor", "check this machine, and say how to mend it"),
}
"""Subcommand -> (module with `main(arguments) -> exit code`, its line in the help)."""


class _Parser(argparse.ArgumentParser):
    """Names the nearest subcommand when one is misspelt."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE_EXIT, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: words after `gyre`; default: those of this process.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(words[:1])
    if options.command not in COMMANDS:
        near = difflib.get_close_matches(options.command, list(COMMANDS), n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        parser.error(f"unknown command {options.command!r}{meant} Commands: {', '.join(COMMANDS)}")
    module, _ = COMMANDS[options.command]
    return _guarded(lambda: importlib.import_module(module).main(words[1:]))


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    parser = _Parser(
        prog="gyre",
        usage="gyre COMMAND ...",
        description="Elastic reinforcement learning of coding agents with Megatron-Core.",
        epilog=f"commands:\n{listed}\n\n`gyre COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gyre-megatron {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    return parser


def _guarded(run: Callable[[], int]) -> int:
    """Turn what a user can cause into one line and an exit code; anything else is our bug and
    keeps its traceback."""
    try:
        return run()
    except ConfigError as error:
        return _failed(error, USAGE_EXIT)
    except GyreError as error:
        return _failed(error, 1)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "gyre_megatron":
            raise
        return _failed(f"{error}; `gyre doctor` lists what is missing and how to get it", 1)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT
    except BrokenPipeError:
        # The reader (`| head`) has gone. Python would fail once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:  # not about a file that somebody named
            raise
        return _failed(f"{error.filename}: {error.strerror}", 1)


def _failed(error: object, code: int) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
