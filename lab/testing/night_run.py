# SPDX-License-Identifier: GPL-2.0
"""Running a night: each step is a process; a failure does not stop the others.

A stopped night goes on.
"""

import contextlib
import ctypes
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lab.core import errors, paths, progress, run
from lab.core.errors import LabError
from lab.testing import cases, inputs, suite
from lab.testing import night as nights
from lab.testing.cases import BROKEN, FAILED, PASSED, SKIPPED, Case
from lab.testing.night import INTERRUPTED, RUNNING, Night, Stage, Step

# Settings of the tests, unless the environment has others. Each leak hunt takes half an hour; the
# kernel's package gets the configuration of Debian's cloud kernels, which takes one or two hours to
# build.
SETTINGS = {
    "KNOWNZERO_STRESS_SECONDS": "1800",
    "KNOWNZERO_FUZZ_SECONDS": "600",
    "KNOWNZERO_TEST_KERNEL_PACKAGE": "cloud",
}
LAST_WORDS = 60.0  # seconds for an interrupted stage to write its results
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def run_night(night: Night, budget: float = 0.0) -> int:
    """Run each step that has not ended; ``budget`` in seconds. Returns the exit code."""
    deadline = time.monotonic() + budget if budget else None
    for stage in least_checked(night) if budget else night.stages:
        for name, step in stage.steps.items():
            if step.state not in nights.ENDED and (deadline is None or time.monotonic() < deadline):
                _step(night, stage, name, deadline)
    night.save()
    return night.exit_code()


def _step(night: Night, stage: Stage, name: str, deadline: float | None) -> None:
    began, before = time.monotonic(), stage.steps[name].seconds
    stage.steps[name] = Step(RUNNING, seconds=before)
    night.save()
    log = night.folder / f"{stage.name}.log"
    try:
        with progress.step(f"{stage.name}: {stage.title if stage.marks else name}", log):
            code = _execute(night, stage.commands[name], stage, log, deadline)
        stage.steps[name] = judge(stage, code, night.cases(stage), log)
    except subprocess.TimeoutExpired:
        stage.steps[name] = Step(INTERRUPTED, "the budget was used up; the next night goes on here")
    except (LabError, OSError) as error:
        stage.steps[name] = Step(BROKEN, str(error))
    except BaseException:
        stage.steps[name] = Step(INTERRUPTED)
        raise
    finally:
        stage.steps[name].seconds = before + time.monotonic() - began
        night.save()
    progress.note(f"{stage.name}: {name}: {stage.steps[name].state}")


def _execute(
    night: Night, words: list[str], stage: Stage, log: Path, deadline: float | None
) -> int:
    """Run a step; its exit code. No process of it is left, however it ends."""
    words = [word.format(folder=night.folder) if "{folder}" in word else word for word in words]
    environment = os.environ | night.settings | {"KNOWNZERO_NIGHTLY": "1", "PYTHONUNBUFFERED": "1"}
    environment |= {
        "PYTHONPATH": str(paths.REPO),
        "KNOWNZERO_SHARD": night.shard if stage.marks else "",
    }
    environment["KNOWNZERO_CASES"] = str(night.folder / f"{stage.name}.jsonl")
    before = _children()
    with log.open("ab") as out:
        out.write(f"$ ./kz {shlex.join(words)}\n".encode())
        out.flush()
        argv, null = [sys.executable, "-m", "lab", *words], subprocess.DEVNULL
        process = subprocess.Popen(
            argv,
            cwd=paths.REPO,
            env=environment,
            stdin=null,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            return process.wait(None if deadline is None else max(deadline - time.monotonic(), 0.1))
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS)
            raise
        finally:
            run.end_group(process)
            # Its orphans, and later theirs, become children of this process (see ``main``).
            late = time.monotonic() + 10
            while time.monotonic() < late and (left := _children() - before):
                for pid in left:
                    with contextlib.suppress(
                        ProcessLookupError, PermissionError, ChildProcessError
                    ):
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)


def _children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def judge(stage: Stage, code: int, found: list[Case], log: Path) -> Step:
    """The verdict on a step by its exit code and its tests.

    Only a report of success counts as success.
    """
    why = "" if code == errors.OK else _ended(code, log)
    if not stage.marks:
        return Step({errors.OK: PASSED, errors.FAILED: FAILED}.get(code, BROKEN), why)
    states = cases.count(found)
    if states[FAILED] or code == errors.FAILED:
        return Step(FAILED, "" if states[FAILED] else why)
    if code == errors.USAGE:  # pytest had nothing to run
        if not found:
            return Step(SKIPPED, "the selection has none of these tests")
        code = errors.OK  # everything had ended before the interruption
    if code not in (errors.OK, errors.MACHINE) or (code and not states[BROKEN]):
        return Step(BROKEN, why)
    if not found or states[BROKEN]:
        return Step(BROKEN, "" if found else "no test was run")
    return Step(
        PASSED if states[PASSED] else SKIPPED, "" if states[PASSED] else "every test was skipped"
    )


def _ended(code: int, log: Path) -> str:
    """The reason of an exit code: the last error in three parts, or the end of the log."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    text = run.tail(log, 40)
    at = [match.start() for match in re.finditer(r"^kz: .+\n  why: ", text, re.MULTILINE)]
    return f"{text[at[-1] :].removeprefix('kz: ') if at else run.tail(log, 8)}\n({how})"


def least_checked(night: Night) -> list[Stage]:
    """The stages in the order in which to spend a budget.

    Fewest skips checked in all nights, then least time.
    """
    done = {stage.name: (0, 0.0) for stage in night.stages}
    for other in nights.all_nights():
        for stage in other.stages:
            skips, seconds = done.get(stage.name, (0, 0.0))
            more = cases.amounts(other.cases(stage))["skips_checked"]
            done[stage.name] = (skips + more, seconds + stage.seconds)
    return sorted(night.stages, key=lambda stage: done[stage.name])


def keys_of(stages: Sequence[Stage]) -> dict[str, dict[str, str]]:
    """The keys of what each stage reads now: of its files of tests, or of its steps."""
    tests = inputs.of_tests() if any(stage.marks for stage in stages) else {}
    found = {}
    for stage in stages:
        if stage.marks:
            mark = "" if stage.name == "tests" else f"pytest.mark.{stage.marks}"
            found[stage.name] = {
                file: key for file, key in tests.items() if mark in (paths.REPO / file).read_text()
            }
        else:
            series = stage.name.removeprefix("series-")
            key = inputs.of_bench() if stage.name == "bench" else inputs.of_series(series)
            found[stage.name] = dict.fromkeys(stage.commands, key)
    return found


def tested() -> str:
    """The code of a night, for its report.

    The last commit, the files that have changed since, and a hash of the changes.
    """
    questions = (["log", "-1", "--format=%h"], ["status", "--porcelain"], ["diff", "HEAD"])
    asked = [
        run.ask(["git", "-C", paths.REPO, *words, "--", ".", ":^docs"]).stdout
        for words in questions
    ]
    changes = [hashlib.sha256(asked[2].encode()).hexdigest()[:8]] if asked[2] else []
    return " ".join([*asked[0].split(), *asked[1].split(), *changes])


def facts() -> dict[str, str]:
    from lab.bench.runner import host_facts
    from lab.machine import fetch

    found = {"knownzero": tested()}
    for name in fetch.NAMES:
        try:
            found[name] = fetch.identify(name).version
        except LabError as error:
            found[name] = f"unknown: {error.why}"
    return {**found, **{f"machine: {key}": value for key, value in host_facts().items()}}


def main(
    wanted: Sequence[str],
    select: str,
    pytest_options: Sequence[str],
    budget: float = 0.0,
    shard: str = "",
) -> int:
    """Run the stages that are ``wanted`` (all when none is), or go on with such a night.

    The lab's exit code.
    """
    names = nights.choose(wanted)
    chosen = [stage for stage in nights.stages(select, pytest_options) if stage.name in names]
    settings = {name: os.environ.get(name, usual) for name, usual in SETTINGS.items()}
    if select or pytest_options:
        marks = " or ".join(f"({stage.marks})" for stage in chosen if stage.marks)
        suite.check_selection(select, marks, pytest_options, {**settings, "KNOWNZERO_NIGHTLY": "1"})
    about, wants = facts(), [(stage.name, stage.commands) for stage in chosen]
    keys = keys_of(chosen)
    night = next(nights.all_nights(), None)
    if night and night.unfinished() and night.same_as(shard, settings, wants):
        progress.note(f"going on with the night in {night.folder}")
        if not night.facts["knownzero"].endswith(about["knownzero"]):
            night.facts["knownzero"] += f", then {about['knownzero']}"
    else:
        command = shlex.join(["./kz", *sys.argv[1:]])
        night = Night(nights.new_folder(), chosen, command, shard, settings, about)
    night.renew(keys)
    # Processes whose parents have ended become children of this one, so that they can be ended with
    # their step.
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        return run_night(night, budget)
    finally:
        print(nights.text(night))
