# SPDX-License-Identifier: GPL-2.0
"""The figures that were posted with the series this grew from, and which of ours stand beside them."""

from __future__ import annotations

from dataclasses import dataclass

from lab.core.units import percent
from lab.report.results import Result, change_percent

NOT_HERE = "not measured"
NONE = "–"


@dataclass(frozen=True)
class Row:
    """One posted comparison; ``metric`` is ours beside it, of the bench named ``bench``, or nothing is."""

    what: str
    base: str
    theirs: str
    change: str
    metric: str = ""
    bench: str = ""


@dataclass(frozen=True)
class Table:
    """A table as it was posted. ``machine`` is theirs; ``unlike`` says how the two halves differ besides."""

    title: str
    source: str
    machine: str
    columns: tuple[str, str]
    unlike: str
    rows: tuple[Row, ...]


def _change(base: float, theirs: float) -> str:
    return percent(change_percent(base, theirs))


ZEROED = Table(
    title="Memory that the host has zeroed",
    source="M. S. Tsirkin, skipping the zeroing of host-zeroed pages, 37 patches, 2026; mean ± standard deviation",
    machine="KVM, a guest of 2 GB with one CPU",
    columns=("base", "with the series"),
    unlike="Both populate 256 MB and never touch it.",
    rows=(
        Row("task-clock, huge pages", "232 ± 20 ms", "51 ± 26 ms", "-78 %", "thp.populate.task_clock", "thp"),
        Row("cache misses, huge pages", "1.20M ± 248K", "288K ± 102K", "-76 %"),
        Row("instructions, huge pages", "16.3M ± 1.2M", "13.8M ± 1.0M", "-15 %"),
        Row(
            "task-clock, surplus pages of hugetlb",
            "219 ± 23 ms",
            "65 ± 34 ms",
            "-70 %",
            "hugetlb.surplus.populate.task_clock",
            "hugetlb",
        ),
        Row("cache misses, surplus pages of hugetlb", "1.17M ± 391K", "263K ± 36K", "-78 %"),
        Row("instructions, surplus pages of hugetlb", "17.9M ± 1.2M", "15.1M ± 724K", "-16 %"),
        Row(
            "persistent pages of hugetlb",
            NONE,
            "nothing gained",
            "",
            "hugetlb.persistent.populate.task_clock",
            "hugetlb",
        ),
        Row(
            "4 KiB pages that need no zeroing",
            NONE,
            "about 21 %",
            "",
            "order0.populate.skipped_percent",
            "order0",
        ),
    ),
)

_TOUCHED = {"page": "1 page of 1000", "half": "half", "all": "all"}
REFERENCE = Table(
    title="Memory that starts with a pattern",
    source="P. Collingbourne, refpage_create, 2021; medians of 10, the change with a 95 % interval",
    machine="a DragonBoard 845c (arm64), not virtual",
    columns=("memset", "refpage_create"),
    unlike="Both map 4 096 000 bytes; theirs is the time of a whole run, ours of one mapping, and what a process "
    "needs by itself is in either peak.",
    rows=(
        *(
            Row(f"time, {_TOUCHED[touched]} touched", f"{base} s", f"{theirs} s", change, f"refpage.{touched}.time", "refpage")
            for touched, base, theirs, change in (
                ("page", "3.962", "0.0267", "-98.8 ± 1.1 %"),
                ("half", "3.925", "1.481", "-61.8 ± 1.1 %"),
                ("all", "3.986", "3.385", "-15.1 ± 0.2 %"),
            )
        ),
        *(
            Row(
                f"peak resident size, {_TOUCHED[touched]} touched",
                f"{base} KiB",
                f"{theirs} KiB",
                change,
                f"refpage.{touched}.max_rss",
                "refpage",
            )
            for touched, base, theirs, change in (
                ("page", "6656", "3448", "-49.4 ± 1.3 %"),
                ("half", "6696", "4580", "-31.7 ± 1.2 %"),
                ("all", "6716", "6684", "none"),
            )
        ),
    ),
)  # fmt: skip


def _rounds(base: tuple[float, ...], theirs: tuple[float, ...]) -> tuple[str, str, str]:
    """Three rounds as posted, and the change of their mean."""
    texts = [", ".join(f"{value:.1f}" for value in side) + " s" for side in (base, theirs)]
    return texts[0], texts[1], _change(sum(base), sum(theirs))


PREZERO = Table(
    title="Free memory zeroed before it is wanted",
    source="Liang Li, pre-zeroing of free pages, RFC v2, 2020; three rounds each, the change of their means",
    machine="a host that makes a VM of 64 GB with 32 CPUs and a GPU passed through",
    columns=("without", "with"),
    unlike="Theirs is the time until QEMU has all its memory, ours the CPU time of a job that populates three quarters "
    "of a guest.",
    rows=(
        Row(
            "4 KiB pages",
            *_rounds((23.5, 24.7, 24.6), (10.2, 10.3, 11.2)),
            "prezero.4k.populate.task_clock",
            "prezero",
        ),
        Row(
            "huge pages",
            *_rounds((17.9, 14.8, 14.9), (1.9, 1.8, 1.9)),
            "prezero.thp.populate.task_clock",
            "prezero",
        ),
    ),
)

_APPLIED, _ASSIGNED = "series applied, reporting off", "reporting on, nothing discarded (a device assigned)"
_ENABLED, _SHUFFLE = "reporting on", "reporting on, page shuffling"
_BIT6 = "reporting on, bit 6"
_OURS = {_APPLIED: "off", _ENABLED: "on", _SHUFFLE: "shuffle", _BIT6: "bit6"}
# Iterations per process, the base first, and how far the farthest of several runs was from their mean.
_FAULTS: tuple[tuple[str, str, int, int, dict[str, tuple[float, float]]], ...] = (
    (
        "page_fault1, huge pages",
        "thp",
        1,
        1,
        {
            "": (1203934.75, 0.04),
            _APPLIED: (1207961.25, 0.10),
            _ASSIGNED: (1207758.75, 0.17),
            _ENABLED: (1261183.75, 0.39),
            _SHUFFLE: (1090201.50, 0.25),
        },
    ),
    (
        "page_fault1, huge pages",
        "thp",
        16,
        2,
        {
            "": (8828217.00, 0.85),
            _APPLIED: (8862373.00, 0.98),
            _ASSIGNED: (8870373.75, 0.29),
            _ENABLED: (8371359.75, 0.65),
            _SHUFFLE: (8108719.75, 0.58),
        },
    ),
    (
        "page_fault2",
        "nothp",
        1,
        1,
        {
            "": (379940.75, 0.11),
            _APPLIED: (380852.25, 0.25),
            _ASSIGNED: (373079.25, 0.60),
            _ENABLED: (373201.50, 0.50),
            _SHUFFLE: (376967.25, 0.29),
        },
    ),
    (
        "page_fault2",
        "nothp",
        16,
        2,
        {
            "": (3178653.00, 1.28),
            _APPLIED: (3246397.25, 0.68),
            _ASSIGNED: (3204989.75, 1.08),
            _ENABLED: (3233665.50, 0.84),
            _SHUFFLE: (3218450.25, 1.07),
        },
    ),
)


def _with_spread(value: float, spread: float) -> str:
    return f"{value:,.0f} ±\N{NO-BREAK SPACE}{spread:.2f}\N{NO-BREAK SPACE}%"


def _fault_rows() -> list[Row]:
    rows = []
    for test, pages, tasks, here, figures in _FAULTS:
        base, spread = figures[""]
        counted = f"{tasks} task{'s' if tasks > 1 else ''}" + (f" ({here} here)" if here != tasks else "")
        for name in (_APPLIED, _ASSIGNED, _ENABLED, _BIT6, _SHUFFLE):
            posted = figures.get(name)
            ours = _OURS.get(name)
            rows.append(
                Row(
                    f"{test}, {counted}: {name}",
                    _with_spread(base, spread),
                    _with_spread(*posted) if posted else NONE,
                    _change(base, posted[0]) if posted else "",
                    f"page_fault.{pages}.{here}.{ours}" if ours else "",
                    "page-fault" if ours else "",
                )
            )
    return rows


FAULTS = Table(
    title="Page faults while free memory is reported",
    source="A. Duyck, unused page reporting, v14, 2019; iterations of will-it-scale, and how far single runs were off",
    machine="KVM, a guest of 32 GB on one node of a Xeon E5-2630 v3",
    columns=("linux-next", "with the series"),
    unlike="Ours counts pages in a second, of anonymous memory in either test, with reports after 200 ms, and with "
    "bit 6 where pages are shuffled. More is better.",
    rows=tuple(_fault_rows()),
)

CHURN = Table(
    title="What it costs to report early",
    source="users of free page reporting as it is upstream, 2026",
    machine="a machine that was not named",
    columns=("reports after 2000 ms", "after 250 ms"),
    unlike="Theirs is one kernel at two delays. Ours is the base kernel after 2000 ms and ours, with bit 6, after "
    "250 ms; sizes differ.",
    rows=(
        Row(
            "until six guests have given memory back",
            "10.1 s",
            "1.2 s",
            _change(10.1, 1.2),
            "churn.early.time_until_back",
            "churn",
        ),
        Row(
            "mean time of an allocation in a loop (512 MiB, ours 256 MB)",
            "505 ms",
            "1108 ms",
            _change(505, 1108),
            "churn.loop.early.alloc_wall",
            "churn",
        ),
        Row("cycles of that loop", "38", "23", _change(38, 23)),
    ),
)

TABLES = (ZEROED, REFERENCE, PREZERO, FAULTS, CHURN)


def tables_for(result: Result) -> list[Table]:
    """The tables of which this result measured a row."""
    return [table for table in TABLES if any(row.metric and result.metric(row.metric) for row in table.rows)]


def elsewhere(row: Row) -> str:
    """What stands in the place of our figures where this run has none."""
    return f"in kz bench {row.bench}" if row.bench else NOT_HERE
