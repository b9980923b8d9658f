# SPDX-License-Identifier: GPL-2.0
"""The verbs of ``kz``."""

import importlib
import inspect
import os
import signal
import sys
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer import Option
from typer.exceptions import TyperException

from lab import verbs
from lab.core import errors, host, run

app = typer.Typer(
    name="kz",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=verbs.HELP,
    epilog=verbs.EPILOG,
)


def _version(wanted: bool) -> None:
    if not wanted:
        return
    from lab.bench.runner import commit
    from lab.machine import fetch

    bases = ", ".join(f"{name} {fetch.base(name).version}" for name in fetch.NAMES)
    print(f"kz {commit()}: {bases}")
    raise typer.Exit


@app.callback()
def every(
    version: Annotated[
        bool,
        Option(
            "--version",
            is_eager=True,
            callback=_version,
            help=verbs.VERSION,
        ),
    ] = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help=verbs.VERBOSE)] = False,
) -> None:
    if verbose:
        os.environ[run.VERBOSE] = "1"  # for the processes of builds and tests, too


@app.command(hidden=True)
def reference() -> None:
    """Write docs/reference/cli.md anew, from the definition of the command line."""
    from lab import clidoc

    clidoc.write(root())
    print(clidoc.PAGE)


def root() -> Any:
    app.registered_groups.clear()
    load()
    return typer.main.get_command(app)


def load(asked: str = "") -> None:
    """Add the verbs.

    All of them, or, when ``asked`` is one, only those of its package: importing all takes long.
    """
    chosen = [verbs.VERBS[asked]] if asked in verbs.VERBS else verbs.VERBS.values()
    for package in dict.fromkeys(verb.package for verb in chosen):
        found: typer.Typer = importlib.import_module(f"lab.{package}.commands").app
        for group in found.registered_groups:
            group.help = verbs.VERBS[str(group.name)].line
        for command in found.registered_commands:
            callback = command.callback
            assert callback is not None
            line = verbs.VERBS[command.name or callback.__name__].line
            command.help = "\n\n".join([line, inspect.getdoc(callback) or ""]).rstrip()
        app.add_typer(found)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    # As an exception, so that guests and builds are ended on the way out.
    raise SystemExit(128 + number)


def main() -> int:
    """Run a verb; the return value is the process's exit code."""
    removed = host.settle()
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGHUP, _terminate)
    try:
        load(next((word for word in sys.argv[1:] if not word.startswith("-")), ""))
        return _run(removed)
    except errors.LabError as error:
        return _report(error)
    except KeyboardInterrupt:
        print("kz: interrupted; incomplete builds are removed", file=sys.stderr)
        return errors.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return errors.MACHINE
    except OSError as error:
        return _report(errors.from_oserror(error, "a file cannot be read or written"))


def _run(removed: list[str]) -> int:
    """Run the verb, which finds the names of the variables that are removed in its context."""
    try:
        code = app(prog_name="kz", standalone_mode=False, obj=removed)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except TyperException as error:
        if not error.format_message():
            return errors.USAGE  # nothing was asked for: the help has been printed
        verb = getattr(getattr(error, "ctx", None), "command_path", "kz")
        fix = f"see `{verb} --help`"
        raise errors.UsageError(f"Bad usage of {verb}", error.format_message(), fix) from None
    except SystemExit as end:  # of a signal
        code = end.code if isinstance(end.code, int) else errors.FAILED
    if code == errors.INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else errors.OK


def _report(error: errors.LabError) -> int:
    print(f"kz: {error}", file=sys.stderr)
    return error.code
