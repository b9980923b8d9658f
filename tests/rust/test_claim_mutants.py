# SPDX-License-Identifier: GPL-2.0
"""Do the tests of claims find anything? Crates and daemons with one mistake each."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from lab.build import daemon
from lab.core import lock, paths, run

pytestmark = [pytest.mark.nightly, pytest.mark.matrix, pytest.mark.slow, pytest.mark.timeout(1800)]

FOLDER = paths.REPO / "tests" / "mutants" / "rust"
PATCHES = {patch.stem: patch for patch in sorted(FOLDER.glob("*.patch"))}


def field(name: str, key: str) -> str:
    """What the text above the diff says."""
    head = PATCHES[name].read_text(encoding="utf-8").partition("\ndiff --git ")[0]
    found = re.findall(rf"^{key}: (\S+)$", head, re.MULTILINE)
    assert len(found) == 1, f"{name}: one line '{key}: NAME'"
    return str(found[0])


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources."""
    repository = tmp_path_factory.mktemp("claims")
    ignore = shutil.ignore_patterns("target", "mutants.out*")
    for part in ("vhost-user-balloon", "packaging"):
        # With new times: cargo would take what it has built of a mistake for the result of these.
        shutil.copytree(
            paths.REPO / part, repository / part, ignore=ignore, copy_function=shutil.copy
        )
    return repository / daemon.WORKSPACE.name


def outcome_of(workspace: Path, crate: str, names: list[str]) -> run.Done:
    """Run these tests of a crate."""
    environment = {**os.environ, "CARGO_TARGET_DIR": str(paths.sub("obj", "rust-claims"))}
    if crate == daemon.NAME:
        kinds = ["--lib", "--test", "device"]
    else:
        kinds = ["--all-features", "--lib", "--tests"]
    argv = ["cargo", "test", "--locked", "--no-fail-fast", "-p", crate, *kinds, "--", *names]
    with lock.locked("cargo-claims"):
        # Cargo would run what another worker has built of its copy since.
        for source in workspace.rglob("*.rs"):
            source.touch()
        return run.ask(argv, env=environment, cwd=workspace)


def test_none(workspace: Path) -> None:
    """The control: without a mistake each of these tests passes."""
    for crate in sorted({field(name, "Crate") for name in PATCHES}):
        tests = {field(name, "Found-by") for name in PATCHES if field(name, "Crate") == crate}
        done = outcome_of(workspace, crate, sorted(tests))
        assert done.returncode == 0, done.stdout + done.stderr
        for test in tests:
            assert re.search(rf"^test (\w+::)*{test} \.\.\. ok$", done.stdout, re.M), test


@pytest.mark.parametrize("name", PATCHES)
def test_mutant(name: str, workspace: Path) -> None:
    patch = ["patch", "-sp1", "-i", str(PATCHES[name])]
    run.output(patch, f"cannot make {name}", "save the patch again", cwd=workspace.parent)
    text = PATCHES[name].read_text(encoding="utf-8")
    changed = re.findall(r"^\+\+\+ b/(\S+)$", text, re.MULTILINE)
    assert changed
    try:
        test = field(name, "Found-by")
        done = outcome_of(workspace, field(name, "Crate"), [test])
    finally:
        for file in changed:
            # patch -R could put a line elsewhere.
            shutil.copy(paths.REPO / file, workspace.parent / file)
    assert "error: could not compile" not in done.stderr, done.stderr[-3000:]
    found = re.search(rf"^test (\w+::)*{test} \.\.\. FAILED$", done.stdout, re.M)
    assert done.returncode and found, f"not found:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
