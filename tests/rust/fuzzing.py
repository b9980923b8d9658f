# SPDX-License-Identifier: GPL-2.0
"""The fuzzers of the vhost-user balloon: built with the compiler at hand, run for a while."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lab.build import daemon
from lab.core import lock, paths, progress, run
from lab.core.errors import LabError, TestFailure

FOLDER = daemon.WORKSPACE / "fuzz"
TARGETS = ("queues", "requests")
TRIPLE = f"{os.uname().machine}-unknown-linux-gnu"
# The flags of cargo-fuzz, without cargo-fuzz.
FLAGS = (
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Zsanitizer=address",
    "-Ccodegen-units=1",
    "--cfg",
    "fuzzing",
)
MAX_INPUT = 4096
ONE_INPUT = 20  # seconds: one that takes longer hangs
MEMORY_MB = 1024


@dataclass(frozen=True)
class Fuzzed:
    """The result of a run: ``edges`` counts the edges of the code that were reached."""

    runs: int
    edges: int


def _cargo(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    place = {"CARGO_TARGET_DIR": str(paths.sub("obj", "rust-fuzz"))}
    quiet = {"CARGO_TERM_COLOR": "never", "CARGO_TERM_PROGRESS_WHEN": "never"}
    argv = ["cargo", *arguments, "--manifest-path", str(FOLDER / "Cargo.toml")]
    fix = "correct the first error above; cargo, rustc 1.88 or newer and a C++ compiler are needed"
    with lock.locked("cargo-fuzz"):
        env = {**os.environ, **place, **quiet, **environment}
        run.logged(argv, log, "the fuzzers do not build", fix, cwd=FOLDER, env=env)


def build() -> Path:
    """Build every target with coverage and the address sanitizer; the folder of the programs.

    RUSTC_BOOTSTRAP lets a stable compiler use these options of nightly ones.
    """
    log = paths.log_file("fuzz")
    flags = {"RUSTC_BOOTSTRAP": "1", "RUSTFLAGS": " ".join(FLAGS)}
    targets = [word for target in TARGETS for word in ("--bin", target)]
    with progress.step("building the fuzzers", log):
        _cargo(["build", "--locked", "--release", "--target", TRIPLE, *targets], log, flags)
    return paths.sub("obj", "rust-fuzz") / TRIPLE / "release"


def seed(folder: Path) -> None:
    """Write the seeds of every target into a folder, one folder for each."""
    for line in (FOLDER / "seeds.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            target, name, data = line.split()
            (folder / target).mkdir(exist_ok=True)
            (folder / target / name).write_bytes(bytes.fromhex(data))


def _code(status: int) -> str:
    """The end of a program, by its status in subprocess' form."""
    return f"exit code {status}" if status >= 0 else f"signal {-status}"


def inputs(artifacts: Path) -> dict[str, int]:
    """The inputs that fuzzers have left in a folder because of what they do, and when (ns since the
    epoch).
    """
    # A slow input has a file, too, and is no finding.
    return {
        file.name: file.stat().st_mtime_ns
        for file in artifacts.iterdir()
        if not file.name.startswith("slow-unit-")
    }


def fuzz(programs: Path, target: str, corpus: Path, seconds: int) -> Fuzzed:
    """Run a target for some seconds, beginning with the inputs in ``corpus``, to which it adds.

    TestFailure when it finds something, whose input is kept in out/fuzz; LabError when it ends for
    another reason.
    """
    log = paths.log_file(f"fuzz-{target}")
    artifacts = paths.out() / "fuzz" / target
    artifacts.mkdir(parents=True, exist_ok=True)
    before = inputs(artifacts)
    argv = [
        str(programs / target),
        str(corpus),
        f"-max_total_time={seconds}",
        f"-max_len={MAX_INPUT}",
        f"-timeout={ONE_INPUT}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-artifact_prefix={artifacts}/",
        "-print_final_stats=1",
    ]
    with progress.step(f"fuzzing {target} for {seconds} s", log), log.open("wb") as output:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        )
    text = log.read_text(errors="replace")
    if done.returncode:
        why = "\n".join(text.splitlines()[-25:]) + f"\n(log: {log})"
        # By name and time: a second run that finds the same input writes the same file again.
        found = sorted(name for name, _ in inputs(artifacts).items() - before.items())
        if not found:
            what = f"the fuzzer {target} ended with {_code(done.returncode)}, and has left no input"
            raise LabError(
                what, why, "check its corpus, the memory and the disk, then run it again"
            )
        fix = (
            f"run {argv[0]} {artifacts / found[0]}; fix the bug, and add the input to "
            "vhost-user-balloon/fuzz/seeds.txt"
        )
        raise TestFailure(f"fuzzing {target} has found something", why, fix)
    runs = re.search(r"^Done (\d+) runs", text, re.MULTILINE)
    edges = re.findall(r"\bcov: (\d+)", text)
    if not runs or not edges:
        raise LabError(f"fuzzing {target} says nothing", f"see {log}", "run the program by hand")
    return Fuzzed(int(runs[1]), int(edges[-1]))
