# SPDX-License-Identifier: GPL-2.0
"""``kz test``: build everything that the tests need, and run pytest."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.build import ahead
from lab.build import linux as build
from lab.build import programs as guest
from lab.build.images import jobs
from lab.build.qemu import build_qemu, find_qemu, make_qemu, qemu_object_dir, qemu_tree
from lab.core import errors, lock, paths, progress, run
from lab.core.errors import LabError
from lab.machine import fetch, tools

# The kernels of guests in tests; the slowest build first.
KERNELS = (
    ("debug", "x86_64"),
    ("knownzero", "x86_64"),
    ("debug", "um"),
)
# Parts that the day builds alone, for User-Mode Linux; the night builds every set.
PART_SETS = (("fixes",), ("fixes", "content"), ("fixes", "content", "zeroed"))
QTESTS = ("virtio-balloon-reporting-test", "virtio-balloon-test")
QUICK = "not boots and not slow"
LAST_WORDS = 40.0  # seconds, of which pytest's workers may take ten to end


def prepare() -> None:
    """Build every kernel, QEMU and program the tests use; quick when the cache has them."""
    tools.need(*tools.TESTS)
    with contextlib.nullcontext() if find_qemu() else ahead.of_kernels():
        build_qemu("knownzero")
    build_qtests()
    for variant, arch in KERNELS:
        build.build_linux(variant, arch)
    for chosen in PART_SETS:
        build.build_linux("debug", "um", chosen=chosen)
    guest.build_programs()


def qtest_programs() -> list[str]:
    """The qtests that concern the balloon and are in the patched source."""
    source = fetch.obtain("qemu")
    with qemu_tree("knownzero", source) as tree:
        return [name for name in QTESTS if (tree / "tests" / "qtest" / f"{name}.c").is_file()]


def build_qtests() -> Path:
    """Build QEMU's qtests where QEMU was built; returns that folder."""
    source = fetch.obtain("qemu")
    obj = qemu_object_dir("knownzero", source)
    with lock.locked("build-qemu-knownzero"), qemu_tree("knownzero", source) as tree:
        log = paths.log_file("qtests")
        with progress.step("building QEMU's qtests", log):
            make_qemu(
                tree, obj, log, ["qemu-system-x86_64", *[f"tests/qtest/{name}" for name in qtest_programs()]]
            )
    return obj


def run_tests(select: str, junit: Path | None, quick: bool, extra: list[str]) -> int:
    """Run pytest over tests/; returns the lab's exit code (0 fine, 1 failures, 2 usage, 3 machine)."""
    marks = QUICK if quick else ""
    chosen = (["-k", select] if select else []) + (["-m", marks] if marks else [])
    if not quick and _needs_guests([*chosen, *extra]):
        prepare()
    # One more than there are CPUs: guests sleep and wait as well.
    workers = min(jobs() + 1, 5)
    argv = [*PYTEST, *chosen, "-n", str(workers), "--dist", "worksteal", "-rsxXR"]
    if ended := os.environ.get("KNOWNZERO_CASES"):
        shard = os.environ.get("KNOWNZERO_SHARD", "")
        argv += ["-p", "lab.testing.cases", f"--cases={ended}", f"--shard={shard}"]
    if junit:
        junit.parent.mkdir(parents=True, exist_ok=True)
        argv.append(f"--junit-xml={junit.absolute()}")
    process = subprocess.Popen([*argv, *_with_tests(extra)], cwd=paths.REPO, env=_environment())
    try:
        status = process.wait()
    except BaseException as why:
        # The terminal has interrupted pytest as well; a second time, and it would not write its results.
        if not isinstance(why, KeyboardInterrupt):
            process.send_signal(signal.SIGINT)
        _await_end(process)
        raise
    return exit_code(status)


def _await_end(process: subprocess.Popen[bytes]) -> None:
    """Give pytest the time to end its tests and to write what it knows."""
    try:
        process.wait(LAST_WORDS)
    except BaseException as why:
        process.kill()
        if not isinstance(why, subprocess.TimeoutExpired):
            raise


def exit_code(status: int) -> int:
    """pytest's exit status as the lab's."""
    if status == 2:
        return errors.INTERRUPTED
    if status == 4:
        return errors.USAGE
    if status == 5:
        fix = "see the names with: kz test --select '' -- --collect-only"
        raise errors.UsageError("no test was run", "the selection matches no test", fix)
    return {0: errors.OK, 1: errors.FAILED}.get(status, errors.MACHINE)


PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-c",
    str(paths.REPO / "pyproject.toml"),
    "--rootdir",
    str(paths.REPO),
]


def check_selection(select: str, marks: str, options: Sequence[str], settings: dict[str, str]) -> None:
    """UsageError unless pytest's -k, -m and ``options`` choose a test (none if ``marks`` is empty)."""
    chosen = ["-k", select] if select else []
    status, said = (5, "") if not marks else _collect([*chosen, "-m", marks, *options], settings)
    if status == 5:
        why = f"no test of the chosen stages matches {shlex.join([*chosen, *options])}"
        fix = "choose other stages, or see the names with: kz test --select '' -- --collect-only"
        raise errors.UsageError("no test would be run", why, fix)
    if status:
        wrong = [line for line in said.splitlines() if re.search(r"^ERROR: (?!usage)|: error: ", line)]
        fix = "correct --select or the options for pytest"
        raise errors.UsageError("the tests cannot be selected", "\n".join(wrong) or _tail(said), fix)


def _collect(options: list[str], settings: dict[str, str] | None = None) -> tuple[int, str]:
    """pytest's exit status, and what it says, when it only lists tests."""
    done = subprocess.run(
        [*PYTEST, "--collect-only", "-q", "-p", "no:cacheprovider", *_with_tests(options)],
        cwd=paths.REPO,
        env={**_environment(), **(settings or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def _needs_guests(chosen: list[str]) -> bool:
    """Whether the selection has tests that boot guests or need builds."""
    words = [w for i, w in enumerate(chosen) if w != "-m" and (i == 0 or chosen[i - 1] != "-m")]
    status, said = _collect(["-m", "boots or slow", *words])
    if status in (0, 5):
        return status == 0
    raise LabError("the tests cannot be collected", _tail(said), "correct the error above", errors.FAILED)


def _tail(text: str, lines: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def _with_tests(options: Sequence[str]) -> list[str]:
    """Options for pytest with the folder of all tests, unless they name tests."""
    named = any(
        (paths.REPO / word.partition("::")[0]).exists() for word in options if word.startswith("tests")
    )
    return [*options, *([] if named else ["tests"])]


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KNOWNZERO_CASES", "KNOWNZERO_SHARD"))
    }
    return {**kept, "PYTHONPATH": str(paths.REPO), "PYTHONDONTWRITEBYTECODE": "1"}


def qtest(name: str, log: Path) -> None:
    """Run one of QEMU's qtests on our QEMU; raises LabError (code 1) when it fails."""
    obj = build_qtests()
    # This QEMU finds its firmware, and the one in the object folder does not.
    environment = {**os.environ, "QTEST_QEMU_BINARY": str(build_qemu("knownzero")), "G_TEST_DBUS_DAEMON": ""}
    argv = [str(obj / "tests" / "qtest" / name), "--tap", "-k"]
    run.logged(argv, log, f"QEMU's {name} fails", "read the log", env=environment, cwd=obj, timeout=300)
