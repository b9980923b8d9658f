# SPDX-License-Identifier: GPL-2.0
"""The parts of linux/lts on the kernels that they are written for, which check themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.build.linux import build_linux
from lab.core.paths import REPO
from lab.machine import fetch
from tests.guest.guests import (
    DELAY,
    DIRTY,
    REPORT,
    STRESS_SECONDS,
    STRESS_SEED,
    Record,
    counters,
    expect_at_least,
    fine,
    hunted,
    objects,
    run,
    text,
)
from tests.guest.test_hibernation import SCRIPT, resumed_text
from tests.kernel import kunit

pytestmark = [pytest.mark.boots, pytest.mark.nightly, pytest.mark.slow, pytest.mark.matrix]

LTS = sorted(path.name for path in (REPO / "linux" / "lts").iterdir())
DRIVERS = "compact hotplug pressure hugetlb memoryblock softoffline flush"
# Compaction of 6.12 reads struct pages of memory that went offline, as 7.3 does.
STALE_MEMMAP = "vm_debug=-"
REPORTER = "page_zeroed_reporter.mode="
JOB = f"{DIRTY}; {REPORT}; alloc_once --size 128 --pages thp --verify --mode touch_all; "
JOB += "alloc_once --size 128 --pages nothp --verify --mode touch_all; grep pgzeroed_ /proc/vmstat"


# After the resume: what counts as lost, and the counters of before on lines of their own.
AFTER = "sed -n 's/^pgzeroed_lost/after &/p' /proc/vmstat"
BEFORE = "sed 's/^/before /'"


def built(series: str, variant: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fetch.variable("linux"), "")
        fetch.use("linux", series)
        return build_linux(variant)


@pytest.fixture(params=LTS)
def kernel(request: pytest.FixtureRequest) -> Path:
    return built(request.param, "debug")


def test_unit_tests(kernel: Path) -> None:
    cases = kunit.run("x86_64", "page_zeroed*", kernel)
    assert [f"{c.name}: {c.text}" for c in cases if c.state == "failed"] == []
    assert {c.name.split(".")[1] for c in cases if c.state == "skipped"} == {"verify_report"}
    passed = {c.name.split(".")[0] for c in cases if c.state == "passed"}
    assert passed == {"page_zeroed_rules", "page_zeroed_alloc"}


def test_memory_that_the_balloon_confirms_is_not_zeroed(kernel: Path) -> None:
    result = run(JOB, kernel=kernel)
    fine(result)
    found = counters(result)
    assert found["pgzeroed_bad"] == 0
    # Of 2 * 128 MiB.
    expect_at_least(found["pgzeroed_skip"], 0.8 * (256 << 8))


def test_a_false_answer_is_found(kernel: Path) -> None:
    """The oracle must be able to fail."""
    result = run(JOB, kernel=kernel, devices=[], append=f"{REPORTER}lie", allow_warnings=True)
    assert any("page_zeroed: BUG" in line for line in result.violations), text(result)[-2000:]
    assert counters(result)["pgzeroed_bad"] > 0
    assert result.exit_code == 0


@pytest.mark.parametrize("mode", ["partial", "error"])
def test_what_is_not_confirmed_is_zeroed(kernel: Path, mode: str) -> None:
    flush = f"({REPORT}) 2>/dev/null || true" if mode == "error" else REPORT
    result = run(JOB.replace(REPORT, flush), kernel=kernel, devices=[], append=f"{REPORTER}{mode}")
    fine(result)
    found = counters(result)
    assert found["pgzeroed_bad"] == 0
    assert (found["pgzeroed_set_reported"] == 0) == (mode == "error")


def test_resume_forgets(kernel: Path, tmp_path: Path) -> None:
    """Reporting starts after two seconds there: how much is known again depends on chance.

    All that was known before counts as lost.
    """
    script = SCRIPT.replace(f"echo 3600000 > {DELAY}; ", "")
    script = script.replace("grep pgzeroed_set_reported", "grep -E 'pgzeroed_(set|skip|lost)'")
    script = script.replace('echo "before $before"', f'{AFTER}; echo "$before" | {BEFORE}')
    lines = [
        line.split() for line in resumed_text(tmp_path, script, "", str(kernel), 2).split("\n")
    ]
    before = {line[1]: int(line[2]) for line in lines if line[:1] == ["before"]}
    (lost,) = (int(line[2]) for line in lines if line[:1] == ["after"])
    sets = sum(pages for name, pages in before.items() if name.startswith("pgzeroed_set"))
    known = sets - before["pgzeroed_skip"] - before["pgzeroed_lost"]
    assert known > 0
    assert lost - before["pgzeroed_lost"] >= 0.9 * known
    assert ["pgzeroed_bad", "0"] in lines


@pytest.mark.hunt
@pytest.mark.timeout(700 + 6 * STRESS_SECONDS)
def test_no_byte_leaks(kernel: Path, record_property: Record) -> None:
    result = run(
        f"stress --seconds {STRESS_SECONDS} --seed {STRESS_SEED} {DRIVERS} > /tmp/stress & "
        f"leak_hunter --setup --whole-round --seconds {STRESS_SECONDS} --seed {STRESS_SEED} "
        "--workers 2; wait $!; cat /tmp/stress; grep pgzeroed_ /proc/vmstat",
        kernel=kernel,
        cpus=2,
        memory="1G",
        append=STALE_MEMMAP,
        timeout=480.0 + 4 * STRESS_SECONDS,
    )
    fine(result)
    hunter = hunted(result, record_property)
    stress = next(found for found in objects(result) if "steps" in found)
    assert all(stress["steps"].values()), stress
    expect_at_least(len(hunter["checked_pages"]), 10)
    expect_at_least(hunter["vmstat"]["pgzeroed_skip"], 10_000)


@pytest.mark.parametrize("series", LTS)
def test_without_the_options(series: str) -> None:
    result = run(
        "! grep pgzeroed_ /proc/vmstat; fillfree >/dev/null; "
        "alloc_once --size 128 --verify --mode touch_all",
        kernel=built(series, "off"),
    )
    fine(result)
