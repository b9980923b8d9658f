# SPDX-License-Identifier: GPL-2.0
"""What a fuzzer has found is told from a fuzzer that could not go on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lab.core import errors, paths
from lab.core.errors import LabError, TestFailure
from tests.rust import fuzzing as fuzz

TARGET = fuzz.TARGETS[0]
# Of a fuzzer: where it leaves what it finds, and what it says in the end.
PREFIX = (
    'for word; do case $word in -artifact_prefix=*) prefix=${word#*=};; esac; done\n[ -d "$1" ] || '
    "exit 1\n"
)
END = "echo '#9 cov: 120 ft: 3'\necho 'Done 900 runs in 2 second(s)'\n"


@pytest.fixture
def corpus(repo: Path, tmp_path: Path) -> Path:
    """The folder of inputs, and a repository whose out/ is empty."""
    del repo
    folder = tmp_path / "corpus"
    folder.mkdir()
    return folder


def fuzzer(tmp_path: Path, script: str) -> Path:
    """The folder of a fuzzer that does what the shell script says."""
    folder = tmp_path / "programs"
    folder.mkdir(exist_ok=True)
    program = folder / TARGET
    program.write_text(f"#!/bin/sh\n{PREFIX}{script}")
    program.chmod(0o755)
    return folder


def test_a_run_that_ends_well(corpus: Path, tmp_path: Path) -> None:
    assert fuzz.fuzz(fuzzer(tmp_path, END), TARGET, corpus, 1) == fuzz.Fuzzed(900, 120)


def test_what_is_found_is_a_failure_also_when_it_is_found_again(
    corpus: Path, tmp_path: Path
) -> None:
    programs = fuzzer(
        tmp_path, 'sleep 0.1; echo x > "${prefix}crash-1"; echo "it crashed" >&2; exit 77'
    )
    for _ in range(2):
        with pytest.raises(TestFailure, match="has found something") as caught:
            fuzz.fuzz(programs, TARGET, corpus, 1)
        assert caught.value.code == errors.FAILED
        assert "it crashed" in caught.value.why
        assert str(paths.out() / "fuzz" / TARGET / "crash-1") in caught.value.fix


@pytest.mark.parametrize(
    ("script", "ended"),
    [
        ("exit 77", "exit code 77"),
        ("kill -9 $$", "signal 9"),
        # Slow, and then out of disk: no finding.
        ('echo x > "${prefix}slow-unit-1"; exit 1', "exit code 1"),
    ],
)
def test_a_fuzzer_that_cannot_go_on_is_no_finding(
    script: str, ended: str, corpus: Path, tmp_path: Path
) -> None:
    # Of another run, by itself no reason to call this one's end a finding.
    old = paths.out() / "fuzz" / TARGET / "crash-0"
    old.parent.mkdir(parents=True)
    old.write_text("x")
    with pytest.raises(LabError, match=f"the fuzzer {TARGET} ended with {ended}") as caught:
        fuzz.fuzz(fuzzer(tmp_path, script), TARGET, corpus, 1)
    assert caught.value.code == errors.MACHINE


def test_a_corpus_that_is_gone_is_no_finding(corpus: Path, tmp_path: Path) -> None:
    shutil.rmtree(corpus)
    with pytest.raises(LabError, match=f"the fuzzer {TARGET} ended with exit code 1") as caught:
        fuzz.fuzz(fuzzer(tmp_path, END), TARGET, corpus, 1)
    assert caught.value.code == errors.MACHINE


def test_a_fuzzer_without_output_fails(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="says nothing"):
        fuzz.fuzz(fuzzer(tmp_path, "exit 0"), TARGET, corpus, 1)
