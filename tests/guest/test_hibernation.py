# SPDX-License-Identifier: GPL-2.0
"""Suspend to disk and back: what was known of free memory before is forgotten."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.boot import argv, resolve
from lab.boot.guest import Guest, running
from lab.boot.spec import BootSpec
from tests.guest.guests import (
    BALLOON,
    CHECK,
    CHECKED,
    DELAY,
    DIRTY,
    KERNEL,
    REPORT,
    VHOST_USER,
    expect_at_least,
    lying_daemon,
)
from tests.guest.test_balloon import resize

pytestmark = pytest.mark.boots

SWAP_MB = 1024
MEMORY_MB = 640
INFLATED = 64 << 20
SECONDS = 480
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


def resumed_text(
    tmp_path: Path,
    script: str,
    append: str,
    kernel: str,
    cpus: int,
    watch: Callable[[Guest, str], None] = lambda _guest, _text: None,
) -> str:
    """The console of a guest that runs the script, up to its last line; the console is judged."""
    disk = tmp_path / "swap.img"
    with disk.open("wb") as image:
        image.truncate(SWAP_MB << 20)
    # test_resume writes the image, reads it back and restores it, in the running kernel.
    spec = BootSpec(
        kernel=kernel,
        memory=f"{MEMORY_MB}M",
        cpus=cpus,
        devices=[BALLOON, "virtio-blk-pci,drive=swap"],
        extra_qemu=["-drive", f"file={disk},if=none,id=swap,format=raw,cache=unsafe"],
        append=f"{append} resume=/dev/vda",
        timeout=float(SECONDS),
        command=[
            "sh",
            "-c",
            f"set -e; trap 'echo hibernation-test-failed > /dev/ttyS0' EXIT\n{script}trap - EXIT",
        ],
    )
    deadline = time.monotonic() + SECONDS
    # Leaving the block judges the console: a page that is not zero fails the test.
    with running(spec) as guest:
        text = ""
        while "hibernation-test-done" not in text:
            time.sleep(0.5)
            text = guest.console.read_text(errors="replace")
            watch(guest, text)
            assert "hibernation-test-failed" not in text, text[-3000:]
            assert time.monotonic() < deadline, f"not done after {SECONDS} s:\n{text[-3000:]}"
    assert "PM: hibernation: hibernation exit" in text
    return text


@pytest.mark.nightly
def test_the_poison_value_is_written_again(tmp_path: Path) -> None:
    """A device that does not know the value puts zeros where a guest with page_poison=1 expects its
    pattern.
    """
    script = f"""
echo 100 > {DELAY}; mkswap /dev/vda >/dev/null; swapon /dev/vda
{DIRTY}; sleep 10
echo test_resume > /sys/power/disk
echo disk > /sys/power/state
exec > /dev/ttyS0 2>&1
{DIRTY}; sleep 10
alloc_once --size 256 --pages thp --verify --mode touch_all
alloc_once --size 256 --pages nothp --verify --mode touch_all
echo hibernation-test-done
"""
    text = resumed_text(tmp_path, script, "page_poison=1", KERNEL, 1)
    assert "memory corruption" not in text


@pytest.mark.nightly
def test_free_memory_is_reported_again_after_resume(tmp_path: Path) -> None:
    """With init_on_free=1, resume clears all free memory, so the host backs all of it again."""
    script = f"""
echo 100 > {DELAY}; mkswap /dev/vda >/dev/null; swapon /dev/vda
{DIRTY}
exec > /dev/ttyS0 2>&1
echo memory-was-freed; sleep 20
echo test_resume > /sys/power/disk
echo disk > /sys/power/state
fillfree --size 32 > /dev/null
echo resumed-and-freed; sleep 30
echo hibernation-test-done
"""
    left: dict[str, float] = {}

    def watch(guest: Guest, text: str) -> None:
        last = max(("memory-was-freed", "resumed-and-freed"), key=text.rfind)
        if last in text:
            left[last] = min(left.get(last, 1.0), resident(guest) / MEMORY_MB)

    resumed_text(tmp_path, script, "init_on_free=1", KERNEL, 1, watch)
    assert left["memory-was-freed"] < 0.5, "free memory is not reported at all"
    share = left["resumed-and-freed"]
    assert share < 0.5, f"the host still backs {share:.0%} of the guest's memory"


def resident(guest: Guest) -> float:
    """The memory of the guest that the host backs, in MB; QEMU's own is small."""
    status = Path(f"/proc/{guest.pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@pytest.mark.parametrize("cpus", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_resume_forgets(tmp_path: Path, cpus: int) -> None:
    # Without bit 16, whose driver begins a pass on resume.
    append = f"{CHECK} virtio_balloon.report_now=0"
    text = resumed_text(tmp_path, SCRIPT, append, CHECKED, cpus)
    lines = [line.strip() for line in text.splitlines()]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    counters = dict(line.split() for line in lines if line.startswith("pgzeroed_"))
    before = next(
        line.split()[2] for line in lines if line.startswith("before pgzeroed_set_reported")
    )
    assert int(before) > 0
    assert int(counters["pgzeroed_bad"]) == 0
    # Right after the resume nothing is known; once it was used and has been reported again, it is.
    assert told[0]["vmstat"]["pgzeroed_skip"] < 0.05 * (256 << 8)
    expect_at_least(told[-1]["vmstat"]["pgzeroed_skip"], 0.5 * (256 << 8))


# The same guest in another QEMU process: what was negotiated before proves nothing about the device
# that is there now.
ELSEWHERE = f"""
echo 3600000 > {DELAY}; mkswap /dev/vda >/dev/null; swapon /dev/vda
{DIRTY}; {REPORT}
count() {{ awk -v name="$2" '$1 == name {{ print word, $2 }}' word="$1" /proc/vmstat; }}
echo reboot > /sys/power/disk
echo disk > /sys/power/state
exec > /dev/ttyS0 2>&1
count resumed pgzeroed_set_reported; count unballooned pgzeroed_set_freed
{REPORT}
count reported pgzeroed_set_reported
echo ready-for-the-balloon
until [ $(count x balloon_deflate | cut -d' ' -f2) -ge $(({INFLATED} / 4096)) ]; do sleep 0.2; done
count ballooned pgzeroed_set_freed
alloc_once --size 256 --pages thp --verify --mode touch_all
alloc_once --size 128 --pages nothp --verify --mode touch_all
count bad pgzeroed_bad
echo hibernation-test-done
"""


def offers(switch: str) -> str:
    """A device of QEMU that answers for reported and inflated memory, or not."""
    return f"{BALLOON},x-device-init-reported={switch},device-init-on-inflate={switch}"


# It answers whether or not the driver has accepted the two bits.
LIAR = f"{VHOST_USER},lie=full-length"
NO_BITS = "device-init-reported=off,device-init-on-inflate=off"
BITS = "device-init-reported=on,device-init-on-inflate=on"


@pytest.mark.parametrize(
    ("saved", "resumed", "trusted"),
    [
        pytest.param(offers("on"), offers("on"), (True, True), id="both answer"),
        pytest.param(
            f"{LIAR},{BITS}",
            f"{LIAR},{NO_BITS}",
            (False, False),
            id="the second does not offer the bits",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            f"{LIAR},{NO_BITS}",
            f"{LIAR},{BITS}",
            (False, False),
            id="the first does not offer the bits",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_resume_under_another_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved: str,
    resumed: str,
    trusted: tuple[bool, bool],
) -> None:
    """Saved under one device and resumed under another.

    Both must have offered a bit for it to be trusted.
    """
    if "lie=" in saved:
        lying_daemon(monkeypatch)
    saves_and_resumes(tmp_path, saved, resumed, trusted)


def smaller_rings(monkeypatch: pytest.MonkeyPatch, size: int) -> Callable[[], None]:
    """A function that gives the queues of the next device ``size`` entries instead of 128."""

    def smaller() -> None:
        device = argv.GENERIC.replace("vq_size=128", f"vq_size={size}")
        monkeypatch.setattr(resolve, "_front_end", lambda program: device)

    return smaller


# A report needs one descriptor; an inflate request with its bitmap needs two.
@pytest.mark.parametrize(
    ("size", "trusted"),
    [(16, (True, True)), pytest.param(1, (True, False), marks=pytest.mark.nightly)],
)
def test_resume_with_smaller_rings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, trusted: tuple[bool, bool]
) -> None:
    """Saved with rings of 128 entries.

    The driver takes the size of the ring that the second device has.
    """
    device, smaller = f"{VHOST_USER},{BITS}", smaller_rings(monkeypatch, size)
    saves_and_resumes(tmp_path, device, device, trusted, qemu="stock", between=smaller)


@pytest.mark.nightly
def test_reports_fit_a_smaller_ring_after_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on any kernel: `kz series bugs` runs it without the fix, where the kernel warns."""
    script = f"""
echo 100 > {DELAY}; mkswap /dev/vda >/dev/null; swapon /dev/vda
echo reboot > /sys/power/disk
echo disk > /sys/power/state
exec > /dev/ttyS0 2>&1
{DIRTY}; sleep 10
echo hibernation-test-done
"""
    smaller = smaller_rings(monkeypatch, 16)
    resumed_elsewhere(tmp_path, (VHOST_USER, VHOST_USER), script, (KERNEL, ""), "stock", smaller)


def saves_and_resumes(
    tmp_path: Path,
    saved: str,
    resumed: str,
    trusted: tuple[bool, bool],
    *,
    qemu: str = "knownzero",
    between: Callable[[], None] = lambda: None,
) -> None:
    """Save a guest and resume it in another QEMU.

    ``trusted``: whether bits 6 and 7 are, after that.
    """

    def balloon(guest: Guest) -> None:
        wait_for(guest, "ready-for-the-balloon")
        for taken in (INFLATED, 0):
            resize(guest, (MEMORY_MB << 20) - taken, MEMORY_MB << 20)

    text = resumed_elsewhere(
        tmp_path, (saved, resumed), ELSEWHERE, (CHECKED, CHECK), qemu, between, balloon
    )
    names = ("resumed", "reported", "unballooned", "ballooned", "bad")
    lines = [line.split() for line in text.splitlines()]
    found = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[0] in names}
    assert found["bad"] == 0
    assert (found["resumed"] > 0) == ("off" not in saved)
    more = found["reported"] - found["resumed"]
    freed = found["ballooned"] - found["unballooned"]
    if trusted[0]:
        # Loading the image made the host back all memory again, so the guest must report it again.
        expect_at_least(more, (256 << 20) // 4096)
    else:
        assert more == 0
    assert freed == (INFLATED // 4096 if trusted[1] else 0)


def wait_for(guest: Guest, word: str) -> str:
    deadline = time.monotonic() + SECONDS
    while word not in (text := guest.console.read_text(errors="replace")):
        time.sleep(0.5)
        assert "hibernation-test-failed" not in text, text[-3000:]
        assert time.monotonic() < deadline, f"no {word} in {SECONDS} s:\n{text[-3000:]}"
    return text


def resumed_elsewhere(
    tmp_path: Path,
    devices: tuple[str, str],
    script: str,
    kernel: tuple[str, str],
    qemu: str,
    between: Callable[[], None],
    during: Callable[[Guest], None] = lambda _guest: None,
) -> str:
    """The console of the second of two QEMUs: a guest is saved in one and resumed in the other.

    ``kernel``: with what is appended to its command line. ``during``: called after the resume.
    """
    disk = tmp_path / "swap.img"
    with disk.open("wb") as image:
        image.truncate(SWAP_MB << 20)
    image_of, append = kernel

    def spec(device: str, *extra: str) -> BootSpec:
        return BootSpec(
            kernel=image_of,
            qemu=qemu,
            memory=f"{MEMORY_MB}M",
            devices=[device, "virtio-blk-pci,drive=swap"],
            extra_qemu=["-drive", f"file={disk},if=none,id=swap,format=raw,cache=unsafe", *extra],
            append=f"{append} resume=/dev/vda",
            timeout=float(SECONDS),
            command=[
                "sh",
                "-c",
                f"set -e; trap 'echo hibernation-test-failed > /dev/ttyS0' EXIT\n{script}trap - "
                "EXIT",
            ],
        )

    with running(spec(devices[0])) as guest:
        deadline = time.monotonic() + SECONDS
        while guest.process.poll() is None:
            time.sleep(0.2)
            text = guest.console.read_text(errors="replace")
            assert "hibernation-test-failed" not in text, text[-3000:]
            assert time.monotonic() < deadline, f"not saved after {SECONDS} s:\n{text[-3000:]}"
    between()
    # It waits for "cont": the user space that comes up is that of the first guest.
    with running(spec(devices[1], "-S")) as guest:
        guest.qmp("cont")
        during(guest)
        text = wait_for(guest, "hibernation-test-done")
    assert "PM: hibernation: hibernation exit" in text
    return text
