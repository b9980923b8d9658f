# SPDX-License-Identifier: GPL-2.0
"""``kz series bugs``: the reproducer of each bug that a part fixes-* fixes, without and with it."""

import difflib
import functools
import os
import re
import shutil
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.build import linux
from lab.core import lock, paths, progress, run
from lab.core.errors import LabError, UsageError
from lab.machine import fetch
from lab.patches import apply, parts
from lab.patches.parts import subject
from lab.testing.suite import PYTEST

HARNESS = "tools/testing/page_zeroed"
WIDTH, INDENT = 75, " " * 5
# On the base, a test that shows several bugs meets one of them first.
TRIES = 10


@dataclass(frozen=True)
class Bug:
    """A patch of a part fixes-*, with its table of linux/bugs.toml (described there)."""

    part: str
    file: Path
    since: str = ""
    test: str = ""
    mutant: str = ""
    shows: str = ""
    none: str = ""
    needed_by: str = ""

    @property
    def name(self) -> str:
        """PART/NNNN, as on the command line."""
        return f"{self.part}/{self.file.name[:4]}"

    @property
    def subject(self) -> str:
        return subject(self.file.read_bytes())


@dataclass(frozen=True)
class Outcome:
    """The verdict on one run of a reproducer. ``why``: the reason for the verdict "unclear"."""

    verdict: str  # fails, passes, unclear; "-": there is no reproducer
    why: str = ""


NOT_RUN = Outcome("-")


@dataclass(frozen=True)
class Row:
    """A line of the table. ``base``: without the fix; ``fixed``: with it."""

    bug: Bug
    base: Outcome = NOT_RUN
    fixed: Outcome = NOT_RUN

    @property
    def holds(self) -> bool:
        return bool(self.bug.none) or (self.base.verdict, self.fixed.verdict) == ("fails", "passes")


# The registry.


def fixes() -> list[parts.Part]:
    return [part for part in parts.get("linux").parts if part.name.startswith("fixes-")]


def registry() -> list[Bug]:
    """All patches of the parts fixes-*, in order. LabError: linux/bugs.toml does not fit them."""
    file = paths.REPO / "linux" / "bugs.toml"
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        found = []
        for part in fixes():
            tables = data.pop(part.name, {})
            for patch in part.patches():
                if (about := tables.pop(patch.stem, None)) is None:
                    raise ValueError(f"{part.name}/{patch.name} has no table")
                about["needed_by"] = about.pop("for", "")
                found.append(_checked(Bug(part.name, patch, **about)))
            data |= {f"{part.name}.{name}": about for name, about in tables.items()}
        if data:
            raise ValueError(f"no patch is named {min(data)}")
    except (OSError, TypeError, ValueError) as error:
        fix = "each patch of the parts fixes-* has one table, see the top of the file"
        raise LabError(f"cannot use {file}", str(error), fix) from None
    return found


def _checked(bug: Bug) -> Bug:
    ways = [bool(bug.test), bool(bug.mutant), bool(bug.none)]
    if sum(ways) != 1 or bool(bug.shows) == bool(bug.none):
        raise ValueError(f"{bug.name} needs test or mutant, and shows; or none")
    return bug


def choose(names: Sequence[str]) -> list[Bug]:
    """The patches of these parts and these PART/NNNN; by default all. UsageError: unknown name."""
    known = registry()
    words = dict.fromkeys(word for bug in known for word in (bug.part, bug.name))
    for name in names:
        if name not in words:
            near = difflib.get_close_matches(name, words, 3) or sorted({bug.part for bug in known})
            why = "no part of fixes and no patch of one has this name"
            raise UsageError(f"Bad name: {name}", why, f"use {', '.join(near)}, or PART/NNNN")
    return [bug for bug in known if not names or bug.part in names or bug.name in names]


# The kernels and the runs.


def kernels() -> tuple[Path, Path]:
    """The base and the base with all parts fixes-*, with the options of the debug kernel."""
    folder = paths.REPO / "linux" / "configs"
    ours = linux.ours()
    lines = [
        line
        for name in ("debug", "debug-x86_64")
        for line in (folder / f"{name}.config").read_text(encoding="utf-8").splitlines()
        if line.split("=")[0] not in ours
    ]
    config = paths.sub("work") / "bugs.config"
    lock.write_if_changed(config, "\n".join([*lines, ""]).encode(), 0o644)
    base = linux.build_linux("base", config=str(config))
    chosen = tuple(part.name for part in fixes())
    return base, linux.build_linux("off", config=str(config), chosen=chosen)


def _test(test: str, kernel: Path, shows: str, _number: int) -> Outcome:
    """Run a test of tests/ with this kernel."""
    settings = {"KNOWNZERO_TEST_KERNEL": str(kernel), "KNOWNZERO_NIGHTLY": "1"}
    settings |= {"PYTHONPATH": str(paths.REPO), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [*PYTEST, "-p", "no:cacheprovider", f"{paths.REPO}/tests/{test}"]
    done = run.ask(argv, paths.REPO, {**os.environ, **settings})
    paths.log_file(f"bugs-{test.rpartition(':')[2]}").write_text(done.stdout + done.stderr)
    if done.returncode == 0 and re.search(
        r"^=+ 1 passed(, \d rerun)? in .*=+$", done.stdout, re.MULTILINE
    ):
        return Outcome("passes")
    # Of a test's own assertion; the lab's errors are printed without its source.
    lines = done.stdout.splitlines()
    said = [line for line in lines if line.startswith("E ")] or lines or ["no output"]
    if done.returncode == 1 and re.search(shows, "\n".join(said)):
        return Outcome("fails")
    return Outcome("unclear", said[-1].strip())


def _mutants(bugs: Iterable[Bug]) -> dict[str, tuple[Outcome, Outcome]]:
    """The harness of the later series with each of these fixes taken out, and with all in."""
    wanted = {bug.mutant: bug for bug in bugs}
    found: dict[str, tuple[Outcome, Outcome]] = {}
    source = fetch.obtain("linux")
    with (
        apply.working_copy(parts.get("linux"), source) as tree,
        tempfile.TemporaryDirectory(dir=paths.sub("work")) as folder,
    ):
        harness, log = Path(folder) / "harness", paths.log_file("bugs-harness")
        shutil.copytree(tree / HARNESS, harness)
        script = harness / "mutants.sh"
        first, *blocks = re.split(r'(?m)^(?=mutant ")', script.read_text(encoding="utf-8"))
        chosen = [one for one in blocks if one.split('"')[1] in wanted]
        # The last block holds the end of the script.
        script.write_text("".join([first, *chosen, "exit $failed\n"]), encoding="utf-8")
        argv: run.Argv = ["make", "-C", harness, f"TREE={tree}", f"PYTHON={sys.executable}"]
        with progress.step("the userspace test, and without each fix", log):
            run.logged([*argv, "run"], log, "the userspace test fails", "read the log")
            run.logged([*argv, "mutants"], log, "a fix is not needed by the test", "read the log")
    text = log.read_text(encoding="utf-8")
    for name, bug in wanted.items():
        noticed = re.search(rf"^noticed      {re.escape(name)}\n +(.*)", text, re.MULTILINE)
        seen = noticed[1] if noticed else "it is not in mutants.sh"
        fails = bool(noticed and re.search(bug.shows, seen))
        found[bug.name] = Outcome("fails" if fails else "unclear", seen), Outcome("passes")
    return found


def bugs(names: Sequence[str]) -> list[Row]:
    """Run the reproducers, and write the table to out/bugs. Each test runs once per kernel."""
    chosen = choose(names)
    rows: list[Row] = []
    mutants = (
        _mutants([bug for bug in chosen if bug.mutant]) if any(b.mutant for b in chosen) else {}
    )
    tests = [bug for bug in chosen if bug.test]
    base, fixed = kernels() if tests else (Path(), Path())
    judge = functools.cache(_test)
    for bug in chosen:
        if bug.none:
            rows.append(Row(bug))
        elif bug.mutant:
            rows.append(Row(bug, *mutants[bug.name]))
        else:
            at = f"{bug.name} ({tests.index(bug) + 1} of {len(tests)})"
            with progress.step(f"{at} on the base: it should fail"):
                tries = (judge(bug.test, base, bug.shows, number) for number in range(TRIES))
                before = next((one for one in tries if one.verdict != "unclear"), None)
                before = before or judge(bug.test, base, bug.shows, 0)
            with progress.step(f"{at} with the fixes: it should pass"):
                rows.append(Row(bug, before, judge(bug.test, fixed, "", 0)))
    for part in dict.fromkeys(bug.part for bug in chosen):
        lock.write_atomically(written(part), "\n".join(table(rows, part)) + "\n")
    return rows


def written(part: str) -> Path:
    folder = paths.out() / "bugs"
    folder.mkdir(exist_ok=True)
    return folder / f"{part}.txt"


# The table, as the cover letters have it: without names of files that are here only.


def table(rows: Iterable[Row], part: str) -> list[str]:
    return [line for row in rows if row.bug.part == part for line in _lines(row)]


def _lines(row: Row) -> list[str]:
    bug = row.bug
    since = f"Since {bug.since}. " if bug.since else ""
    number = f"{int(bug.file.name[:4]):2} "
    found = textwrap.wrap(bug.subject, WIDTH, initial_indent=number, subsequent_indent="   ")
    if bug.none:
        return [*found, *_indented(f"{since}No reproducer. {bug.none}")]
    kernel = "Base" if bug.test else "Without the fix"
    found += _indented(f"{since}{kernel}: {row.base.verdict}. Fixed: {row.fixed.verdict}.")
    whys = [one.why for one in (row.base, row.fixed) if one.verdict == "unclear"]
    return [*found, *_indented(*whys)]


def _indented(*texts: str) -> list[str]:
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return [line for text in texts for line in wrapper.wrap(text)]
