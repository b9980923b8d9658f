# SPDX-License-Identifier: GPL-2.0
"""The bench of a guest's life, without a guest: parking, files, figures, targets and charts."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.bench import life
from lab.bench.life import (
    BASE,
    COLUMNS,
    INITS,
    PHASES,
    WHOLE,
    Life,
    Sizes,
)
from lab.bench.repeat import Values
from lab.core.errors import TestFailure
from lab.report import phases as chart
from lab.report import publish
from lab.report.results import Result
from tests.bench.fakes import MIB, by_name, fake, run_of, side

SIZES = Sizes(1024, 128, 64, 512, 256, 0.0)


def a_life(tmp_path: Path, column: str = "ours", init: int = 0) -> Life:
    made = Life(run_of("life"), column, init, SIZES, tmp_path, tmp_path / "disk")
    made.side = side(COLUMNS[column].kernel)
    return made


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


USE = ("zeroed", "time", "host")
SAVE = ("time", "file", "of_used", "host")
# The figures of each phase, as a life has them.
FIGURES = dict.fromkeys(PHASES, USE) | {
    "boot": ("time", "host"),
    "idle": ("host",),
    "park": ("time", "host"),
    "save_cached": SAVE,
    "save": SAVE,
    "restore": ("time", "host"),
    WHOLE: ("zeroed", "time", "prezeroed", "cpu"),
}


def values(only: tuple[str, ...] = (*PHASES, WHOLE)) -> Values:
    """Of two lives of each column, all alike."""
    found = Values()
    for column, init in ((column, init) for column in COLUMNS for init in INITS):
        for phase in (*PHASES, WHOLE):
            if phase in only:
                named = dict.fromkeys(FIGURES[phase], 100.0)
                for _ in range(2):
                    found.note(column, init, phase, **named)
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
        *("first.zeroed", "later.zeroed", "restored.zeroed", "burst.zeroed"),
        *("burst.time", "park.time", "save_cached.of_used", "save.of_used"),
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
        found[column, 0, phase, last] = [value] * 3
    assert verdicts(found)[f"life.init0.kzeropaged.{kind}"] == verdict


def test_one_slow_park_misses_the_target() -> None:
    found = values()
    found[BASE, 0, "park", "time"] = [9000.0] * 3
    found["kzeropaged", 0, "park", "time"] = [100.0, 100.0, 250.0]
    assert verdicts(found)["life.init0.kzeropaged.park.time"] == "MISSED"


def result(found: Values) -> Result:
    run = run_of("life")
    life.figures(run, found, Sizes())
    sizes = {f"{name}_mb": 1024 for name in ("program", "park", "burst")}
    sides = ["base", "the column named"]
    return Result("life", "tcg", {}, "", run.metrics, job=sizes, sides=sides)


def test_the_chart_has_the_worse_init_on_alloc() -> None:
    """It is published with a whole life only, and says what kzeropaged does meanwhile."""
    found = values()
    found["kzeropaged", 1, "burst", "zeroed"] = [900.0 * MIB]
    found["kzeropaged", 0, "boot", "time"] = [90_000.0]
    made = result(found)
    svg = publish._files(made)["life.svg"]
    assert "the guest zeroes, init_on_alloc=1" in svg and "against base, init_on_alloc=0" in svg
    assert "kzeropaged zeroes" in re.sub(r"<[^>]*>", " ", svg)
    assert int(re.findall(r' height="(\d+)"', svg)[0]) <= 400
    part = [one for one in made.metrics if one.parameters.get("phase") != "park"]
    assert chart.TITLE not in publish._files(replace(made, metrics=part))["life.svg"]


def test_the_disk_has_no_page_of_zeros(tmp_path: Path) -> None:
    content = life.disk(tmp_path, 2).read_bytes()
    assert len(content) == 2 * MIB
    assert not any(content[at : at + 4096] == bytes(4096) for at in range(0, len(content), 4096))
