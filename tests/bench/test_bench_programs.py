# SPDX-License-Identifier: GPL-2.0
"""The bench of real programs, without a guest: its scripts, its disk, outputs that differ."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from lab.bench import programs
from lab.bench.programs import PROGRAMS
from lab.bench.table import BENCHES
from lab.build import linux as build
from lab.core.errors import TestFailure
from lab.core.run import Argv

NAMES = {
    "chromium",
    "container",
    "gcc",
    "java",
    "java-touched",
    "microvm",
    "numpy",
    "postgres",
    "redis",
    "rust",
    "sqlite",
}


def test_each_program_is_a_script() -> None:
    assert set(programs.NAMES) == NAMES == set(BENCHES["programs"].parts.names)
    for name in programs.NAMES:
        file = PROGRAMS / f"{name}.sh"
        subprocess.run(["sh", "-n", file], check=True)
        fourth = file.read_text(encoding="utf-8").splitlines()[3]
        assert re.fullmatch(r"# packages:( [a-z0-9.+-]+)+", fourth)
    for other in (PROGRAMS / "setup", programs.MAKER):
        subprocess.run(["sh", "-n", other], check=True)


def test_the_kernels_have_what_the_programs_need() -> None:
    assert BENCHES["programs"].needs.config in build.configurations()
    wanted = build.requested(build.fragments("base", "x86_64", BENCHES["programs"].needs.config))
    for option in (
        "EXT4_FS",
        "UNIX",
        "NET_NS",
        "SECCOMP_FILTER",
        "KVM_AMD",
        "TRANSPARENT_HUGEPAGE",
    ):
        assert wanted[f"CONFIG_{option}"] == "y"


# The disk.


def maker(folder: Path, tool: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the script that makes a disk, with another mmdebstrap."""
    program = folder / "unpacked" / "usr" / "bin" / "mmdebstrap"
    program.parent.mkdir(parents=True)
    program.write_text(tool, encoding="utf-8")
    script = PROGRAMS / "sqlite.sh"
    argv: Argv = [
        "sh",
        programs.MAKER,
        folder / "unpacked",
        "bookworm",
        "sources",
        folder / "disk",
        script,
        PROGRAMS / "gcc.sh",
    ]
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, env={**os.environ, **more}
    )


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    done = maker(tmp_path, 'print STDERR "E: Unable to locate package sqlite3 (@ARGV)\\n"; exit 1')
    assert done.returncode and "Unable to locate package sqlite3" in done.stderr
    # Packages of all scripts, each once.
    assert "--include=gcc,libc6-dev,libstb-dev,sqlite3 " in done.stderr
    assert not (tmp_path / "disk").exists() and {one.name for one in tmp_path.iterdir()} == {
        "unpacked"
    }


def test_a_full_disk_is_an_error_before_anything_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "df").write_text("#!/bin/sh\necho Avail\necho 3\n", encoding="utf-8")
    (tmp_path / "df").chmod(0o755)
    done = maker(tmp_path, "die", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert f"error: 3 GB are free in {tmp_path}, 10 GB are needed: free some space" in done.stdout


# The figures.


def test_another_output_fails_the_run() -> None:
    same = {("base", "cold"): ["the sum"], ("ours", "cold"): ["the sum"]}
    programs.compare("sqlite", same)
    with pytest.raises(TestFailure, match="sqlite computes something else") as error:
        programs.compare("sqlite", same | {("kzeropaged", "cold"): ["another sum"]})
    assert "base: the sum\n" in error.value.why and "kzeropaged: another sum" in error.value.why
    assert "--only sqlite" in error.value.fix
