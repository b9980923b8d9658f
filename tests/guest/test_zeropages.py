# SPDX-License-Identifier: GPL-2.0
"""zeropages.

What it says is what the kernel counts, and it knows why nothing works when nothing does.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from lab.bench.session import DROP
from lab.boot.guest import running
from lab.boot.spec import BootSpec
from lab.build.programs import build_programs
from tests.guest.guests import (
    BALLOON,
    KERNEL,
    REPORT,
    SETTLE,
    ZP,
    expect_at_least,
    expect_at_most,
    fine,
    objects,
    run,
    text,
)

SOURCES = ("reported", "freed", "prezeroed")
OTHERS = ("skip", "lost", "cleared", "bad")
LOOK = "zeropages --once --json"
NONE = {f"pgzeroed_set_{name}": 0 for name in SOURCES} | {f"pgzeroed_{name}": 0 for name in OTHERS}
# Bits 0 (must-tell-host), 1, 5 (reporting) and 32 (version 1).
FEATURES = {1, 5, 32}
BOOTED = (
    "6,0,0,-;Linux version 7.3.4\n6,90,5,-;mem auto-init: stack:all(zero), heap alloc:off, heap "
    "free:off\n"
)
ZONEINFO = """Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 7
  pages free     40
        present  100
      nr_free_pages 40
  pagesets
    cpu: 0
              count:    2
Node 0, zone  Movable
  pages free     0
        present  0
Node 1, zone   Normal
  pages free     1000
        present  2000
      nr_free_pages 1000
  pagesets
    cpu: 0
              count:    5
    cpu: 1
              count:    6
Node 1, zone  Movable
  pages free     0
        present  0
"""
BUDDYINFO = (
    "Node 0, zone      DMA      4      2      8\nNode 1, zone   Normal      0      4    248\n"
)


class Machine:
    """A made-up /proc and /sys for --root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.vmstat: dict[str, int] = {"nr_free_pages": 1040, **NONE}
        self.put("proc/zoneinfo", ZONEINFO)
        self.put("proc/buddyinfo", BUDDYINFO)
        self.put("proc/cmdline", "quiet")
        self.put("dev/kmsg", BOOTED)
        self.put("sys/module/page_reporting/parameters/page_reporting_delay_ms", "2000")
        self.put(ZP + "/enabled", "0")

    def put(self, name: str, content: str) -> None:
        """A file."""
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + ("" if content.endswith("\n") else "\n"), encoding="utf-8")

    def balloon(self, features: set[int], status: str = "0x0000000f", driver: bool = True) -> None:
        """A balloon whose driver took these features."""
        device = "sys/bus/virtio/devices/virtio3"
        self.put(f"{device}/device", "0x0005")
        self.put(
            f"{device}/features", "".join("1" if bit in features else "0" for bit in range(64))
        )
        self.put(f"{device}/status", status)
        if driver:
            (self.root / device / "driver").mkdir()

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run zeropages on it."""
        self.put("proc/vmstat", "".join(f"{name} {value}\n" for name, value in self.vmstat.items()))
        return subprocess.run(
            [str(build_programs()["zeropages"]), "--root", str(self.root), *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def look(self) -> dict[str, Any]:
        """What it says as JSON."""
        done = self.call("--once", "--json")
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_memory_is_added_up_by_zone_and_node(machine: Machine) -> None:
    machine.vmstat |= {"pgzeroed_set_reported": 700, "pgzeroed_skip": 80, "pgzeroed_lost": 12}
    told = machine.look()
    assert [(zone["node"], zone["zone"]) for zone in told["zones"]] == [(0, "DMA"), (1, "Normal")]
    normal = told["zones"][1]
    assert normal["free_blocks"] == [0, 4, 248]
    assert normal["cpu_list_bytes"] == 11 * 4096
    assert [node["free_bytes"] for node in told["nodes"]] == [40 * 4096, 1000 * 4096]
    assert told["memory"] == {
        "free_bytes": 1040 * 4096,
        "cpu_list_bytes": 13 * 4096,
        "known_zero_bytes": 608 * 4096,
        # Known-zero pages may be on the lists of the CPUs, which free does not count.
        "dirty_bytes": 445 * 4096,
    }


def test_every_counter_is_shown_as_it_is(machine: Machine) -> None:
    for number, name in enumerate(NONE):
        machine.vmstat[name] = 1000 + number
    told = machine.look()
    for name in SOURCES:
        assert told["sources"][name]["set_pages"] == machine.vmstat[f"pgzeroed_set_{name}"]
        assert told["sources"][name]["set_pages_per_s"] is None
    for name in OTHERS:
        assert told[f"{name}_pages"] == machine.vmstat[f"pgzeroed_{name}"]


REPORTED_OFF = {
    "no balloon": "there is no virtio balloon",
    "no driver": "has no driver",
    "failed": "is not running (status 0x83)",
    "no reporting": "the device does not offer it",
    "no CONFIG_PAGE_REPORTING": "no CONFIG_PAGE_REPORTING",
    "parameter": "refused by the parameter virtio_balloon.device_init_reported",
    "log": "free pages are poisoned",
    "init_on_free": "init_on_free=1",
    "init_on_free by default": "init_on_free=1",
    "page_poison": "page_poison=1",
    "legacy": "legacy device",
    "not offered": "the device does not offer bit 6",
    "log gone": "the kernel log, which has the reason, cannot be read",
    "log begins later": "the kernel log, which has the reason, cannot be read",
    "DMA API": "VIRTIO_F_ACCESS_PLATFORM",
}


@pytest.mark.parametrize("case", REPORTED_OFF)
def test_why_reported_memory_is_not_known_zero(machine: Machine, case: str) -> None:
    features = set(FEATURES)
    match case:
        case "no driver":
            machine.balloon(set(), status="0x00000001", driver=False)
        case "failed":
            machine.balloon(features, status="0x00000083")
        case "no reporting" | "no CONFIG_PAGE_REPORTING":
            features -= {5}
            if case != "no reporting":
                parameters = machine.root / "sys/module/page_reporting/parameters"
                (parameters / "page_reporting_delay_ms").unlink()
                parameters.rmdir()
        case "parameter":
            machine.put("sys/module/virtio_balloon/parameters/device_init_reported", "N")
        case "log":
            line = (
                "6,400,9,-;virtio_balloon virtio3: not using DEVICE_INIT_REPORTED: free pages are "
                "poisoned\n"
            )
            machine.put("dev/kmsg", BOOTED + line)
        case "init_on_free":
            machine.put("proc/cmdline", "quiet init_on_free=1")
        case "init_on_free by default":
            machine.put("dev/kmsg", BOOTED.replace("heap free:off", "heap free:on"))
        case "page_poison":
            machine.put("proc/cmdline", "page_poison=on init_on_free=0")
        case "legacy":
            features -= {32}
        case "log gone":
            (machine.root / "dev/kmsg").unlink()
        case "log begins later":
            machine.put("dev/kmsg", "6,4711,0,-;what came before is overwritten")
        case "DMA API":
            features |= {6, 33}
    if case not in ("no balloon", "no driver", "failed"):
        machine.balloon(features)
    elif case == "failed":
        pass
    told = machine.look()
    assert told["state"] == "off"
    source = told["sources"]["reported"]
    assert not source["on"]
    assert REPORTED_OFF[case] in source["why"]
    assert told["sentence"].startswith("No: ")


def test_the_last_word_on_the_command_line_counts(machine: Machine) -> None:
    machine.balloon(FEATURES)
    machine.put("proc/cmdline", "init_on_free=1 init_on_free=0 page_poison=off")
    assert "does not offer bit 6" in machine.look()["sources"]["reported"]["why"]


@pytest.mark.parametrize("bit", [6, 7])
def test_a_source_that_is_on_has_no_excuse(machine: Machine, bit: int) -> None:
    machine.balloon(FEATURES | {bit})
    told = machine.look()
    name, other = ("reported", "inflated") if bit == 6 else ("inflated", "reported")
    assert told["sources"][name] | {"on": True, "why": None} == told["sources"][name]
    assert f"does not offer bit {13 - bit}" in told["sources"][other]["why"]
    assert told["sources"]["freed"]["on"]
    assert told["state"] == "waiting"


def test_the_answer_follows_the_counters(machine: Machine) -> None:
    machine.balloon(FEATURES | {6})
    assert machine.look()["state"] == "waiting"
    machine.vmstat["pgzeroed_set_reported"] = 700
    assert machine.look()["state"] == "ready"
    machine.vmstat |= {"pgzeroed_skip": 100, "pgzeroed_cleared": 300}
    told = machine.look()
    assert told["state"] == "working"
    assert "400.0 KiB, or 25.0 %" in told["sentence"]
    machine.vmstat["pgzeroed_bad"] = 3
    told = machine.look()
    assert told["state"] == "bad"
    assert told["sentence"].startswith("No: 3 known-zero pages")


def test_a_kernel_without_the_series(machine: Machine) -> None:
    machine.vmstat = {"nr_free_pages": 1040}
    told = machine.look()
    assert told["state"] == "no_series"
    assert "CONFIG_PAGE_ZEROED" in told["sentence"]
    assert told["sources"] is None
    assert told["memory"]["known_zero_bytes"] is None
    assert told["memory"]["free_bytes"] == 1040 * 4096
    assert "?" in machine.call("--once").stdout


def test_threads_of_others_are_not_taken_for_kzeropaged(machine: Machine) -> None:
    machine.put(ZP + "/enabled", "1")
    machine.put("proc/40/stat", "40 (kzeropaged0) S 2 0 0 0 -1 2129984 0 0 0 0 100 50 0 0")
    machine.put("proc/41/stat", "41 (kzeropaged1) S 40 0 0 0 -1 2129984 0 0")
    machine.put("proc/42/stat", "42 (kzeropaged1) R) S 2 0 0")
    told = machine.look()["kzeropaged"]
    assert told["enabled"] and told["cpu_ms"] == 1500
    assert {"node": 0, "pid": 40, "state": "S"} in told["threads"]
    assert 41 not in [thread["pid"] for thread in told["threads"]]


def test_the_answer_is_the_exit_code(machine: Machine) -> None:
    def check() -> tuple[int, str]:
        done = machine.call("--check")
        return done.returncode, done.stdout.split(":")[0]

    assert check() == (1, "No")
    machine.balloon(FEATURES | {6})
    assert check() == (3, "Not yet")
    machine.vmstat["pgzeroed_set_reported"] = 700
    assert check() == (0, "Ready")
    machine.vmstat |= {"pgzeroed_skip": 100, "pgzeroed_cleared": 300}
    assert check() == (0, "Yes")
    machine.vmstat["pgzeroed_bad"] = 3
    assert check() == (1, "No")


def test_a_source_that_was_on_is_no_answer(machine: Machine) -> None:
    """Zeroing was skipped since boot, but no source is on now."""
    machine.vmstat |= {"pgzeroed_set_prezeroed": 700, "pgzeroed_skip": 100}
    assert machine.call("--check").returncode == 1
    machine.put(ZP + "/enabled", "1")
    assert machine.call("--check").returncode == 0


def metrics(machine: Machine) -> dict[str, float]:
    """Samples by name and labels; each must have its type and help before it."""
    described: dict[str, set[str]] = {}
    samples: dict[str, float] = {}
    for line in machine.call("--metrics").stdout.splitlines():
        if line.startswith("# "):
            _, what, name, _ = line.split(" ", 3)
            described.setdefault(name, set()).add(what)
            continue
        sample, value = line.rsplit(" ", 1)
        assert described[sample.split("{")[0]] == {"HELP", "TYPE"}
        assert sample not in samples
        samples[sample] = float(value)
    assert set(described) == {sample.split("{")[0] for sample in samples}
    return samples


def test_metrics_are_the_counters_in_bytes(machine: Machine) -> None:
    machine.balloon(FEATURES | {6})
    machine.vmstat |= {name: 1000 + number for number, name in enumerate(NONE)}
    machine.put(ZP + "/enabled", "1")
    machine.put("proc/40/stat", "40 (kzeropaged0) S 2 0 0 0 -1 2129984 0 0 0 0 100 50 0 0")
    found = metrics(machine)
    for name in SOURCES:
        sample = f'knownzero_set_bytes_total{{source="{name}"}}'
        assert found[sample] == machine.vmstat[f"pgzeroed_set_{name}"] * 4096
    assert found["knownzero_skipped_bytes_total"] == machine.vmstat["pgzeroed_skip"] * 4096
    for name in ("lost", "cleared"):
        assert found[f"knownzero_{name}_bytes_total"] == machine.vmstat[f"pgzeroed_{name}"] * 4096
    assert found["knownzero_bad_pages_total"] == machine.vmstat["pgzeroed_bad"]
    assert found['knownzero_state{state="bad"}'] == 1
    assert (
        sum(value for sample, value in found.items() if sample.startswith("knownzero_state")) == 1
    )
    assert found['knownzero_source_on{source="reported"}'] == 1
    assert found['knownzero_memory_bytes{kind="free"}'] == 1040 * 4096
    assert found["knownzero_prezero_cpu_seconds_total"] == 1.5


def test_metrics_that_the_kernel_does_not_have_are_left_out(machine: Machine) -> None:
    machine.vmstat = {"nr_free_pages": 1040}
    names = {sample.split("{")[0] for sample in metrics(machine)}
    assert names == {"knownzero_state", "knownzero_memory_bytes"}
    kinds = {sample.split('kind="')[1][:-2] for sample in metrics(machine) if "memory" in sample}
    assert kinds == {"free", "cpu_list"}


def test_pools_have_their_own_figures(machine: Machine) -> None:
    pool = "sys/kernel/mm/hugepages/hugepages-2048kB"
    for number, name in enumerate(("nr", "free", "resv", "surplus")):
        machine.put(f"{pool}/{name}_hugepages", str(10 + number))
    told = machine.look()
    assert told["hugetlb"] == [
        {"page_size": 2 << 20, "total": 10, "free": 11, "reserved": 12, "surplus": 13}
    ]
    assert "10 of 2.0 MiB, 11 free, 12 reserved, 13 surplus" in machine.call("--once").stdout


def test_no_proc_is_a_broken_machine(machine: Machine) -> None:
    (machine.root / "proc/zoneinfo").unlink()
    done = machine.call("--once")
    assert done.returncode == 3
    assert "zoneinfo" in done.stderr


# In guests


def vmstat(lines: str) -> dict[str, int]:
    """Counters from lines of /proc/vmstat."""
    return {name: int(value) for name, value in (line.split() for line in lines.splitlines())}


@pytest.mark.boots
def test_it_tells_what_the_kernel_counts() -> None:
    """Between two readings of /proc/vmstat, its figures lie between theirs."""
    result = run(
        f"{REPORT}; alloc_once --size 128 --pages thp >/dev/null; echo 6 > "
        "/proc/sys/vm/nr_hugepages; for i in 1 2 3; do echo begin; cat /proc/vmstat; echo look; "
        f"{LOOK}; echo end; cat /proc/vmstat; alloc_once --size 64 --pages nothp >/dev/null; done",
        checked=True,
    )
    fine(result)
    rounds = text(result).split("begin\n")[1:]
    assert len(rounds) == 3
    for part in rounds:
        first, rest = part.split("look\n")
        line, last = rest.split("end\n")
        before, told, after = vmstat(first), json.loads(line), vmstat(last)
        for name in SOURCES:
            counter = f"pgzeroed_set_{name}"
            assert before[counter] <= told["sources"][name]["set_pages"] <= after[counter]
        for name in OTHERS:
            assert before[f"pgzeroed_{name}"] <= told[f"{name}_pages"] <= after[f"pgzeroed_{name}"]
        # It goes up and down; the program itself takes some pages.
        expect_at_least(told["memory"]["known_zero_bytes"], 64 << 20)
        expect_at_most(abs(told["memory"]["free_bytes"] // 4096 - before["nr_free_pages"]), 4096)
        blocks = sum(
            n << order for zone in told["zones"] for order, n in enumerate(zone["free_blocks"])
        )
        expect_at_most(abs(blocks - told["memory"]["free_bytes"] // 4096), 4096)
        assert told["state"] == "working"
        expect_at_least(told["skip_pages"], 128 << 8)
        pool = next(pool for pool in told["hugetlb"] if pool["page_size"] == 2 << 20)
        assert (pool["total"], pool["free"]) == (6, 6)


@pytest.mark.boots
@pytest.mark.parametrize(
    ("append", "devices", "state", "why"),
    [
        ("", [], "off", "there is no virtio balloon"),
        ("", ["virtio-balloon-pci"], "off", "free pages are not reported"),
        ("", [f"{BALLOON},x-device-init-reported=off"], "off", "the device does not offer bit 6"),
        ("init_on_free=1", [BALLOON], "off", "init_on_free=1"),
        ("page_poison=1", [BALLOON], "off", "poisoned"),
        (
            "virtio_balloon.device_init_reported=0",
            [BALLOON],
            "off",
            "virtio_balloon.device_init_reported",
        ),
        (
            "",
            ["virtio-balloon-pci,device-init-on-inflate=on"],
            "waiting",
            "free pages are not reported",
        ),
    ],
    ids=[
        "no device",
        "no reporting",
        "old device",
        "init_on_free",
        "page_poison",
        "parameter",
        "bit 7 only",
    ],
)
def test_why_it_is_off(append: str, devices: list[str], state: str, why: str) -> None:
    result = run(
        f"{LOOK}; zeropages --once", append=append, devices=devices, checked="poison" not in append
    )
    fine(result)
    told = objects(result)[0]
    assert told["state"] == state, told["sentence"]
    assert not told["sources"]["reported"]["on"]
    assert why in told["sources"]["reported"]["why"]
    assert told["sources"]["inflated"]["on"] == (state == "waiting")
    assert told["sentence"] in text(result)
    # A count of nothing is not shown as nothing.
    assert ("counted once a source is on" in text(result)) == (state == "off")
    if append.startswith(("init_on_free", "page_poison")):
        # One thing is in the way of all of them.
        assert why in told["sources"]["prezeroed"]["why"]


@pytest.mark.boots
def test_kzeropaged_is_seen_at_work() -> None:
    result = run(
        f"{LOOK}; echo 1 > {ZP}/enabled; fillfree --share 80 >/dev/null; "
        f"zeropages --once --interval 3 --json; {DROP}; {SETTLE}; {LOOK}; "
        f"alloc_once --size 64 --pages thp >/dev/null; {LOOK}; echo 0 > {ZP}/enabled; {LOOK}",
        devices=[],
        checked=True,
    )
    fine(result)
    off, busy, done, used, ended = objects(result)
    assert off["state"] == "off"
    assert off["kzeropaged"]["threads"] == []
    expect_at_least(busy["kzeropaged"]["bytes_per_s"], 1 << 20)
    expect_at_least(busy["sources"]["prezeroed"]["set_pages_per_s"], 256)
    assert 0 < busy["kzeropaged"]["cpu_ms_per_s"] <= 1100
    assert busy["interval_s"] > 2.9
    expect_at_most(busy["interval_s"], 30)
    (thread,) = done["kzeropaged"]["threads"]
    assert thread["node"] == 0
    # Something may have wanted zeros meanwhile, and got them.
    assert done["state"] in ("ready", "working")
    assert 0 < busy["kzeropaged"]["bytes_zeroed"] <= done["kzeropaged"]["bytes_zeroed"]
    assert used["state"] == "working"
    expect_at_least(used["skip_pages"], 64 << 7)
    assert ended["kzeropaged"]["threads"] == []
    # Zeroed memory remains known; with no source on, the answer is no.
    assert ended["state"] == "off"
    assert not ended["sources"]["prezeroed"]["on"]


@pytest.mark.boots
def test_a_false_source_is_named() -> None:
    result = run(
        "fillfree --share 60 >/dev/null; echo lie > "
        f"/sys/module/page_zeroed_reporter/parameters/mode; {REPORT}; {LOOK}; alloc_once --size "
        f"64 --pages nothp >/dev/null; {LOOK}",
        devices=[],
        allow_warnings=True,
    )
    assert result.exit_code == 0, text(result)
    before, after = objects(result)
    assert before["sources"]["reported"]["on"]
    assert before["state"] != "off"
    assert after["state"] == "bad"
    assert after["bad_pages"] > 0
    assert "page_zeroed: BUG" in after["sentence"]


@pytest.mark.boots
def test_the_size_of_the_balloon_and_what_came_out_of_it() -> None:
    spec = BootSpec(
        kernel=KERNEL,
        devices=[f"{BALLOON},device-init-on-inflate=on"],
        memory="1G",
        timeout=240,
        command=["sh", "-c", f"while read -r word; do {LOOK}; done"],
    )
    with running(spec) as guest:
        lines = iter(guest.lines)

        def look() -> dict[str, Any]:
            guest.send("look")
            told: dict[str, Any] = json.loads(next(lines))
            return told

        def until(size: int) -> dict[str, Any]:
            guest.qmp("balloon", value=(1 << 30) - size)
            deadline = time.monotonic() + 60
            while (told := look())["balloon"]["bytes"] != size:
                assert time.monotonic() < deadline, told["balloon"]
                time.sleep(0.2)
            return told

        assert look()["balloon"]["bytes"] == 0
        until(128 << 20)
        told = until(0)
        assert told["sources"]["inflated"]["on"]
        # The driver counts the pages of a request as out of the balloon before it frees them.
        deadline = time.monotonic() + 60
        while look()["sources"]["freed"]["set_pages"] < (128 << 20) // 4096:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.boots
def test_the_distributions_kernel() -> None:
    result = run(f"{LOOK}; zeropages --once; zeropages --count 2 --interval 1", kernel="stock")
    fine(result)
    told = objects(result)[0]
    assert told["state"] == "no_series"
    assert told["memory"]["free_bytes"] > 256 << 20
    assert told["memory"]["known_zero_bytes"] is None
    assert text(result).count("No: this kernel (") == 1 + 3


@pytest.mark.boots
def test_it_runs_as_nobody() -> None:
    """Without the kernel log it says what it cannot know."""
    result = run(
        "echo 1 > /proc/sys/kernel/dmesg_restrict; su -s /bin/sh nobody -c 'zeropages --once "
        "--json'",
        devices=[f"{BALLOON},x-device-init-reported=off"],
        checked=True,
    )
    fine(result)
    (told,) = objects(result)
    assert told["state"] == "off"
    assert (
        "the kernel log, which has the reason, cannot be read" in told["sources"]["reported"]["why"]
    )
