# SPDX-License-Identifier: GPL-2.0
"""The night: stages that pass, fail, cannot run, are skipped or interrupted, and the page about them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lab.core import errors
from lab.core.errors import LabError, UsageError
from lab.core.paths import REPO
from lab.machine import fetch
from lab.report.results import Metric, Result, Target, save_error
from lab.testing import nightly, summary
from lab.testing.junit import State
from lab.testing.nightly import Night, Place, Stage
from lab.testing.summary import Found, Progress


def xml(*cases: str) -> str:
    return f'<testsuites><testsuite name="pytest">{"".join(cases)}</testsuite></testsuites>'


def case(name: str, inside: str = "", **told: object) -> str:
    properties = "".join(f'<property name="{key}" value="{value}"/>' for key, value in told.items())
    return (
        f'<testcase classname="tests.guest.test_x" name="{name}" file="tests/guest/test_x.py" time="2.5">'
        f"<properties>{properties}</properties>{inside}</testcase>"
    )


PASSED = case("test_it[kasan]", hunted_ms=60000, pages_hunted=2500000, skips_checked=1500000, attempt=1)
FAILED = case("test_bad", '<failure message="2 bytes leaked &lt;here&gt; | there">trace\nback</failure>')
BROKEN = case("test_full", '<failure message="the disk is full"/>', broken_machine=True)
SKIPPED = case("test_not", '<skipped type="pytest.skip" message="no cargo"/>')
LUCK = (
    case("test_luck", went_wrong="3 is less than 4", attempt=1)
    + case("test_luck", went_wrong="3 is less than 4", attempt=2)
    + case("test_luck", attempt=3)
)
GUEST = case("test_guest", started_again="its timer hung", attempt=1)


def fake(
    name: str, script: str, judge: Callable[[Place, int], Found] = nightly.judge_tests, keeps: bool = False
) -> Stage:
    """A stage of a few lines of Python; where its results go is FILE."""

    def argv(place: Place) -> list[str]:
        return [sys.executable, "-c", f"FILE = {str(place.results)!r}\n{script}"]

    return Stage(name, f"stage {name}", argv, judge, lists_cases=name == "matrix", keeps_stdout=keeps)


def suite(name: str, code: int, *cases: str) -> Stage:
    return fake(name, f"open(FILE, 'w').write({xml(*cases)!r})\nraise SystemExit({code})")


def night(folder: Path, stages: Sequence[Stage], chosen: Sequence[str] | None = None) -> Night:
    names = [stage.name for stage in stages]
    facts = {"knownzero": "v1-<dirty>", "accelerator": "tcg: there is no /dev/kvm"}
    return Night(folder, stages, names if chosen is None else chosen, "./kz test --nightly", lambda: facts)


class Page(HTMLParser):
    """A page's elements, which must be closed, and its links."""

    void = frozenset({"meta", "br", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(folder: Path) -> str:
    """The page, which is whole, needs no network, and whose links lead somewhere."""
    text = (folder / "summary.html").read_text(encoding="utf-8")
    for link in Page(text).links:
        assert (folder / link).exists(), link
    assert not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    return text


def markdown(folder: Path) -> str:
    return (folder / "summary.md").read_text(encoding="utf-8")


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    one = night(
        tmp_path,
        [
            suite("tests", 1, PASSED, FAILED, LUCK, GUEST),
            suite("hunts", 3, BROKEN),
            suite("fuzz", 0, SKIPPED),
            suite("matrix", 0, PASSED, SKIPPED),
            suite("packages", 0, PASSED),
        ],
        ["tests", "hunts", "fuzz", "matrix"],
    )
    assert one.run() == errors.FAILED
    assert [entry.state for entry in one.summary.entries] == [
        State.FAILED,
        State.BROKEN,
        State.SKIPPED,
        State.PASSED,
        Progress.LEFT_OUT,
    ]
    assert all(entry.seconds > 0 for entry in one.summary.entries[:4])
    first = one.summary.entries[0].brief
    assert first == "3 passed, 1 failed, 1 repeated, 1 with guests started again"
    text = page(tmp_path)
    assert "Failed: tests; could not run: hunts" in text
    assert "2 bytes leaked &lt;here&gt; | there" in text and "trace\nback" in text
    assert "the disk is full" in text and "no cargo" in text and "its timer hung" in text
    assert text.count("3 is less than 4") == 2
    assert "2 leak hunts, 2m00: 5.00 million pages read by the hunter, 3.00 million" in text
    assert "2,500,000 pages read, 1,500,000 not zeroed and checked" in text
    assert "v1-&lt;dirty&gt;" in text and "tcg: there is no /dev/kvm" in text
    assert not (tmp_path / "packages.log").exists()
    told = markdown(tmp_path)
    assert "Tests: 4 passed, 1 failed, 1 could not run, 2 skipped;\n1 repeated, 1 with guests" in told
    assert "| packages | not chosen |  |  |" in told
    assert "2 bytes leaked <here> | there" in told


def test_all_is_well(tmp_path: Path) -> None:
    one = night(tmp_path, [suite("tests", 0, PASSED), suite("fuzz", 0, SKIPPED)])
    assert one.run() == errors.OK
    assert "All that ran passed; skipped: fuzz<" in page(tmp_path)


def test_nothing_at_all_is_no_success(tmp_path: Path) -> None:
    one = night(tmp_path, [suite("fuzz", 0, SKIPPED)])
    assert one.run() == errors.MACHINE
    assert "Nothing was tested" in page(tmp_path)


@pytest.mark.parametrize(
    ("script", "state", "why"),
    [
        ("print('all fine')", State.BROKEN, "the tests left no results"),
        ("open(FILE, 'w').write('<testsuites/>')", State.BROKEN, "no test was run"),
        ("open(FILE, 'w').write('<html/>')", State.BROKEN, "not JUnit"),
        ("open(FILE, 'w').write('half of')", State.BROKEN, "cannot read"),
        (f"open(FILE, 'w').write({xml(PASSED)!r}); raise SystemExit(1)", State.FAILED, "exit code 1"),
        (f"open(FILE, 'w').write({xml(PASSED)!r}); raise SystemExit(3)", State.BROKEN, "exit code 3"),
        (f"open(FILE, 'w').write({xml(FAILED)!r})", State.FAILED, ""),
        (f"open(FILE, 'w').write({xml(PASSED, BROKEN)!r})", State.BROKEN, ""),
        ("import os; os.kill(os.getpid(), 9)", State.BROKEN, "ended by signal 9"),
        (
            "import sys; sys.exit(print('kz: the kernel does not build\\n  why: a bug\\n  fix: mend it') or 3)",
            State.BROKEN,
            "the kernel does not build",
        ),
        ("raise SystemExit(130)", State.BROKEN, "interrupted"),
    ],
)
def test_only_what_says_so_has_passed(tmp_path: Path, script: str, state: State, why: str) -> None:
    one = night(tmp_path, [fake("tests", script)])
    assert one.run() == (errors.FAILED if state is State.FAILED else errors.MACHINE)
    assert one.summary.entries[0].state is state
    assert why in one.summary.entries[0].found.why
    page(tmp_path)


def test_a_selection_that_leaves_a_stage_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path, "tests")
    place.log.write_text("")
    place.results.write_text(xml())
    assert nightly.judge_tests(place, errors.USAGE, selected=True).state is State.SKIPPED
    assert nightly.judge_tests(place, errors.USAGE).state is State.BROKEN


def test_the_page_is_there_while_a_stage_runs(tmp_path: Path) -> None:
    """The second stage reads the page: the first one's results are on it, and the third has not begun."""
    page_file = tmp_path / "summary.html"
    look = fake(
        "hunts",
        f"text = open({str(page_file)!r}).read()\n"
        "assert 'Running: hunts; failed: tests' in text and '2 bytes leaked' in text and 'not reached' in text\n"
        f"open(FILE, 'w').write({xml(PASSED)!r})",
    )
    one = night(tmp_path, [suite("tests", 1, FAILED), look, suite("matrix", 0, PASSED)])
    assert one.run() == errors.FAILED
    assert [entry.state for entry in one.summary.entries] == [State.FAILED, State.PASSED, State.PASSED]


INTERRUPTED = """
import sys
from pathlib import Path
from lab import cli
from lab.testing import nightly
from tests.lab.test_nightly import PASSED, fake, night, suite, xml

SLOW = '''
import signal, subprocess, sys, time
# What runs in a session of its own, and does not hear of anything.
subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 312 & sleep 313"], start_new_session=True)
def ends(*_):
    open(FILE, "w").write(RESULTS)
    raise SystemExit(143)
signal.signal(signal.SIGTERM, ends)
print("sleeps", flush=True)
time.sleep(311)
'''

@cli.app.command()
def it() -> None:
    slow = fake("hunts", f"RESULTS = {xml(PASSED)!r}\\n" + SLOW)
    nightly.adopt_orphans()
    raise SystemExit(night(Path(sys.argv[2]), [suite("tests", 0, PASSED), slow, suite("matrix", 0, PASSED)]).run())

sys.argv = ["kz", "it", *sys.argv[1:]]
cli.app.registered_commands[-1].context_settings = {"allow_extra_args": True}
raise SystemExit(cli.main())
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, errors.INTERRUPTED), (signal.SIGTERM, 143)])
def test_an_interrupted_night_leaves_its_page_and_no_process(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        log = tmp_path / "hunts.log"
        deadline = time.monotonic() + 60
        while not (log.exists() and "sleeps" in log.read_text().splitlines()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    left = [cmdline(p) for p in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [words for words in left if words in (b"sleep\x00312\x00", b"sleep\x00313\x00")]
    text = page(tmp_path)
    assert "Interrupted: hunts" in text
    # What it had found by then.
    assert "| hunts | interrupted |" in markdown(tmp_path)
    assert "| matrix | not reached |  |  |" in markdown(tmp_path)
    assert "Tests: 2 passed, 0 failed" in markdown(tmp_path)


def cmdline(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def result(name: str, *met: bool) -> Result:
    return Result(
        name=name,
        accelerator="tcg",
        versions={},
        reproduce=f"./kz bench {name}",
        metrics=[
            Metric.of(f"{name}.m{at}", "ms", [100.0] * 3, [40.0] * 3, target=Target(f"less than {at}", one))
            for at, one in enumerate(met)
        ],
    )


def test_benches(tmp_path: Path) -> None:
    place = Place(tmp_path, "bench")
    place.log.write_text("kz: it broke\n  why: who knows\n  fix: look\n")
    for name, met in (("good", (True, True)), ("bad", (True, False))):
        result(name, *met).save(tmp_path / "bench" / name)
        (tmp_path / "bench" / name / "report.html").touch()
    save_error(LabError("no room", "the disk is full", "free some"), tmp_path / "bench" / "full")

    def state(*names: str, code: int = errors.OK) -> State:
        return nightly.judge_benches(place, code, names).state

    assert state("good") is State.PASSED
    assert state("good", code=errors.MACHINE) is State.BROKEN
    assert state("good", "bad", "full") is State.FAILED
    assert state("good", "full", code=errors.MACHINE) is State.BROKEN
    assert state("good", "missing") is State.BROKEN
    (tmp_path / "bench" / "torn").mkdir()
    (tmp_path / "bench" / "torn" / "result.json").write_text("{")
    assert state("torn") is State.BROKEN

    def judge(place: Place, code: int) -> Found:
        return nightly.judge_benches(place, code, ("good", "bad", "full"))

    one = night(tmp_path, [fake("bench", "raise SystemExit(3)", judge)])
    assert one.run() == errors.FAILED
    text = page(tmp_path)
    assert 'href="bench/good/report.html"' in text and "bench/full/report.html" not in text
    assert "3 of 4 targets met; could not run: full; failed: bad" in text
    assert "NOT MET</span>: less than 1" in text and "-60 %" in text and "no room: the disk is full" in text
    told = markdown(tmp_path)
    assert "[good](bench/good/report.html) | passed | 2 of 2 | tcg |" in told
    assert "| bad | `bad.m1` | NOT MET: less than 1 | 100 ms | 40.0 ms | -60 % |" in told


def test_benches_that_an_interruption_left_out(tmp_path: Path) -> None:
    place = Place(tmp_path, "bench")
    result("good", True).save(tmp_path / "bench" / "good")
    found = nightly.judge_benches(place, errors.INTERRUPTED, ("good", "next"))
    assert [bench.state for bench in found.benches] == [State.PASSED, Progress.WAITING]


@pytest.mark.parametrize(
    ("told", "code", "state"),
    [
        ({"problems": []}, 0, State.PASSED),
        ({"problems": [{"check": "build", "where": "0101-x.patch", "text": "error: no ;"}]}, 1, State.FAILED),
        ({"problems": []}, 1, State.FAILED),
        ({"problems": []}, 3, State.BROKEN),
        ({}, 0, State.BROKEN),
        (None, 3, State.BROKEN),
    ],
)
def test_series(tmp_path: Path, told: dict[str, object] | None, code: int, state: State) -> None:
    script = (
        "import sys\nprint('kz: 1/2 0101-x.patch um off: done in 3 s', file=sys.stderr)\n"
        f"print({json.dumps(told) if told is not None else ''!r})\nraise SystemExit({code})"
    )
    one = night(tmp_path, [fake("series-linux", script, nightly.judge_series, keeps=True)])
    one.run()
    entry = one.summary.entries[0]
    assert entry.state is state
    text = page(tmp_path)
    assert ("build: 0101-x.patch: error: no ;" in text) == bool(told and told.get("problems"))
    if state is State.PASSED:
        assert "1 step built; what had passed" in entry.brief


def test_every_test_belongs_to_one_stage() -> None:
    """The first stage has whatever has none of the others' marks, which are declared and in use."""
    stages = [stage for stage in nightly.stages() if stage.marks]
    others = [stage.marks for stage in stages[1:]]
    assert stages[0].marks == f"not ({' or '.join(others)})"
    declared = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    for mark in others:
        assert f'"{mark}: ' in declared
        used = [
            file for file in (REPO / "tests").rglob("test_*.py") if f"pytest.mark.{mark}" in file.read_text()
        ]
        assert used, mark


def test_stages_are_known_by_their_names() -> None:
    assert [stage.name for stage in nightly.stages()] == list(nightly.NAMES)
    assert nightly.choose(["series-qemu", "fuzz", "fuzz"]) == ["fuzz", "series-qemu"]
    assert nightly.choose([]) == list(nightly.NAMES)
    with pytest.raises(UsageError, match="hunts, fuzz"):
        nightly.choose(["nonsense"])


def test_what_a_stage_runs(tmp_path: Path) -> None:
    by_name = {stage.name: stage for stage in nightly.stages("up or down", ["-x"])}
    words = by_name["fuzz"].argv(Place(tmp_path, "fuzz"))[3:]
    assert words == [
        "test", "--junit", f"{tmp_path}/fuzz.xml", "--select", "up or down", "--", "-m", "fuzz", "-x",
    ]  # fmt: skip
    assert by_name["bench"].argv(Place(tmp_path, "bench"))[3:] == [
        "bench",
        "all",
        "--output",
        f"{tmp_path}/bench",
    ]


def test_what_it_ran_on_is_told_as_far_as_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise LabError(f"no {name}", "the mirror is away", "wait")

    monkeypatch.setattr(fetch, "identify", unknown)
    found = nightly.facts()
    assert found["linux"] == found["qemu"] == "unknown: the mirror is away"
    assert "not known" in found["accelerator"]
    assert found["knownzero"] and found["machine: cpus"]


@pytest.mark.parametrize("state", [*State, *Progress])
def test_every_state_can_be_shown(tmp_path: Path, state: State | Progress) -> None:
    entry = summary.Entry("one", "a title", state)
    summary.write(summary.Summary(time.time(), "./kz", [entry], state=state), tmp_path)
    assert f">{state}<" in page(tmp_path)
    assert f"| one | {state} |" in markdown(tmp_path)
