# SPDX-License-Identifier: GPL-2.0
"""The model of the known-zero mark, checked by SPIN: all states, mutants, and its functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.core import paths, run
from lab.machine import debs, fetch
from lab.patches import apply, parts
from tests.kernel import unchanged

FOLDER = Path(__file__).parent
MODEL = FOLDER / "mark.pml"
README = FOLDER / "README.md"
PATCHES = paths.REPO / "tests" / "mutants"
HARNESS = "tools/testing/page_zeroed/extract.py"
pytestmark = pytest.mark.images

# Options of the model, checked by day: a minute on an idle core.
DAY = (
    "REPORT",
    "REPORT COMPACT CPUS=1",
    "REPORT FAILURE CPUS=1 BAD=1",
    "REPORT QUEUE CPUS=1",
    "PREZERO",
    "PREZERO FAILURE CPUS=1 BAD=1",
    "HUGETLB PREZERO CPUS=1",
    "OFFLINE COMPACT CPUS=1 PAGEBLOCK_ORDER=1",
    "OFFLINE FAILURE CPUS=1 PAGEBLOCK_ORDER=1",
    "BALLOON",
    "HUGETLB DISTRUST",
    "ACCEPT",
)
NIGHT = (
    "REPORT DISTRUST CPUS=1",
    "REPORT PREZERO",
    "REPORT PREZERO FAILURE CPUS=1 BAD=1",
    "REPORT COMPACT FAILURE BAD=1",
    "PREZERO COMPACT CPUS=1",
    "PREZERO OFFLINE CPUS=1 PAGEBLOCK_ORDER=1",
    "PREZERO DISTRUST CPUS=1",
)

# Mistakes and the options with which they are found: each of tests/mutants that concerns the mark,
# and RULE_ ones, which are mutants of the harness, or of the model only.
MUTANTS = {
    "MUTANT_accept_always_zero": "ACCEPT CPUS=1",
    "MUTANT_accept_any_module": "ACCEPT CPUS=1",
    "MUTANT_accept_first_page": "ACCEPT CPUS=1",
    "MUTANT_balloon_bit_of_next": "BALLOON CPUS=1",
    "MUTANT_balloon_bit_order": "BALLOON CPUS=1",
    "MUTANT_balloon_moved_is_zero": "BALLOON CPUS=1",
    "MUTANT_balloon_put_always_zero": "BALLOON CPUS=1",
    "MUTANT_distrust_forgotten": "DISTRUST CPUS=1",
    "MUTANT_free_always_zero": "CPUS=1",
    "MUTANT_hugetlb_keeps": "HUGETLB CPUS=1",
    "MUTANT_prezero_keeps_mark": "HUGETLB PREZERO CPUS=1",
    "MUTANT_prezero_last_page": "PREZERO CPUS=1",
    "MUTANT_prezero_part_is_zero": "PREZERO CPUS=1",
    "MUTANT_report_any_answer": "REPORT CPUS=1",
    "MUTANT_report_bit_unasked": "REPORT CPUS=1",
    "MUTANT_report_keeps_bits": "REPORT CPUS=1",
    "MUTANT_resume_keeps": "REPORT CPUS=1",
    "MUTANT_resume_trusts": "REPORT CPUS=1",
    "RULE_alloc_keeps_mark": "CPUS=1",
    "RULE_clear_keeps_prezeroed": "PREZERO CPUS=1",
    "RULE_contig_last_decides": "COMPACT OFFLINE CPUS=1 PAGEBLOCK_ORDER=1",
    "RULE_mark_after_put_back": "REPORT CPUS=1",
    "RULE_merge_needs_one": "CPUS=1",
    "RULE_merge_needs_one_prezeroed": "PREZERO CPUS=1",
    "RULE_offline_keeps_mark": "OFFLINE CPUS=1 PAGEBLOCK_ORDER=1",
    "RULE_prezero_mark_after_put_back": "PREZERO CPUS=1",
    "RULE_split_always_zero": "CPUS=1",
    "RULE_take_off_keeps_mark": "FAILURE CPUS=1",
    "RULE_unconfirmed_keeps_mark": "REPORT CPUS=1",
}

# Kernel code that sets, clears, reads or decides by the mark.
TOUCHES = re.compile(
    r"\b(?:(?:Set|Clear)?Page(?:Zeroed|Prezeroed|BalloonZeroed)|FPI_ZEROED"
    r"|page_zeroed_(?:set|test|test_clear|clear|take|give|merge|split|alloc|skip|merge_lists|trusted)"
    r"|prezero_end|free_frozen_pages_zeroed|folio_put_zeroed"
    r"|balloon_page_set_zeroed|folio_\w+_hugetlb_zeroed)\b"
)
PLACES = ("mm/*.[ch]", "drivers/virtio/virtio_balloon.c", "kernel/power/*.c", "include/linux/*.h")


@dataclass
class Search:
    """How a search of the states ended."""

    states: int
    depth: int
    broken: str  # the assertion that failed, or empty
    unreached: list[str]


def search(options: str, folder: Path, *, level: str, depth: int, table: int) -> Search:
    """Search all states, at most ``depth`` steps deep, with a hash table of 2^``table`` entries."""
    log, names = paths.log_file("model"), [f"-D{option}" for option in options.split()]
    spin = debs.unpacked("spin") / "usr" / "bin" / "spin"
    run.logged(
        [spin, "-a", *names, MODEL], log, f"SPIN refuses {options}", "see the log", cwd=folder
    )
    cc = ["gcc", level, "-w", "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=1024", "-o", "pan", "pan.c"]
    run.logged(cc, log, f"the search for {options} does not build", "see the log", cwd=folder)
    text = run.ask(["./pan", f"-m{depth}", f"-w{table}"], cwd=folder).stdout
    assert "max search depth too small" not in text, f"{options}: deeper than {depth} steps"
    found = re.search(r"depth reached (\d+), errors: \d+\s+(\d+) states, stored", text)
    assert found, f"{options}: no result\n{text[-2000:]}"
    broken = re.search(r"^pan:\d+: (.*) \(at depth", text, re.MULTILINE)
    # PICK() always finds a page in some places.
    unreached = re.findall(r'^\t\S+:(\d+), state \d+, "(.*)"', text, re.MULTILINE)
    return Search(
        int(found[2]),
        int(found[1]),
        broken[1] if broken else "",
        [f"line {line}: {what}" for line, what in unreached if what not in ("-end-", "p = 4")],
    )


def holds(
    options: str, folder: Path, record: Callable[[str, object], None], *, depth: int, table: int
) -> None:
    """All rules hold, all statements were executed, and the README has the figures."""
    found = search(options, folder, level="-O1", depth=depth, table=table)
    record("states", found.states)
    print(f"{options}: {found.states} states, {found.depth} steps")
    assert not found.broken, (
        f"{options}: {found.broken}; spin -t -p {MODEL.name} prints the steps, in {folder}"
    )
    assert found.unreached == []
    row = f"| `{options}` | {found.states:,} | {found.depth:,} |"
    assert row in README.read_text(encoding="utf-8"), f"the README needs the row {row}"


@pytest.mark.parametrize("options", DAY)
def test_the_rules_hold(
    options: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with unchanged.since_it_passed(f"model-{options}", [FOLDER]) as same:
        record_property("unchanged since it passed", same)
        if not same:
            holds(options, tmp_path, record_property, depth=4_000_000, table=22)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", NIGHT)
def test_the_rules_hold_with_more_at_once(
    options: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    holds(options, tmp_path, record_property, depth=8_000_000, table=24)


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mistake_is_found(name: str, tmp_path: Path) -> None:
    with unchanged.since_it_passed(f"model-{name}", [MODEL, Path(__file__)]) as same:
        if not same:
            assert name in MODEL.read_text(encoding="utf-8"), f"{name} is not in {MODEL.name}"
            found = search(
                f"{name} {MUTANTS[name]}", tmp_path, level="-O0", depth=2_000_000, table=20
            )
            assert found.broken, f"{name}: not found in {found.states} states"


def cells(heading: str) -> set[str]:
    """The names in the first column of a table of the README."""
    text = README.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    rows = re.findall(r"^\| (`.*?) \|", text.partition("\n## ")[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w[\w-]*)(?:\(\))?`", row)}


def test_every_mutant_is_in_the_model_or_has_a_reason() -> None:
    patches = {patch.stem for patch in PATCHES.glob("*.patch")}
    modelled = {
        name.removeprefix("MUTANT_").replace("_", "-") for name in MUTANTS if "RULE" not in name
    }
    without = cells("Mutants that it cannot express")
    assert modelled | without == patches
    assert not modelled & without
    switches = set(re.findall(r"\b(?:MUTANT|RULE)_[a-z_]+\b", MODEL.read_text(encoding="utf-8")))
    assert switches - {"MUTANT_name"} == set(MUTANTS)


def functions(text: str) -> Iterator[tuple[str, str]]:
    """The functions of a C file: names and bodies."""
    name = ""
    body: list[str] | None = None
    for line in text.splitlines():
        if body is None:
            if found := re.match(r"(?![#/*\s}])[^=;]*?\b(\w+)\(", line):
                name = found[1]
            if line == "{" and name:
                body = []
        elif line == "}":
            yield name, "\n".join(body)
            name, body = "", None
        else:
            body.append(line)


def named(model: str) -> dict[str, set[str]]:
    """The functions that the comments of the model name, by file."""
    names: dict[str, set[str]] = {}
    for words in re.findall(r"Kernel: (.*?)\s*\*/", model, re.DOTALL):
        file = ""
        for word in words.replace("*", " ").split():
            if re.fullmatch(r"[\w/.-]+/[\w-]+\.[ch]", word):
                file = word
            elif found := re.fullmatch(r"(\w+)\(\)", word):
                names.setdefault(file, set()).add(found[1])
    return names


@pytest.mark.slow
def test_the_model_has_the_functions_of_the_kernel() -> None:
    """Each function that a comment names exists, and each that touches the mark is in the model or
    has a reason in the README; so has each that the harness compiles.
    """
    modelled = named(MODEL.read_text(encoding="utf-8"))
    inside = {name for names in modelled.values() for name in names}
    outside = cells("What it leaves out")
    with apply.working_copy(parts.get("linux"), fetch.obtain("linux")) as tree:
        for file, names in modelled.items():
            text = (tree / file).read_text(encoding="utf-8")
            defined = {name for name, _ in functions(text)}
            defined |= set(re.findall(r"^(?!\s).*?\b(\w+)\(", text, re.MULTILINE))
            assert names <= defined, f"{file} lacks {sorted(names - defined)}"
        touching = {
            name
            for pattern in PLACES
            for file in tree.glob(pattern)
            for name, body in functions(file.read_text(encoding="utf-8", errors="replace"))
            if TOUCHES.search(body)
        }
        listed = (tree / HARNESS).read_text(encoding="utf-8").partition("\nMACROS")[0]
        compiled = set(re.findall(r'^\s+"(\w+)",$', listed, re.MULTILINE))
    assert compiled, f"{HARNESS} lists no functions"
    assert sorted(touching - inside - outside) == [], "not in the model, and without a reason"
    assert sorted(compiled - inside - outside) == [], "in the harness only, and without a reason"
    assert sorted(outside - touching - compiled) == [], "the README names functions without need"
    assert sorted(outside & inside) == [], "the README leaves out what the model has"
