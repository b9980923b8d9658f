# SPDX-License-Identifier: GPL-2.0
"""The bench of a guest's life, without a guest: its phases, parking, files, figures and chart."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from lab.bench import life, plan
from lab.bench.life import BASE, COLUMNS, INITS, NEEDS, PAGES, PHASES, WHOLE, Life, Sizes
from lab.bench.plan import BenchOptions
from lab.bench.repeat import Values
from lab.bench.table import BENCHES
from lab.core.errors import TestFailure, UsageError
from lab.report import page, publish
from lab.report import phases as chart
from lab.report.results import Metric, Result
from tests.bench.fakes import MIB, by_name, fake, run_of, side

SIZES = Sizes(1024, 128, 64, 512, 256, 0.0)


def a_life(tmp_path: Path, column: str = "ours", init: int = 0) -> Life:
    made = Life(run_of("life"), column, init, "thp", SIZES, tmp_path, tmp_path / "disk")
    made.side = side(COLUMNS[column].kernel)
    return made


def test_a_phase_by_itself_has_what_it_needs() -> None:
    assert life.phases("") == list(PHASES)
    assert life.phases("boot") == ["boot"]
    assert life.phases("later") == ["first", "again", "later"]
    assert life.phases("restored") == ["park", "save", "restore", "restored"]
    assert life.phases("save,first") == ["first", "park", "save"]
    assert life.phases("park", PAGES["4k"]) == []
    assert life.phases("", PAGES["4k"]) == ["first", "again", "later"]
    for name, before in NEEDS.items():
        # A phase comes after the phases that it needs, and these after those that they need.
        assert max(map(PHASES.index, before)) < PHASES.index(name)
        assert {more for one in before for more in NEEDS.get(one, ())} <= set(before)


def test_a_phase_without_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="Bad --only: parc") as error:
        plan.plan(BENCHES["life"], BenchOptions(only="parc"))
    assert "restored" in error.value.fix


def test_a_native_life_ends_before_it_parks(tmp_path: Path) -> None:
    """A balloon takes hours there."""
    wanted = life.wanted_phases(run_of("life", accel="pvm"))
    assert wanted == {
        "thp": ["boot", "first", "again", "later"],
        "4k": ["first", "again", "later"],
    }
    assert life.wanted_phases(run_of("life")) == {name: [*of] for name, of in PAGES.items()}
    assert life.wanted_phases(run_of("life", accel="pvm", only="boot")) == {"thp": ["boot"]}
    with pytest.raises(UsageError, match="Bad --only: first,park"):
        plan.plan(BENCHES["life"], BenchOptions(accel="pvm", only="first,park"))
    for accel, kinds in (("pvm", {"time"}), ("tcg", {"time", "host"})):
        one = a_life(tmp_path)
        one.run = run_of("life", accel=accel)
        one.side.guest.pid = os.getpid()
        one.note("first", time=1.0)
        assert {kind for _, kind in one.found} == kinds


def test_the_columns_differ_in_what_they_should(tmp_path: Path) -> None:
    run = run_of("life")
    specs = {
        (name, init): life.spec(run, name, init, Sizes(), tmp_path / "a,b")
        for name in COLUMNS
        for init in INITS
    }
    for (name, init), made in specs.items():
        assert ("free-page-reporting=on" in made.devices[0]) == (name != BASE)
        assert ("prezero=on" in made.append) == (name == "kzeropaged")
        assert made.append.startswith(f"init_on_alloc={init}")
        assert made.memory == "4096M" and "a,,b,if=none" in made.extra_qemu[1]
        assert str(made.kernel).startswith("ours") == (name in ("ours", "kzeropaged"))
    assert len({made.label for made in specs.values()}) == len(specs) == 8
    parks = {name: column.park for name, column in COLUMNS.items()}
    assert parks[BASE] is life.inflate and parks["reports"] is life.wait_for_passes
    assert parks["ours"] is parks["kzeropaged"] is life.report_now
    assert COLUMNS[BASE].after_park is life.deflate


@pytest.mark.parametrize("status", ["completed", "timeout"])
def test_report_now_waits_for_the_end_of_the_command(status: str) -> None:
    asked, states = [], ["running", "running", status]

    def qmp(command: str, **arguments: object) -> Any:
        asked.append(command)
        if command == "query-balloon":
            return {"report-now": {"status": states[asked.count(command) - 1]}}
        assert arguments == {"timeout": 120_000}
        return None

    guest = side("ours")
    fake(guest).guest.qmp = qmp
    if status == "completed":
        life.report_now(guest, MIB)
    else:
        with pytest.raises(TestFailure, match="balloon-report-now fails") as error:
            life.report_now(guest, MIB)
        assert "timeout" in error.value.why
    assert asked == ["balloon-report-now", *["query-balloon"] * 3]


class Saved:
    """A QEMU that writes a file with a hole of 64 MB and 3 MB of data."""

    def __init__(self, *states: str) -> None:
        self.states = [*states]
        self.asked: list[str] = []
        self.pid = os.getpid()

    def qmp(self, command: str, **arguments: Any) -> Any:
        self.asked.append(command)
        if command == "migrate":
            with Path(arguments["uri"].removeprefix("file:")).open("wb") as file:
                file.seek(64 * MIB)
                file.write(b"x" * 3 * MIB)
                file.flush()
                os.fsync(file.fileno())
        return {"status": self.states.pop(0)} if command == "query-migrate" else None


def test_a_file_counts_with_what_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, vmm = a_life(tmp_path), Saved("active", "completed")
    one.side.guest = vmm  # type: ignore[assignment]
    used = 4 * MIB
    free = (SIZES.memory_mb * MIB - used) // 4096 - 1000  # and 1000 in the lists of the CPU
    monkeypatch.setattr(type(one.side), "vmstat", lambda _: {"nr_free_pages": free})
    one._save("save")
    assert vmm.asked[0] == "stop" and vmm.asked[-1] == "query-migrate"
    assert 3 * MIB <= one.found["save", "file"] < 4 * MIB
    assert one.found["save", "of_used"] == pytest.approx(one.found["save", "file"] / used * 100)


def test_a_save_that_fails_ends_the_bench(tmp_path: Path) -> None:
    with pytest.raises(TestFailure, match="cannot be saved") as error:
        life.write_state(Saved("active", "failed"), tmp_path / "file")  # type: ignore[arg-type]
    assert "failed" in error.value.why


class Quiet(Life):
    """A life whose phases take 10 ms each and zero a page, in any guest."""

    def __getattribute__(self, name: str) -> Any:
        if name not in PHASES:
            return super().__getattribute__(name)
        return lambda: self.lives(name)

    def lives(self, name: str) -> None:
        if name == "boot":
            self.side = side("ours")
            self.side.sh("booted")
        self.note(name, time=10.0, zeroed=4096.0)


def test_the_whole_life_is_the_sum_of_its_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "cpu_ns", lambda _: 2 * 10**9)
    one = Quiet(run_of("life"), "ours", 0, "thp", SIZES, tmp_path, tmp_path / "disk")
    found = one.play(PHASES)
    assert [phase for phase, kind in found if kind == "host"] == list(PHASES)
    assert found[WHOLE, "time"] == 10.0 * len(PHASES)
    assert found[WHOLE, "zeroed"] == 4096.0 * len(PHASES)
    assert found[WHOLE, "cpu"] == 2.0


def test_programs_are_counted_by_the_settings_of_the_guest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With init_on_alloc=1 base zeroes each page; without, those that the program faulted in."""
    answer = {"minor_faults": 2, "wall_ns": 3_000_000, "bytes": MIB}
    counted = {"thp_fault_alloc": 1, "pgzeroed_bad": 0, "pgzeroed_cleared": None}
    for init, wanted in ((0, 2 * MIB + 4096), (1, 1000 * 4096)):
        one = a_life(tmp_path, BASE, init)
        fake(one.side).answer = lambda *_: answer | {"vmstat": counted}
        stats = iter([{"pgalloc_dma32": 0}, {"pgalloc_dma32": 1000}])
        monkeypatch.setattr(type(one.side), "vmstat", lambda _, it=stats: next(it))
        one._allocate("first")
        assert one.found["first", "zeroed"] == wanted
        assert one.found["first", "time"] == 3.0
        assert fake(one.side).asked == [
            "alloc_once --size 128 --mode touch_all --pages thp",
        ]


USE = ("zeroed", "host_faults", "time", "host")
SAVE = ("time", "file", "of_used", "host")
# The figures of each phase, as a life has them.
FIGURES = dict.fromkeys(PHASES, USE) | {
    "boot": ("time", "host_faults", "host"),
    "idle": ("host",),
    "park": ("time", "usable", "host"),
    "save_cached": SAVE,
    "save": SAVE,
    "restore": ("time", "host_faults", "host"),
    WHOLE: ("zeroed", "host_faults", "time", "prezeroed", "cpu"),
}


def values(only: tuple[str, ...] = (*PHASES, WHOLE)) -> Values:
    """Of two lives of each column, all alike."""
    found = Values()
    for column, init in ((column, init) for column in COLUMNS for init in INITS):
        for pages, of in PAGES.items():
            for phase in (*of, *([WHOLE] if pages == "thp" else [])):
                if phase in only:
                    named = dict.fromkeys(FIGURES[phase], 100.0)
                    for _ in range(2):
                        found.note(column, init, pages, phase, **named)
    return found


def verdicts(found: Values) -> dict[str, str]:
    run = run_of("life")
    life.figures(run, found, Sizes())
    return {name: one.target.verdict for name, one in by_name(run).items() if one.target}


def test_targets_are_those_of_kzeropaged() -> None:
    found = verdicts(values())
    assert found and all(name.split(".")[2] == "kzeropaged" for name in found)
    of = {name.partition("kzeropaged.")[2] for name in found}
    assert of == {
        *("thp.first.zeroed", "thp.later.zeroed", "4k.first.zeroed", "4k.later.zeroed"),
        *("thp.restored.zeroed", "thp.burst.zeroed", "thp.burst.time", "thp.park.time"),
        *("thp.save_cached.of_used", "thp.save.of_used"),
    }


@pytest.mark.parametrize(
    ("kind", "base", "ours", "verdict"),
    [
        ("first.zeroed", 1024 * MIB, 20 * MIB, "met"),
        ("first.zeroed", 1024 * MIB, 21 * MIB, "MISSED"),
        ("later.zeroed", 1024 * MIB, 102 * MIB, "met"),
        ("later.zeroed", 1024 * MIB, 103 * MIB, "MISSED"),
        # Of the memory of a burst, which is larger.
        ("burst.zeroed", 2048 * MIB, 40 * MIB, "met"),
        ("burst.zeroed", 2048 * MIB, 42 * MIB, "MISSED"),
        ("burst.time", 100.0, 109.0, "met"),
        ("burst.time", 100.0, 112.0, "MISSED"),
        ("park.time", 2000.0, 200.0, "met"),
        ("park.time", 1990.0, 200.0, "MISSED"),
        ("park.time", 9000.0, 201.0, "MISSED"),
        ("save.of_used", 300.0, 105.0, "met"),
        ("save.of_used", 300.0, 105.5, "MISSED"),
    ],
)
def test_each_target_has_its_limit(kind: str, base: float, ours: float, verdict: str) -> None:
    found = values()
    phase, last = kind.split(".")
    for column, value in ((BASE, base), ("kzeropaged", ours)):
        found[column, 0, "thp", phase, last] = [value] * 3
    assert verdicts(found)[f"life.init0.kzeropaged.thp.{kind}"] == verdict


def test_one_slow_park_misses_the_target() -> None:
    found = values()
    found[BASE, 0, "thp", "park", "time"] = [9000.0] * 3
    found["kzeropaged", 0, "thp", "park", "time"] = [100.0, 100.0, 250.0]
    assert verdicts(found)["life.init0.kzeropaged.thp.park.time"] == "MISSED"


def test_a_phase_by_itself_has_only_its_figures() -> None:
    run = run_of("life")
    life.figures(run, values(("park",)), Sizes())
    assert {name.split(".")[4] for name in by_name(run)} == {"park"}
    assert len(run.metrics) == len(INITS) * 3 * len(FIGURES["park"])


def result(found: Values) -> Result:
    run = run_of("life")
    life.figures(run, found, Sizes())
    return Result("life", "tcg", {}, "", run.metrics, sides=["base", "the column named"])


def bars(svg: str) -> list[str]:
    return re.findall(r"<g><title>([^<]*)</title><rect class=\"policy\d\"", svg)


def test_the_chart_has_the_phases_from_left_to_right() -> None:
    found = values()
    found["kzeropaged", 1, "thp", "park", "time"] = [5000.0]
    made = result(found)
    svg = chart.chart(made)
    names = re.findall(r'font-size="11">([^<]+)<', svg)
    panels = len(chart.PANELS) * len(INITS)
    assert names == [*chart.NAMES.values()] * panels
    shown = [
        phase
        for panel in chart.PANELS
        for phase in chart.NAMES
        if {*panel.kinds} & {*FIGURES[phase]}
    ]
    assert len(bars(svg)) == len(shown) * len(INITS) * len(COLUMNS)
    found_at = [float(x) for x in re.findall(r'<rect class="policy3" x="([\d.]+)"', svg)][1:]
    of_time = found_at[5 : 5 + 9]  # after those of the bytes zeroed; idle has no time
    assert of_time == sorted(of_time)
    assert "ours with kzeropaged, park: 5,000 ms" in svg
    assert svg.count('class="beyond"') == 1


def test_the_bar_of_a_save_is_its_file() -> None:
    found = values()
    found["ours", 0, "thp", "save", "file"] = [700.0 * MIB]
    svg = chart.chart(result(found))
    assert "ours, save: 700 MiB" in svg


def test_the_chart_is_on_the_page_and_published() -> None:
    made = result(values())
    assert chart.TITLE in page.html([made])
    svg = publish._files(made)["life.svg"]
    assert f'aria-label="{chart.TITLE}"' in svg and "var(" not in svg
    other = Result("thp", "tcg", {}, "", [Metric.of("thp.x", "ms", [1.0], [1.0])])
    assert chart.TITLE not in page.html([other])


def test_the_disk_has_no_page_of_zeros(tmp_path: Path) -> None:
    content = life.disk(tmp_path, 2).read_bytes()
    assert len(content) == 2 * MIB
    assert not any(content[at : at + 4096] == bytes(4096) for at in range(0, len(content), 4096))


def test_a_page_cache_is_read_once(tmp_path: Path) -> None:
    one = a_life(tmp_path)
    one.idle()
    one._fill_cache()
    assert len([line for line in fake(one.side).asked if "/dev/vda" in line]) == 1
