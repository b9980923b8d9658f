# SPDX-License-Identifier: GPL-2.0
"""Run other programs: their output goes to a log, and they end with the lab."""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from lab.core.errors import LabError, full_disk

Argv = Sequence[str | Path]
Env = Mapping[str, str] | None
Folder = Path | None
Seconds = float | None
Done = subprocess.CompletedProcess[str]
_libc = ctypes.CDLL(None)  # loaded here: between fork and exec nothing may be loaded
VERBOSE = "KNOWNZERO_VERBOSE"
# Messages about a full disk: of the C library, and of apt before a download.
FULL = ("No space left on device", "File too large", "Disk quota exceeded", "enough free space")
NO_PROGRAM = "run `kz doctor`: it names the package"


def show(argv: Argv, cwd: Folder = None) -> None:
    """Print a command on stderr, as a shell takes it, if $KNOWNZERO_VERBOSE is set (``kz
    --verbose``).
    """
    if os.environ.get(VERBOSE):
        where = f"(cd {shlex.quote(str(cwd))}) " if cwd else ""
        # One write: print() has another for the end of the line, and threads run commands at once.
        sys.stderr.write(f"kz: $ {where}{shlex.join(map(str, argv))}\n")
        sys.stderr.flush()


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log; all of them for 0."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join(text.strip().splitlines()[-lines:])


def first_errors(log: Path, lines: int = 8) -> str:
    """The lines of a build log that name errors, or its end when none does."""
    text = tail(log, 0).splitlines()
    marks = ("error:", "Error ", "ERROR", *FULL)
    wanted = [line for line in text if any(mark in line for mark in marks)]
    return "\n".join(wanted[:lines] or text[-lines:])


def die_with_parent() -> None:
    """Between fork and exec: be killed when the thread that forked ends (PR_SET_PDEATHSIG)."""
    _libc.prctl(1, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back SIGINT, SIGTERM and SIGHUP until the end of the block.

    A process that starts in the block is known when they arrive, and can be ended. Python runs
    handlers in the main thread; in others this does nothing.
    """
    handled = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if callable(signal.getsignal(number))
    ]
    if threading.current_thread() is not threading.main_thread():
        handled = []
    arrived: list[int] = []
    usual = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in handled
    }
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    for one in arrived:
        signal.raise_signal(one)


def end_group(process: subprocess.Popen[bytes], grace: float = 2.0) -> None:
    """End a process and its children (it leads a session of its own)."""
    for number, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)
            return


def logged(
    argv: Argv,
    log: Path,
    what: str,
    fix: str,
    *,
    cwd: Folder = None,
    env: Env = None,
    timeout: Seconds = None,
    pass_fds: Collection[int] = (),
) -> None:
    """Run with all output appended to ``log``; a failure becomes a LabError quoting the log.

    ``env`` replaces the environment; ``timeout`` is in seconds. Interrupted or late, the whole
    process group is ended. ``pass_fds``: descriptors that the program and its children keep open.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in argv]
    show(words, cwd)
    with log.open("ab") as out:
        out.write(f"$ {' '.join(words)}\n".encode())
        out.flush()
        process: subprocess.Popen[bytes] | None = None
        try:
            with uninterrupted():
                process = subprocess.Popen(
                    words,
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    pass_fds=pass_fds,
                )
            status = process.wait(timeout)
        except FileNotFoundError:
            raise LabError(what, f"{argv[0]} is not installed", NO_PROGRAM) from None
        except BaseException as error:
            if process:
                end_group(process)
            if isinstance(error, subprocess.TimeoutExpired):
                why = f"still running after {timeout:.0f} s\n{tail(log)}\n(log: {log})"
                raise LabError(what, why, fix) from None
            raise
    if status == 0:
        return
    why = f"{first_errors(log)}\n(log: {log})"
    if any(mark in why for mark in FULL):
        raise full_disk(what, why)
    raise LabError(what, why, fix)


def ask(argv: Argv, cwd: Folder = None, env: Env = None, timeout: Seconds = None) -> Done:
    """Run without input and return whatever happens."""
    words = [str(word) for word in argv]
    show(words, cwd)
    return subprocess.run(
        words,
        cwd=cwd,
        env=env,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def output(
    argv: Argv,
    what: str,
    fix: str,
    *,
    cwd: Folder = None,
    env: Env = None,
    stdin: bytes | None = None,
) -> str:
    """Run and return stdout; a failure becomes a LabError quoting stderr."""
    try:
        words = [str(word) for word in argv]
        show(words, cwd)
        done = subprocess.run(
            words, cwd=cwd, env=env, input=stdin or b"", capture_output=True, check=False
        )
    except FileNotFoundError:
        raise LabError(what, f"{argv[0]} is not installed", NO_PROGRAM) from None
    if done.returncode:
        text = (done.stderr or done.stdout).decode(errors="replace").strip()
        why = "\n".join(text.splitlines()[-12:]) or f"exit code {done.returncode}"
        if any(mark in why for mark in FULL):
            raise full_disk(what, why)
        raise LabError(what, why, fix)
    return done.stdout.decode(errors="surrogateescape")
