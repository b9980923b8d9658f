# SPDX-License-Identifier: GPL-2.0
"""What a user of kz sees: help, verbs, exit codes, three-part errors, clean output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, NoReturn

import pytest

from lab import cli, verbs
from lab.core import errors
from lab.core.paths import REPO
from lab.testing import suite as testing
from lab.testing.inputs import with_imports


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


def test_the_list_of_verbs_is_that_of_the_command_line() -> None:
    shown = [name for name, verb in cli.root().commands.items() if not verb.hidden]
    assert sorted(shown) == sorted(verbs.VERBS)
    for name, verb in cli.root().commands.items():
        assert verb.hidden or str(verb.help).startswith(verbs.VERBS[name].line)


def test_verbs_that_need_the_second_group_of_packages_get_it() -> None:
    """By what the modules of a verb's package import, also when it runs."""
    second = {"scipy", "numpy", "pytest", "hypothesis"}
    needs = set()
    for package in {verb.package for verb in verbs.VERBS.values()}:
        for file in with_imports([REPO / "lab" / package / "commands.py"]):
            text = file.read_text(encoding="utf-8")
            if re.search(rf"^\s*(?:import|from) (?:{'|'.join(second)})\b", text, re.MULTILINE):
                needs.add(package)
    assert {"bench", "report", "testing"} <= needs
    for name, verb in verbs.VERBS.items():
        assert verb.measures == (verb.package in needs), name


@pytest.mark.parametrize("group", [[], ["build"], ["series"]], ids=" ".join)
def test_without_a_verb_there_is_help_and_bad_usage(group: list[str]) -> None:
    done = kz(*group)
    assert done.returncode == errors.USAGE
    assert "Usage: kz" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


# Interrupts the lab after the process has started, before Popen() returns.
EARLY = (
    "import os, signal, subprocess, time\nfrom lab.core import paths\n"
    "class Popen(subprocess.Popen):\n"
    "    def __init__(self, *words, **options):\n"
    "        super().__init__(*words, **options)\n"
    "        while not (paths.cache() / 'pid').exists():\n"
    "            time.sleep(0.01)\n"
    "        os.kill(os.getpid(), signal.SIGINT)\n"
    "        time.sleep(0.1)\n"
    "subprocess.Popen = Popen\n"
)


@pytest.mark.parametrize("early", ["", EARLY], ids=["while it runs", "while it starts"])
def test_ctrl_c_ends_what_was_started(tmp_path: Path, early: str) -> None:
    """A long step is interrupted: its processes go, the exit code says so, nothing is kept."""
    script = early + (
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
        if not early:
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

    @pytest.mark.parametrize("words", [["help"], ["--help"], ["-h"], []], ids=" ".join)
    def test_help_needs_no_environment_and_no_network(
        self, words: list[str], tmp_path: Path
    ) -> None:
        cache = tmp_path / "cache"
        nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "0"}
        before = os.times()
        done = self.run(*words, KNOWNZERO_CACHE=str(cache), **nowhere)
        after = os.times()
        seconds = after.children_user + after.children_system
        assert seconds - before.children_user - before.children_system < 2
        assert done.returncode == (errors.OK if words else errors.USAGE), done.stderr
        assert done.stdout == verbs.text() + "\n"
        assert not cache.exists()

    def test_help_of_a_verb(self) -> None:
        done = self.run("help", "series", "save")
        assert done.returncode == 0, done.stderr
        assert "Usage: kz series save" in done.stdout

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_a_shell_completes_verbs(self, shell: str, tmp_path: Path) -> None:
        asked = {"COMP_WORDS": "kz evid", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "kz evid"}
        asked |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_KZ_COMPLETE": f"complete_{shell}"}
        done = self.run(**asked)
        assert done.stdout.count("evidence") >= 1, done.stderr
        assert "Usage" not in done.stdout
        done = self.run(**asked, KNOWNZERO_CACHE=str(tmp_path / "cache"))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

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
