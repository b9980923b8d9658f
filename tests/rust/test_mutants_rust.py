# SPDX-License-Identifier: GPL-2.0
"""Do the crates' own tests find anything? cargo-mutants makes one mistake at a time, and a test must fail."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from lab.build import daemon
from lab.core import lock, paths, run

pytestmark = [pytest.mark.nightly, pytest.mark.matrix, pytest.mark.slow, pytest.mark.timeout(3600)]

NIGHTS = 8
CAUGHT, TIMEOUT = 0, 3  # exit codes of cargo-mutants; a mistake that loops is found, too


def test_no_mutant_survives(tmp_path: Path) -> None:
    """A part of the mistakes each night; .cargo/mutants.toml names the exceptions."""
    if not shutil.which("cargo-mutants"):
        pytest.skip("cargo-mutants is missing: cargo install cargo-mutants --locked")
    # Cargo cannot distinguish what it built of the copy with a mistake, so the folder is another one.
    environment = {**os.environ, "CARGO_TARGET_DIR": str(paths.sub("obj", "rust-mutants"))}
    shard = ["--shard", f"{int(time.time()) // 86400 % NIGHTS}/{NIGHTS}", "--timeout", "120"]
    crates = ["-p", "balloon-protocol", "-p", "balloon-discard", "--output", str(tmp_path)]
    argv = ["cargo", "mutants", *crates, *shard, "--", "--locked", "--lib", "--tests"]
    with lock.locked("cargo-mutants"):
        done = run.ask(argv, cwd=daemon.WORKSPACE, env=environment)
    print(done.stdout)
    assert done.returncode in (CAUGHT, TIMEOUT), done.stdout[-4000:] + done.stderr[-2000:]
    assert "mutants tested" in done.stdout
