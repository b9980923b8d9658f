# SPDX-License-Identifier: GPL-2.0
"""``kz test``: build what the tests need, run them all, and say plainly how it went."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lab import build, errors, fetch, guest, lock, paths, progress, run
from lab.errors import LabError

# What guests in tests are made of; the slowest first, so that nothing waits at the end.
KERNELS = (
    ("debug", "x86_64"),
    ("knownzero", "x86_64"),
    ("debug", "um"),
)
QTESTS = ("virtio-balloon-reporting-test", "virtio-balloon-test")
QUICK = "not boots and not slow"


def prepare() -> None:
    """Build every kernel, QEMU and program the tests use; quick when the cache has them."""
    for name in fetch.NAMES:
        build.need_tools(name)
    build.build_qemu("knownzero")
    build_qtests()
    for variant, arch in KERNELS:
        build.build_linux(variant, arch)
    guest.build_programs()


def qtest_programs() -> list[str]:
    """The qtests that concern the balloon and are in the patched source."""
    source = fetch.obtain("qemu")
    with build.qemu_tree("knownzero", source) as tree:
        return [name for name in QTESTS if (tree / "tests" / "qtest" / f"{name}.c").is_file()]


def build_qtests() -> Path:
    """Build QEMU's qtests where QEMU was built; returns that folder."""
    source = fetch.obtain("qemu")
    obj = build.qemu_object_dir("knownzero", source)
    with lock.locked("build-qemu-knownzero"), build.qemu_tree("knownzero", source) as tree:
        log = paths.log_file("qtests")
        with progress.step("building QEMU's qtests", log):
            build.make_qemu(
                tree, obj, log, ["qemu-system-x86_64", *[f"tests/qtest/{name}" for name in qtest_programs()]]
            )
    return obj


def run_tests(select: str, junit: Path | None, quick: bool, extra: list[str]) -> int:
    """Run pytest over tests/; returns the lab's exit code (0 fine, 1 failures, 2 usage, 3 machine)."""
    marks = QUICK if quick else ""
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(paths.REPO / "pyproject.toml"),
        "--rootdir",
        str(paths.REPO),
    ]
    chosen = (["-k", select] if select else []) + (["-m", marks] if marks else [])
    if not quick and _needs_guests(argv, chosen):
        prepare()
    # One more than there are CPUs: guests sleep and wait as well.
    jobs = min(build.jobs() + 1, 5)
    argv += [*chosen, "-n", str(jobs), "--dist", "worksteal", "-rsxXR"]
    if junit:
        junit.parent.mkdir(parents=True, exist_ok=True)
        argv.append(f"--junit-xml={junit.absolute()}")
    process = subprocess.Popen([*argv, *extra, "tests"], cwd=paths.REPO, env=_environment())
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    return exit_code(status)


def exit_code(status: int) -> int:
    """pytest's exit status as the lab's."""
    if status == 2:
        return errors.INTERRUPTED
    if status == 4:
        return errors.USAGE
    if status == 5:
        raise errors.UsageError(
            "no test was run",
            "nothing matches the selection",
            "see the names with: kz test --select '' -- --collect-only",
        )
    return {0: errors.OK, 1: errors.FAILED}.get(status, errors.MACHINE)


def _needs_guests(argv: list[str], chosen: list[str]) -> bool:
    """Whether the selection has tests that boot guests or need builds."""
    words = [w for i, w in enumerate(chosen) if w != "-m" and (i == 0 or chosen[i - 1] != "-m")]
    done = subprocess.run(
        [*argv, "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "boots or slow", *words, "tests"],
        cwd=paths.REPO,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode in (0, 5):
        return done.returncode == 0
    raise LabError(
        "the tests cannot be collected",
        run_tail(done.stdout + done.stderr),
        "mend the error above",
        errors.FAILED,
    )


def run_tail(text: str, lines: int = 15) -> str:
    """The end of a text."""
    return "\n".join(text.strip().splitlines()[-lines:])


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(paths.REPO), "PYTHONDONTWRITEBYTECODE": "1"}


def qtest(name: str, log: Path) -> None:
    """Run one of QEMU's qtests on our QEMU; raises LabError (code 1) when it fails."""
    obj = build_qtests()
    environment = {
        **os.environ,
        # The one that finds its firmware.
        "QTEST_QEMU_BINARY": str(build.build_qemu("knownzero")),
        "G_TEST_DBUS_DAEMON": "",
    }
    argv = [str(obj / "tests" / "qtest" / name), "--tap", "-k"]
    run.logged(argv, log, f"QEMU's {name} fails", "read the log", env=environment, cwd=obj, timeout=300)
