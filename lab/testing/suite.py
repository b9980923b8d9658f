# SPDX-License-Identifier: GPL-2.0
"""``kz test``: build everything that the tests need, and run pytest."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.boot.console import last_lines
from lab.build import daemon
from lab.build import linux as build
from lab.build import programs as guest
from lab.build.images import jobs, tree_of
from lab.build.qemu import build_qemu, make_qemu, qemu_object_dir
from lab.core import beside, errors, lock, paths, progress, run
from lab.core.errors import LabError
from lab.machine import fetch, tools

# The kernels of guests in tests by day: a test that needs another one belongs to the night.
KERNELS = (("knownzero", "x86_64"), ("debug", "x86_64"), ("debug", "um"))
QTESTS = ("virtio-balloon-reporting-test", "virtio-balloon-test", "vhost-user-balloon-test")
NEEDS_BUILDS = "boots or slow or images"
# Each worker takes the next test of the list, which begins with the longest (tests/conftest.py).
IN_ORDER = ("--dist", "load", "--maxschedchunk", "1")
QUICK = f"not ({NEEDS_BUILDS})"
LAST_WORDS = 40.0  # seconds, of which pytest's workers may take ten to end
QUICK_LAST_WORDS = 1.0  # of tests that leave nothing behind


def prepare() -> None:
    """Build every kernel, QEMU and program the tests use.

    Two kernels at a time: one links while the other compiles.
    """
    tools.need(*tools.TESTS)
    kernels = [functools.partial(build.build_linux, variant, arch) for variant, arch in KERNELS]
    chains: dict[str, Sequence[Callable[[], object]]] = {
        "kernels": kernels[:-1],
        "QEMU and the daemon": [
            build_qtests,
            kernels[-1],
            daemon.build,
            daemon.build_lying,
            guest.build_programs,
        ],
    }
    with beside.running() as tasks:
        tasks.start({name: functools.partial(_all, chain) for name, chain in chains.items()})


def _all(chain: Sequence[Callable[[], object]]) -> None:
    for one in chain:
        one()


def build_qtests() -> Path:
    """Build QEMU, and its qtests beside it; returns that folder."""
    build_qemu("knownzero")
    source = fetch.obtain("qemu")
    obj = qemu_object_dir("knownzero", source)
    with lock.locked("build-qemu-knownzero"), tree_of("qemu", "knownzero", source) as tree:
        log = paths.log_file("qtests")
        with progress.step("building QEMU's qtests", log):
            programs = [f"tests/qtest/{name}" for name in QTESTS]
            make_qemu(tree, obj, log, ["qemu-system-x86_64", *programs])
    return obj


def run_tests(select: str, junit: Path | None, quick: bool, extra: list[str]) -> int:
    """Run pytest over tests/.

    Returns the lab's exit code (0 fine, 1 failures, 2 usage, 3 machine).
    """
    marks = QUICK if quick else ""
    chosen = (["-k", select] if select else []) + (["-m", marks] if marks else [])
    began = time.monotonic()
    if not quick and _needs_guests([*chosen, *extra]):
        prepare()
    built = time.monotonic()
    # More than there are CPUs: guests sleep and wait as well.
    workers = min(jobs() + 2, 6)
    argv = [*PYTEST, *chosen, "-n", str(workers), *IN_ORDER, "-rxXR"]
    argv += [] if quick else ["--durations=10", "--durations-min=20"]
    if junit:
        junit.parent.mkdir(parents=True, exist_ok=True)
        argv.append(f"--junit-xml={junit.absolute()}")
    status = _run_pytest([*argv, *_with_tests(extra)], quick)
    done = time.monotonic()
    builds, tests = progress.duration(built - began), progress.duration(done - built)
    print(f"kz: builds took {builds}, tests {tests}", flush=True)
    return exit_code(status)


def _run_pytest(argv: list[str], quick: bool) -> int:
    """pytest's exit status.

    An interruption ends quick tests at once. Others get time to end, and pytest to write its
    results.
    """
    # Quick tests have a session of their own, which is ended as a whole, workers included.
    process: subprocess.Popen[bytes] | None = None
    try:
        with run.uninterrupted():
            process = subprocess.Popen(
                argv, cwd=paths.REPO, env=_environment(), start_new_session=quick
            )
        return process.wait()
    except BaseException as why:
        if process is None:
            raise
        if quick:
            run.end_group(process, QUICK_LAST_WORDS)
            raise
        # The terminal has interrupted pytest as well; a second time, and it would not write its
        # results.
        if not isinstance(why, KeyboardInterrupt):
            process.send_signal(signal.SIGINT)
        try:
            process.wait(LAST_WORDS)
        finally:
            process.kill()
        raise


def exit_code(status: int) -> int:
    if status == 5:
        fix = "see the names with: kz test --select '' -- --collect-only"
        raise errors.UsageError("no test was run", "the selection matches no test", fix)
    known = {0: errors.OK, 1: errors.FAILED, 2: errors.INTERRUPTED, 4: errors.USAGE}
    return known.get(status, errors.MACHINE)


CONFIG = str(paths.REPO / "pyproject.toml")
PYTEST = [sys.executable, "-m", "pytest", "-c", CONFIG, "--rootdir", str(paths.REPO)]


def _collect(options: list[str]) -> tuple[int, str]:
    """pytest's exit status, and what it says, when it only lists tests."""
    argv = [*PYTEST, "--collect-only", "-q", "-p", "no:cacheprovider", *_with_tests(options)]
    done = run.ask(argv, paths.REPO, _environment())
    return done.returncode, done.stdout + done.stderr


def _needs_guests(chosen: list[str]) -> bool:
    """Whether the selection has tests that boot guests or need builds."""
    words = [w for i, w in enumerate(chosen) if w != "-m" and (i == 0 or chosen[i - 1] != "-m")]
    status, said = _collect(["-m", NEEDS_BUILDS, *words])
    if status in (0, 5):
        return status == 0
    why, fix = last_lines(said, 15), "correct the error above"
    raise LabError("the tests cannot be collected", why, fix, errors.FAILED)


def _with_tests(options: Sequence[str]) -> list[str]:
    """Options for pytest with the folder of all tests, unless they name tests."""
    words = (word.partition("::")[0] for word in options if word.startswith("tests"))
    named = any((paths.REPO / word).exists() for word in words)
    return [*options, *([] if named else ["tests"])]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(paths.REPO), "PYTHONDONTWRITEBYTECODE": "1"}
