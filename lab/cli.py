# SPDX-License-Identifier: GPL-2.0
"""The verbs of ``kz``."""

import os
import signal
import sys
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer import Option
from typer.exceptions import TyperException

from lab.core import errors, host, run

app = typer.Typer(
    name="kz",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Fetch, build, boot, test and measure the Knownzero kernel and QEMU series.",
    epilog="Exit codes: 0 fine, 1 a test failed, 2 bad usage, 3 broken machine. $KNOWNZERO_CACHE "
    "moves the cache; $KNOWNZERO_LINUX_SOURCE and $KNOWNZERO_QEMU_SOURCE name other sources.",
)

# The verbs of each package. A module of verbs is imported when one of them is asked for, and loads
# what the verb runs only when it runs.


def _of_build() -> typer.Typer:
    from lab.build import commands

    return commands.app


def _of_series() -> typer.Typer:
    from lab.series import commands

    return commands.app


def _of_boot() -> typer.Typer:
    from lab.boot import commands

    return commands.app


def _of_bench() -> typer.Typer:
    from lab.bench import commands

    return commands.app


def _of_report() -> typer.Typer:
    from lab.report import commands

    return commands.app


def _of_testing() -> typer.Typer:
    from lab.testing import commands

    return commands.app


VERBS = {
    ("build", "package"): _of_build,
    ("tree", "series"): _of_series,
    ("doctor", "boot", "shell", "conform"): _of_boot,
    ("demo", "bench", "publish"): _of_bench,
    ("report", "compare"): _of_report,
    ("test", "night"): _of_testing,
}


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
            help="Print the versions and exit; verbs have no --version.",
        ),
    ] = False,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Print each command that is run, on stderr.")
    ] = False,
) -> None:
    """Fetch, build, boot, test and measure the Knownzero kernel and QEMU series."""
    if verbose:
        os.environ[run.VERBOSE] = "1"  # for the processes of builds and tests, too


@app.command(hidden=True)
def reference() -> None:
    """Write docs/reference/cli.md anew, from the definition of the command line."""
    from lab import clidoc

    clidoc.write(root())
    print(clidoc.PAGE)


def root() -> Any:
    if len(app.registered_groups) < len(VERBS):
        load()
    return typer.main.get_command(app)


def load(asked: str = "") -> None:
    """Add the verbs.

    All of them, or, when ``asked`` is one, only those that are defined beside it.
    """
    known = {verb for verbs in VERBS for verb in verbs}
    for verbs, verbs_of in VERBS.items():
        if asked not in known or asked in verbs:
            app.add_typer(verbs_of())


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


def _check_name(command: Any, words: list[str]) -> None:
    """Report an unknown bench or package although --help follows it."""
    for word in words:
        if inner := getattr(command, "commands", {}).get(word):
            command = inner
            continue
        named = next((one for one in command.params if one.param_type_name == "argument"), None)
        if named and named.callback and not word.startswith("-"):
            named.callback(None, named, word)
        return


def _run(removed: list[str]) -> int:
    """Run the verb, which finds the names of the variables that are removed in its context."""
    try:
        if at := next((at for at, word in enumerate(sys.argv) if word in ("-h", "--help")), 0):
            _check_name(typer.main.get_command(app), sys.argv[1:at])
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
