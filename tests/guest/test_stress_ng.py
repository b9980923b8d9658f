# SPDX-License-Identifier: GPL-2.0
"""The leak hunter on the oracle kernel, beside stress-ng, with all sources of zeros at work."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lab.boot.guest import BootResult
from lab.core import run as programs
from lab.machine import debs
from tests.guest.guests import (
    BALLOON,
    DELAY,
    STRESS_SECONDS,
    STRESS_SEED,
    ZP,
    Record,
    counters,
    expect_at_least,
    fine,
    hunted,
    run,
    text,
)

pytestmark = [pytest.mark.boots, pytest.mark.slow, pytest.mark.hunt]

SHORT = 40
# Each stressor of a class, one after the other.
EACH_SECONDS = int(os.environ.get("KNOWNZERO_STRESSOR_SECONDS", "20"))

GROUP = "/sys/fs/cgroup/stress"
SOURCES = f"echo 50 > {DELAY}; echo 1 > {ZP}/enabled"
PARTIAL = "page_zeroed_reporter.mode=partial"
# Small amounts, often: what is allocated, freed and merged counts here, not how much there is of
# it.
SIZES = {
    "vm": "--vm-bytes 4M",
    "mmap": "--mmap-bytes 4M",
    "mremap": "--mremap-bytes 4M",
    "mmaphuge": "--mmaphuge-mmaps 8",
    "memfd": "--memfd-bytes 4M --memfd-fds 16",
    "shm": "--shm-bytes 1M --shm-objs 8",
    "shm-sysv": "--shm-sysv-bytes 1M",
    "malloc": "--malloc-bytes 4M",
    "vm-splice": "--vm-splice-bytes 4M",
    "fork": "--fork-max 4",
    "vfork": "--vfork-max 4",
    "clone": "--clone-max 8",
}
STRESSORS = {
    # Without madvise, which takes a minute for its first round.
    "quick ones": ("vm", "fork", "mmap", "brk", "stack", "memfd"),
    "all sorts": (
        "vm",
        "fork",
        "mmap",
        "madvise",
        "mmaphuge",
        "mremap",
        "brk",
        "stack",
        "memfd",
        "shm",
    ),
    "processes": ("fork", "vfork", "clone", "exec", "spawn", "mmapfork", "stack", "brk"),
    "mappings": (
        "vm",
        "mmap",
        "mmapfixed",
        "mmapmany",
        "mremap",
        "mprotect",
        "madvise",
        "malloc",
        "rmap",
    ),
    "files in memory": ("memfd", "shm", "shm-sysv", "tmpfs", "dev-shm", "vm-splice", "userfaultfd"),
    "huge pages": ("mmaphuge", "madvise", "pagemove", "mlock", "munmap", "vm"),
}
# Sizes for those of a class; files are memory as well here.
CLASS_SIZES = " ".join(
    [*SIZES.values(), "--copy-file-bytes 128M", "--mlockmany-procs 8"]
) + "".join(
    f" --{name}-bytes 4M"
    for name in ("fallocate", "fiemap", "hdd", "iomix", "memrate", "msync", "pagemove", "sync-file")
)
CLASSES = ("vm", "memory", "filesystem")
# Why a stressor cannot do its work in these guests.
CANNOT = {
    **dict.fromkeys(
        ("physpage", "swap", "bind-mount", "binderfs", "fanotify"), "only root may do it"
    ),
    "watchdog": "the guest has no watchdog",
    "dnotify": "the kernel has no CONFIG_DNOTIFY",
    "inotify": "the kernel has no CONFIG_INOTIFY_USER",
    "fiemap": "a tmpfs does not implement it",
    "verity": "a tmpfs does not implement it",
    "xattr": "the kernel has no CONFIG_TMPFS_XATTR",
}
SAID_NO = re.compile(
    r"^.*\b(?:skip(?:ped(?!: 0)|ping)|not (?:implemented|supported))\b.*$",
    re.MULTILINE | re.IGNORECASE,
)
WORK = re.compile(r"- stressor: (\S+)\s+bogo-ops: (\d+)")


def started(options: str, seconds: int) -> str:
    """Shell that starts stress-ng in the background: after it, $! is its process.

    What it takes is limited, so that running out of memory is its problem alone.
    """
    return (
        f"cd /tmp; echo +memory > /sys/fs/cgroup/cgroup.subtree_control; mkdir {GROUP}; echo 384M "
        f"> {GROUP}/memory.max; echo 8 > /proc/sys/vm/nr_hugepages; echo 64 > "
        "/proc/sys/vm/nr_overcommit_hugepages; echo 1 > "
        f"/proc/sys/vm/unprivileged_userfaultfd; echo 'exec stress-ng --timeout {seconds} --seed "
        f"{STRESS_SEED} --verify --metrics-brief --yaml /tmp/work {options}' > /tmp/stress; "
        # Not as root, who would poison pages by madvise(), and die of that.
        f"(sh -c 'echo $PPID > {GROUP}/cgroup.procs'; exec su -s /bin/sh nobody /tmp/stress) & "
    )


def script(options: str, seconds: int, hunt: int) -> str:
    """The hunt, beside stress-ng."""
    return (
        f"{SOURCES}; {started(options, seconds)}"
        f"leak_hunter --setup --seconds {hunt} --seed {STRESS_SEED} --workers 2 --dirty 96; wait "
        "$! || echo stress-ng=$?; cat /tmp/work; grep pgzeroed_ /proc/vmstat"
    )


def together(stressors: tuple[str, ...]) -> str:
    """The options that start stressors at the same time."""
    return " ".join(f"--{name} 1 {SIZES.get(name, '')}" for name in stressors)


def members(name: str) -> tuple[str, ...]:
    """The stressors of a class that can run."""
    folder = debs.with_dependencies("stress-ng", "usr/bin/stress-ng")
    argv: list[str | Path] = [
        *debs.loader(folder),
        folder / "usr/bin/stress-ng",
        "--class",
        f"{name}?",
    ]
    listed = programs.output(
        argv, "cannot list stressors", f"remove {folder} and its .json, then run it again"
    )
    return tuple(each for each in listed.split(":")[1].split() if each not in CANNOT)


def judge_stressors(result: BootResult, stressors: tuple[str, ...], share: float) -> None:
    """None was left out or found something wrong; that ``share`` of them did something."""
    assert "stress-ng=" not in text(result), f"{text(result)[-500:]}\n{result.stderr[-3000:]}"
    assert not SAID_NO.findall(result.stderr), result.stderr[-3000:]
    done = {name: int(count) for name, count in WORK.findall(text(result))}
    assert done.keys() <= set(stressors), result.stderr[-3000:]
    # On a busy machine one starts too late to be listed, or does not end its first round.
    expect_at_least(sum(count > 0 for count in done.values()), share * len(stressors))


def with_libraries(package: str, program: str) -> list[tuple[Path, str]]:
    """A program of a package (relative to the root) and its shared libraries, each with its place
    in a guest.

    The package's own loader finds the libraries, so that none of the machine's is among them.

    """
    folder = debs.with_dependencies(package, program)
    loader = debs.loader(folder)
    text = programs.output(
        [*loader, "--list", folder / program],
        f"cannot find the libraries of {program}",
        f"remove {folder} and its .json, then run it again",
    )
    found = [Path(line) for line in re.findall(r"=> (/\S+)", text) if debs.LOADER not in line]
    return [
        (folder / program, f"/{program}"),
        (Path(loader[0]), f"/lib64/{debs.LOADER}"),
        *((library, f"/lib/{debs.TRIPLET}/{library.name}") for library in found),
    ]


@pytest.mark.parametrize(
    ("what", "seconds", "device"),
    [
        pytest.param("quick ones", SHORT, "", marks=pytest.mark.nightly),
        *(
            pytest.param(what, STRESS_SECONDS, "", marks=pytest.mark.nightly)
            for what in STRESSORS
            if "quick" not in what
        ),
        pytest.param("all sorts", STRESS_SECONDS, BALLOON, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.timeout(700 + 6 * STRESS_SECONDS)
def test_no_byte_leaks(what: str, seconds: int, device: str, record_property: Record) -> None:
    result = run(
        script(together(STRESSORS[what]), seconds, seconds),
        cpus=2,
        memory="1G",
        devices=[device] if device else [],
        append="" if device else PARTIAL,
        add=with_libraries("stress-ng", "usr/bin/stress-ng"),
        timeout=400.0 + 4 * seconds,
    )
    fine(result)
    hunter = hunted(result, record_property)
    judge_stressors(result, STRESSORS[what], 0.5 if seconds == SHORT else 1.0)
    # Whoever ran out of memory, it was not the hunter.
    assert hunter["workers_killed"] == 0
    expect_at_least(len(hunter["checked_pages"]), 10)
    found = counters(result)
    for counter in ("pgzeroed_skip", "pgzeroed_set_reported", "pgzeroed_set_prezeroed"):
        expect_at_least(found[counter], 1)


@pytest.mark.nightly
@pytest.mark.timeout(9000)
@pytest.mark.parametrize("what", CLASSES)
def test_no_byte_leaks_beside_each_of_a_class(what: str, record_property: Record) -> None:
    stressors = members(what)
    result = run(
        script(
            # By its manual these may hang a machine; here they run in a guest.
            f"--pathological --class {what} --exclude {','.join(CANNOT)} --sequential 1 "
            f"{CLASS_SIZES}",
            EACH_SECONDS,
            EACH_SECONDS * len(stressors),
        ),
        cpus=2,
        memory="1G",
        devices=[BALLOON],
        add=with_libraries("stress-ng", "usr/bin/stress-ng"),
        timeout=8000.0,
    )
    fine(result)
    hunted(result, record_property)
    judge_stressors(result, stressors, 0.5)
    listed = {name for name, _ in WORK.findall(text(result))}
    assert listed == set(stressors), f"not run: {set(stressors) - listed}\n{result.stderr[-3000:]}"
    print(f"{len(stressors)} stressors of {what}, {EACH_SECONDS} s each")
    expect_at_least(counters(result)["pgzeroed_skip"], 1)
