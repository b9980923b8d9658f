# SPDX-License-Identifier: GPL-2.0
"""Suspend to disk and back: what was known of free memory before is forgotten."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lab.boot.guest import running
from lab.boot.spec import BootSpec
from tests.guest.guests import BALLOON, CHECK, CHECKED, DELAY, DIRTY, REPORT, expect_at_least

pytestmark = pytest.mark.boots

SWAP_MB = 1024
SECONDS = 240
# The lab's own channels are virtio ports, and the host is not connected to them after a resume:
# from there on the test speaks on the serial console.
SCRIPT = f"""
echo 3600000 > {DELAY}; mkswap /dev/vda >/dev/null; swapon /dev/vda
{DIRTY}; {REPORT}
before=$(grep pgzeroed_set_reported /proc/vmstat)
echo test_resume > /sys/power/disk
echo disk > /sys/power/state
exec > /dev/ttyS0 2>&1
echo "before $before"
alloc_once --size 256 --pages thp --verify --mode touch_all
alloc_once --size 128 --pages nothp --verify --mode touch_all
leak_hunter --seconds 3
fillfree --share 85 > /dev/null
{REPORT}
alloc_once --size 256 --pages thp --verify --mode touch_all
grep pgzeroed_ /proc/vmstat
echo hibernation-test-done
"""


@pytest.mark.parametrize("cpus", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_resume_forgets(tmp_path: Path, cpus: int) -> None:
    disk = tmp_path / "swap.img"
    with disk.open("wb") as image:
        image.truncate(SWAP_MB << 20)
    # test_resume writes the image, reads it back and restores it, in the running kernel.
    spec = BootSpec(
        kernel=CHECKED,
        memory="1G",
        cpus=cpus,
        devices=[BALLOON, "virtio-blk-pci,drive=swap"],
        extra_qemu=["-drive", f"file={disk},if=none,id=swap,format=raw,cache=unsafe"],
        append=f"{CHECK} resume=/dev/vda",
        timeout=float(SECONDS),
        command=[
            "sh",
            "-c",
            f"set -e; trap 'echo hibernation-test-failed > /dev/ttyS0' EXIT\n{SCRIPT}trap - EXIT",
        ],
    )
    deadline = time.monotonic() + SECONDS
    # Leaving the block judges the console: a page that is not zero fails the test.
    with running(spec) as guest:
        text = ""
        while "hibernation-test-done" not in text:
            time.sleep(0.5)
            text = guest.console.read_text(errors="replace")
            assert "hibernation-test-failed" not in text, text[-3000:]
            assert time.monotonic() < deadline, f"not done after {SECONDS} s:\n{text[-3000:]}"
    lines = [line.strip() for line in text.splitlines()]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    counters = dict(line.split() for line in lines if line.startswith("pgzeroed_"))
    before = next(line.split()[2] for line in lines if line.startswith("before pgzeroed_set_reported"))
    assert "PM: hibernation: hibernation exit" in text
    assert int(before) > 0
    assert int(counters["pgzeroed_bad"]) == 0
    # Right after the resume nothing is known; once it was used and has been reported again, it is.
    assert told[0]["vmstat"]["pgzeroed_skip"] < 0.05 * (256 << 8)
    expect_at_least(told[-1]["vmstat"]["pgzeroed_skip"], 0.5 * (256 << 8))


# The same guest in another QEMU process: what it told of the device before says nothing about the one it meets.
ELSEWHERE = f"""
echo 3600000 > {DELAY}; mkswap /dev/vda >/dev/null; swapon /dev/vda
{DIRTY}; {REPORT}
echo "before $(awk '/^pgzeroed_set_reported/ {{ print $2 }}' /proc/vmstat)"
echo reboot > /sys/power/disk
echo disk > /sys/power/state
exec > /dev/ttyS0 2>&1
set_reported() {{ echo "$1 $(awk '/^pgzeroed_set_reported/ {{ print $2 }}' /proc/vmstat)"; }}
set_reported resumed
{REPORT}
set_reported reported
alloc_once --size 256 --pages thp --verify --mode touch_all
alloc_once --size 128 --pages nothp --verify --mode touch_all
grep pgzeroed_ /proc/vmstat
echo hibernation-test-done
"""


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("on", "off"), ("on", "on"), pytest.param("off", "on", marks=pytest.mark.nightly)],
)
def test_resume_under_another_device(tmp_path: Path, saved: str, resumed: str) -> None:
    """Saved under a device that tells what is zero or not, resumed under another: each is asked anew."""
    disk = tmp_path / "swap.img"
    with disk.open("wb") as image:
        image.truncate(SWAP_MB << 20)

    def spec(tells: str, *extra: str) -> BootSpec:
        return BootSpec(
            kernel=CHECKED,
            memory="1G",
            devices=[f"{BALLOON},x-device-init-reported={tells}", "virtio-blk-pci,drive=swap"],
            extra_qemu=["-drive", f"file={disk},if=none,id=swap,format=raw,cache=unsafe", *extra],
            append=f"{CHECK} resume=/dev/vda",
            timeout=float(SECONDS),
            command=[
                "sh",
                "-c",
                f"set -e; trap 'echo hibernation-test-failed > /dev/ttyS0' EXIT\n{ELSEWHERE}trap - EXIT",
            ],
        )

    deadline = time.monotonic() + SECONDS
    with running(spec(saved)) as guest:
        while guest.process.poll() is None:
            time.sleep(0.2)
            text = guest.console.read_text(errors="replace")
            assert "hibernation-test-failed" not in text, text[-3000:]
            assert time.monotonic() < deadline, f"not saved after {SECONDS} s:\n{text[-3000:]}"
    # It waits for "cont": the user space that comes up is that of the first guest.
    with running(spec(resumed, "-S")) as guest:
        guest.qmp("cont")
        text = ""
        while "hibernation-test-done" not in text:
            time.sleep(0.5)
            text = guest.console.read_text(errors="replace")
            assert "hibernation-test-failed" not in text, text[-3000:]
            assert time.monotonic() < deadline, f"not done after {SECONDS} s:\n{text[-3000:]}"
    lines = [line.split() for line in text.splitlines()]
    told = {words[0]: int(words[-1]) for words in lines if words and words[0] in ("resumed", "reported")}
    counters = {
        words[0]: int(words[1]) for words in lines if len(words) == 2 and words[0].startswith("pgzeroed_")
    }
    assert "PM: hibernation: hibernation exit" in text
    assert counters["pgzeroed_bad"] == 0
    assert (told["resumed"] > 0) == (saved == "on")
    more = told["reported"] - told["resumed"]
    if saved == resumed == "on":
        # What was reported before is reported again: the host backs it, since the image was loaded.
        expect_at_least(more, (256 << 20) // 4096)
    else:
        assert more == 0
