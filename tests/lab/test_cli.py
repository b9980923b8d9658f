# SPDX-License-Identifier: GPL-2.0
"""What a user of kz sees: help for every verb, exit codes, three-part errors, clean output."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import namedtuple
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import IO, NoReturn

import pytest

from lab import cli, clidoc
from lab.core import errors
from lab.core.paths import REPO
from lab.testing import suite as testing


def kz(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a verb in a fork of this process: a new one would load the lab for half a second."""
    argv = ["kz", *arguments]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if (child := os.fork()) == 0:
            _run_verb(argv, environment, out, err)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        code = os.waitstatus_to_exitcode(status)
        return subprocess.CompletedProcess(argv, code, out.read(), err.read())


def _run_verb(argv: list[str], environment: dict[str, str], out: IO[str], err: IO[str]) -> NoReturn:
    code = errors.MACHINE
    try:
        signal.alarm(120)
        os.chdir(REPO)
        with open(os.devnull) as null:
            for number, file in enumerate((null, out, err)):
                os.dup2(file.fileno(), number)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, closefd=False)
            for number, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        os.environ.update({"COLUMNS": "200", **environment})
        sys.argv = argv
        cli.app.registered_groups.clear()  # of other tests
        code = cli.main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# In one process: to start one takes longer than to print a page.
ALL_HELP = """
import sys
from lab import cli
for verb in sys.argv[1:]:
    sys.argv = ["kz", *verb.split(), "--help"]
    print(f"\\nexit code {cli.main()} of {verb}")
"""


def test_every_verb_has_help() -> None:
    verbs = [" ".join(words[1:]) for words, _ in clidoc.verbs(cli.root())]
    assert len(verbs) > 20
    done = subprocess.run(
        [sys.executable, "-c", ALL_HELP, *verbs],
        env={**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    rest = done.stdout
    for verb in verbs:
        page, found, rest = rest.partition(f"\nexit code 0 of {verb}\n")
        assert found, rest + done.stderr
        assert f"Usage: kz {verb}" in page


def test_a_wrong_verb_is_bad_usage_with_a_suggestion() -> None:
    done = kz("biuld")
    assert done.returncode == errors.USAGE
    assert "build" in done.stderr
    assert done.stdout == ""
    assert "use page-fault" in kz("bench", "pagefault", "--help").stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["build", "linux", "--variant", "nonsense"],
        ["build", "linux", "--arch", "vax"],
        ["build", "linux", "--base", "6.11"],
        ["build", "nonsense"],
        ["nonsense", "--help"],
        ["bench", "nonsense", "--help"],
        ["package", "nonsense", "--help"],
        ["tree", "windows"],
        ["series", "check", "windows"],
        ["series", "check", "linux", "--against", "nonsense"],
        ["series", "check", "linux", "--against", "newest", "--each"],
        ["series", "export", "zeroed", "/proc"],
        ["series", "export", "nonsense", "/nonexistent/mails"],
        ["series", "save", "linux", "--path", "/nonexistent"],
        ["boot", "--kernel", "/nonexistent", "--", "true"],
        ["boot", "--add", "/nonexistent", "--", "true"],
        ["boot", "--no-such-option"],
        ["boot", "--accel", "xen"],
        ["boot", "--kernel", "README.md"],
        ["boot", "--base", "6.11"],
        ["package", "kernel", "--base", "6.12"],
        ["package", "daemon", "--base", "6.12"],
        ["boot", "--qemu", "/nonexistent"],
        ["boot", "--qemu", "README.md"],
        ["boot", "--dry-run", "--accel", "xen"],
        ["package", "kernel", "--output", "/proc/x"],
        ["conform", "--bundle", "/proc/x"],
        ["conform", "--bundle", "."],
        ["conform", "--", "/nonexistent", "{kernel}", "{initrd}", "{append}"],
        ["demo", "--base", "README.md"],
        ["bench", "thp", "--qemu", "/nonexistent"],
        ["report", "README.md"],
        ["report", "/nonexistent"],
        ["report", "docs/results/demo", "--output", "/proc/x"],
        ["compare", "README.md", "README.md"],
        ["night", "merge", "README.md"],
        ["night", "merge", "docs"],
        ["test", "--quick", "--junit", "/proc/x"],
        ["boot", "--cpus", "0"],
        ["boot", "--memory", "nonsense"],
        ["boot", "--memory", "0"],
        ["boot", "--arch", "riscv"],
        ["boot", "--arch", "um", "--device", "virtio-balloon-pci"],
        ["boot", "--arch", "um", "--cpus", "2"],
        ["boot", "--arch", "um", "--accel", "tcg"],
        ["boot", "--arch", "um", "--qemu", "stock"],
        ["boot", "--arch", "um", "--kernel", "stock"],
        ["boot", "--arch", "arm64", "--kernel", "stock"],
        ["conform", "--arch", "arm64", "--", "{kernel}", "{initrd}", "{append}"],
        ["conform", "--", "true"],
        ["boot", "--arch", "um", "--qemu-arg=-nonsense"],
        ["demo", "--pairs", "0"],
        ["demo", "--output", "/proc/version"],
        ["bench", "all", "--output", "/proc/version/x"],
        ["top", "--interval", "0"],
        ["test", "--stage", "fuzz"],
        ["test", "--nightly", "--quick"],
        ["test", "--nightly", "--stage", "nonsense"],
        ["test", "--nightly", "--stage", "bench", "--select", "fuzz"],
        ["top", "--kernel", "/nonexistent", "--once"],
        ["top", "--socket", "/nonexistent", "--", "true"],
    ],
    ids=" ".join,
)
def test_bad_usage(arguments: list[str], tmp_path: Path) -> None:
    """Before anything is built, downloaded or started: the cache stays as it was."""
    done = kz(
        *arguments,
        KNOWNZERO_CACHE=str(tmp_path),
        KNOWNZERO_LINUX_SOURCE="",
        KNOWNZERO_QEMU_SOURCE="",
    )
    assert done.returncode == errors.USAGE, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith("kz: ")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["why", "fix"]
    assert "Errno" not in done.stderr
    assert [*tmp_path.glob("images/*"), *tmp_path.glob("obj/*"), *tmp_path.glob("src/*")] == []
    assert [*tmp_path.glob("downloads/*"), *tmp_path.glob("debs/*")] == []


@pytest.mark.parametrize("group", [[], ["build"], ["series"]], ids=" ".join)
def test_without_a_verb_there_is_help_and_bad_usage(group: list[str]) -> None:
    done = kz(*group)
    assert done.returncode == errors.USAGE
    assert "Usage: kz" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_short_help_and_the_version() -> None:
    assert kz("-h").stdout == kz("--help").stdout
    assert "Usage: kz boot" in kz("boot", "-h").stdout
    assert "use page-fault" in kz("bench", "pagefault", "-h").stderr
    done = kz("--version")
    assert (done.returncode, done.stderr) == (errors.OK, "")
    assert re.fullmatch(r"kz \S+: linux [\d.]+, qemu [\d.]+\n", done.stdout)
    assert kz("boot", "--version").returncode == errors.USAGE
    assert "verbs have no --version" in re.sub(r"[\s│]+", " ", kz("--help").stdout)


def test_a_dry_run_prints_the_commands_and_builds_nothing(tmp_path: Path) -> None:
    options = ["--memory", "1G", "--device", "daemon,target=256M", "--append", "quiet"]
    done = kz("boot", "--dry-run", *options, "--", "true", KNOWNZERO_CACHE=str(tmp_path))
    assert done.returncode == errors.OK, done.stderr
    *_, daemon, qemu = done.stdout.splitlines()
    assert daemon.endswith(" --target=256M &")
    words = shlex.split(qemu)
    assert words[0].endswith("/usr/bin/qemu-system-x86_64")
    assert words[words.index("-m") + 1] == "1G"
    assert words[words.index("-append") + 1].endswith(" quiet")
    assert "# first: ./kz build linux --variant knownzero --arch x86_64" in done.stdout.splitlines()
    assert not [*tmp_path.glob("images/*"), *tmp_path.glob("obj/linux*"), *tmp_path.glob("src/*")]


def test_verbose_prints_each_command(tmp_path: Path) -> None:
    done = kz("--verbose", "doctor", KNOWNZERO_CACHE=str(tmp_path))
    assert "kz: $ cc --version" in done.stderr.splitlines()
    assert "kz: $" not in kz("doctor", KNOWNZERO_CACHE=str(tmp_path)).stderr


def test_a_cache_that_cannot_be_written_is_a_broken_machine() -> None:
    done = kz("build", "linux", KNOWNZERO_CACHE="/proc/nowhere")
    assert done.returncode == errors.MACHINE
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_speaks_json_and_installs_nothing(cache: Path) -> None:
    done = kz("doctor", "--json")
    assert done.returncode in (errors.OK, errors.MACHINE), done.stderr
    names = {finding["name"] for finding in json.loads(done.stdout)}
    assert {
        "machine",
        "cache",
        "Debian mirror",
        "tools for linux",
        "tools for qemu",
        "KVM",
    } <= names
    assert not (cache / "downloads").exists() or not list((cache / "downloads").iterdir())


def test_output_to_a_pipe_has_no_control_characters() -> None:
    for done in (kz("--help"), kz("boot", "--kernel", "/nonexistent"), kz("doctor")):
        assert "\x1b" not in done.stdout + done.stderr


def test_ctrl_c_ends_what_was_started(tmp_path: Path) -> None:
    """A long step is interrupted: its processes go, the exit code says so, nothing is kept."""
    script = (
        "from lab.core import lock, paths, run\nimport lab.cli as cli\n"
        "@cli.app.command()\n"
        "def forever() -> None:\n"
        "    with lock.new_directory(paths.sub('images') / 'x'):\n"
        "        print('started', flush=True)\n"
        "        line = 'sleep 1000 & echo $! > pid.part; mv pid.part pid; wait'\n"
        "        run.logged(['sh', '-c', line], paths.log_file('l'), 'what', 'fix', "
        "cwd=paths.cache())\n"
        "raise SystemExit(cli.main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO), "KNOWNZERO_CACHE": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script, "forever"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=100)
    assert process.returncode == errors.INTERRUPTED
    assert "interrupted" in said
    assert list((tmp_path / "images").iterdir()) == []
    left = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    deadline = time.monotonic() + 30  # a killed process ends when it gets a CPU
    while left.exists() and left.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def a_build(variant: str, arch: str, chosen: tuple[str, ...] = ()) -> None:
    """Fails for one kernel, after another has begun; that one takes long."""
    mark = Path(os.environ["BUILDS"]) / f"{variant}-{arch}"
    if variant == "debug":
        mark.touch()
        time.sleep(10_000)
    while not (mark.parent / "debug-x86_64").exists():
        time.sleep(0.01)
    raise errors.LabError(f"{variant} does not build", "no such file", "add it")


def nothing() -> None:
    return None


def quick(variant: str, arch: str, chosen: tuple[str, ...] = ()) -> None:
    (Path(os.environ["BUILDS"]) / "-".join([variant, arch, *chosen])).touch()


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BUILDS", str(tmp_path))
    monkeypatch.setattr("lab.build.programs.build_programs", nothing)
    monkeypatch.setattr(testing, "build_qtests", nothing)
    monkeypatch.setattr("lab.machine.tools.need", lambda *names: None)
    return tmp_path


def test_a_build_that_fails_ends_the_other(builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.build.linux.build_linux", a_build)
    with pytest.raises(errors.LabError, match="off does not build") as found:
        testing.prepare()
    assert found.value.fix == "add it"
    assert not multiprocessing.active_children()


@pytest.mark.timeout(60)
def test_all_is_built(builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes end when their lists are done; a race would show in ten turns."""
    monkeypatch.setattr("lab.build.linux.build_linux", quick)
    for _ in range(10):
        testing.prepare()
    assert len(list(builds.iterdir())) == len(testing.KERNELS) + len(testing.PART_KERNELS)


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 1), (2, 130), (3, 3), (4, 2)])
def test_exit_codes_of_pytest(status: int, code: int) -> None:
    assert testing.exit_code(status) == code


def test_no_test_at_all_is_no_success() -> None:
    with pytest.raises(errors.LabError) as caught:
        testing.exit_code(5)
    assert caught.value.code == errors.USAGE


STUBBORN = """
import sys
from pathlib import Path
from lab import cli
from lab.testing import suite
child = "import pathlib, signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); " \
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); pathlib.Path(sys.argv[1]).touch(); " \
    "time.sleep(1000)"
suite.PYTEST = [sys.executable, "-c", child, sys.argv[1]]
try:
    suite.run_tests("", None, True, [])
except KeyboardInterrupt:
    raise SystemExit(130)
"""


def test_an_interruption_ends_quick_tests_at_once(tmp_path: Path) -> None:
    """Also workers that ignore it: they had 40 s to write results."""
    mark = tmp_path / "runs"
    argv = [sys.executable, "-c", STUBBORN, str(mark)]
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(REPO)}) as process:
        while not mark.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        # A bound for a loaded machine.
        assert process.wait(testing.LAST_WORDS / 2) == errors.INTERRUPTED


class TestBootstrap:
    """./kz itself, with the standard library alone."""

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(REPO / "kz"), *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def test_a_full_disk_has_its_own_advice(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Not: check the network."""
        name = "kz_bootstrap"
        loader = SourceFileLoader(name, str(REPO / "kz"))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec
        kz = importlib.util.module_from_spec(spec)
        loader.exec_module(kz)
        argv = ["sh", "-c", "echo 'pip: [Errno 28] No space left on device'; exit 1"]
        with pytest.raises(SystemExit):
            kz.run_logged(argv, tmp_path / "log", "cannot install", "check the network")
        assert "fix: free some space" in capsys.readouterr().err
        # The log is on the full disk, too: the message may be missing.
        disk = namedtuple("disk", "free")
        monkeypatch.setattr(kz.shutil, "disk_usage", lambda folder: disk(0))
        with pytest.raises(SystemExit):
            kz.run_logged(["sh", "-c", "exit 1"], tmp_path / "log2", "cannot", "the network")
        assert "fix: free some space" in capsys.readouterr().err

    def test_it_starts_from_anywhere(self, tmp_path: Path) -> None:
        (tmp_path / "lab").mkdir()
        for name in ("__init__.py", "__main__.py"):
            (tmp_path / "lab" / name).write_text("raise SystemExit('another checkout')")
        done = subprocess.run(
            [str(REPO / "kz"), "--help"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "doctor" in done.stdout

    def test_a_cache_that_cannot_be_made(self) -> None:
        done = self.run("doctor", KNOWNZERO_CACHE="/proc/nowhere")
        assert done.returncode == errors.MACHINE
        assert [line.split(":")[0].strip() for line in done.stderr.splitlines()] == [
            "kz",
            "why",
            "fix",
        ]

    def test_a_package_index_that_is_not_there(self, tmp_path: Path) -> None:
        done = self.run(
            "doctor",
            KNOWNZERO_CACHE=str(tmp_path),
            PIP_INDEX_URL="http://127.0.0.1:9/",
            PIP_FIND_LINKS="",
            PIP_RETRIES="0",
            PIP_NO_CACHE_DIR="1",
            PIP_DEFAULT_TIMEOUT="2",
        )
        assert done.returncode == errors.MACHINE
        assert "cannot install the lab's Python packages" in done.stderr
        assert not list((tmp_path / "venv").glob("*/.ready"))

    def test_one_command_installs_all_that_a_bare_machine_lacks(self, tmp_path: Path) -> None:
        """Python has no venv, there is no other program, and the user may not install any."""
        (tmp_path / "ensurepip.py").write_text("raise ImportError\n", encoding="utf-8")
        done = self.run(
            "test", KNOWNZERO_CACHE=str(tmp_path), PYTHONPATH=str(tmp_path), PATH=str(tmp_path)
        )
        assert done.returncode == errors.MACHINE
        command = next(
            line for line in done.stderr.splitlines() if line.startswith("  fix: run: sudo ")
        )
        packages = command.split("--no-install-recommends ")[1].split()
        assert packages[0] == "python3-venv"
        assert {"gcc", "flex", "libglib2.0-dev", "cargo", "rust-clippy", "dpkg-dev"} < set(packages)
        assert len(packages) == len(set(packages))
