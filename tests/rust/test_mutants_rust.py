# SPDX-License-Identifier: GPL-2.0
"""Do the tests find anything? cargo-mutants makes one mistake at a time, and a test must fail."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from lab.build import daemon
from lab.core import lock, paths, run
from lab.core.errors import LabError

pytestmark = [pytest.mark.nightly, pytest.mark.matrix, pytest.mark.slow, pytest.mark.timeout(7200)]

CAUGHT, TIMEOUT = 0, 3  # exit codes of cargo-mutants; a mistake that loops is found, too
OFFLINE = ("--offline", "--locked")
# Of the daemon: its unit tests, and those that need no process of it.
OWN = ("--lib", "--test", "device", "--test", "corpus")
# A mutant that passes the daemon's own tests must fail one of these.
FROM_OUTSIDE = (
    "tests/hostile",
    "tests/rust/test_bad_input.py",
    "tests/rust/test_vhost_user_balloon.py::test_the_daemon_is_built_and_runs",
)


@pytest.fixture(autouse=True)
def cargo_mutants() -> None:
    if not shutil.which("cargo-mutants"):
        pytest.skip("cargo-mutants is missing: cargo install cargo-mutants --locked")


def tonight(nights: int) -> str:
    """The part of the mistakes that is made tonight; .cargo/mutants.toml names the exceptions.

    ``nights`` is a prime number, so that a run every few days makes all of them.
    """
    return f"{int(time.time()) // 86400 % nights}/{nights}"


def test_no_mutant_survives(tmp_path: Path) -> None:
    # Cargo cannot distinguish what it built of the copy with a mistake, so the folder is another
    # one.
    environment = {**os.environ, "CARGO_TARGET_DIR": str(paths.sub("obj", "rust-mutants"))}
    crates = ["-p", "balloon-protocol", "-p", "balloon-discard", "--output", str(tmp_path)]
    options = ["--shard", tonight(7), "--timeout", "600", "--", "--locked", "--lib", "--tests"]
    with lock.locked("cargo-mutants"):
        done = run.ask(
            ["cargo", "mutants", *crates, *options], cwd=daemon.WORKSPACE, env=environment
        )
    print(done.stdout)
    assert done.returncode in (CAUGHT, TIMEOUT), done.stdout[-4000:] + done.stderr[-2000:]
    assert "mutants tested" in done.stdout


def survives(repository: Path, environment: dict[str, str], log: Path) -> bool:
    """Whether the daemon of this copy of the repository passes every test."""
    workspace, crate = repository / daemon.WORKSPACE.name, ("-p", daemon.NAME)
    programs = (
        (["cargo", "build", *OFFLINE, *crate], workspace),
        (["cargo", "test", *OFFLINE, *crate, *OWN], workspace),
        ([sys.executable, "-m", "pytest", "-q", "-x", "-n2", *FROM_OUTSIDE], repository),
    )
    try:
        for argv, folder in programs:
            run.logged(
                argv, log, "a test fails", "see the log", cwd=folder, env=environment, timeout=900
            )
    except LabError:
        return False
    return True


def test_no_mutant_of_the_daemon_survives(tmp_path: Path) -> None:
    """The same for the daemon, which passes without a mistake."""
    repository, target = tmp_path / "repository", paths.sub("obj", "rust-mutants-daemon")
    shutil.copytree(
        paths.REPO, repository, ignore=shutil.ignore_patterns(".git", "out", "target", "*cache*")
    )
    workspace, log = repository / daemon.WORKSPACE.name, paths.log_file("mutants-daemon")
    environment = {
        **os.environ,
        "CARGO_TARGET_DIR": str(target),
        "KNOWNZERO_DAEMON": str(target / "debug" / daemon.NAME),
        "PYTHONPATH": str(repository),
    }
    assert survives(repository, environment, log), log
    listing = [
        "cargo",
        "mutants",
        "-p",
        daemon.NAME,
        "--list",
        "--json",
        "--diff",
        "--shard",
        tonight(31),
    ]
    mutants = json.loads(
        run.output(listing, "cannot list the mistakes", f"see {workspace}", cwd=workspace)
    )
    assert mutants
    survivors = []
    for mutant in mutants:
        make = ["patch", "-sp0"], f"cannot make {mutant['name']}", f"see {workspace}"
        run.output(*make, cwd=workspace, stdin=mutant["diff"].encode())
        if survives(repository, environment, log):
            survivors.append(mutant["name"])
        shutil.copy(daemon.WORKSPACE / mutant["file"], workspace / mutant["file"])
    print(f"{len(mutants)} mistakes in the daemon, of which found: {len(mutants) - len(survivors)}")
    assert not survivors, f"see {log}"
