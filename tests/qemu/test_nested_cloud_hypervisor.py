# SPDX-License-Identifier: GPL-2.0
"""cloud-hypervisor with the mails of vmm/, in a guest whose KVM is emulated.

Debian's kernel is the host, ours the guest.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.bench.session import LATE, LOOP, MIB, Side
from lab.boot import argv, conform, initramfs, nested
from lab.boot.guest import running
from lab.boot.spec import BootSpec
from lab.core.paths import REPO
from lab.core.run import output
from lab.machine import stock
from tests.guest.guests import CHECK, REPORT, expect_at_least, expect_at_most

SOURCE = "KNOWNZERO_CLOUD_HYPERVISOR"
MAILS = REPO / "vmm" / "cloud-hypervisor"
CRATES = {"balloon-discard": "discard", "balloon-protocol": "protocol"}
PROGRAM, KERNEL = "/bin/cloud-hypervisor", f"{nested.PLACE}/kernel"
SERIAL, LOG = f"{nested.PLACE}/serial", f"{nested.PLACE}/vmm.log"
FILL, USED = 96, 64  # MB
BIT = 1 << 6
REFUSED = "virtio_balloon.device_init_reported=0"
# The bits of the first balloon; sysfs has the lowest first.
FEATURES = "grep -l 0x0005 /sys/bus/virtio/devices/*/device | sed 's/device$/features/' | xargs cat"
# The host reads the resident size of the VMM after each "mark".
JOB = (
    f"{LATE}; echo features $({FEATURES}); fillfree --size {FILL} > /dev/null; echo mark full; "
    f"sleep 5; {REPORT}; echo mark reported; sleep 5; "
    f"alloc_once --size {USED} --verify --mode touch_all; "
    "grep pgzeroed_bad /proc/vmstat; echo tainted $(cat /proc/sys/kernel/tainted); echo mark end"
)


def revision() -> str:
    """The commit that the mails are for."""
    text = (MAILS / "README.md").read_text(encoding="utf-8")
    found = re.search(r"\b[0-9a-f]{40}\b", text)
    assert found, "README.md of the mails names no commit"
    return found[0]


def build(source: Path, folder: Path) -> Path:
    """Apply the mails to a clone of ``source``, and build it with the crates of this project."""
    tree, why, fix = folder / "tree", "the mails of vmm/ do not work", f"read {MAILS / 'README.md'}"
    output(["git", "clone", "--quiet", "--shared", source, tree], why, fix)
    output(["git", "-C", tree, "checkout", "--quiet", revision()], why, fix)
    identity = ["-c", "user.name=kz", "-c", "user.email=kz@localhost"]
    mails = sorted(MAILS.glob("*.patch"))
    output(["git", "-C", tree, *identity, "am", "--quiet", *mails], why, fix)
    words: list[str | Path] = ["cargo", "build", "--manifest-path", tree / "Cargo.toml"]
    for crate, place in CRATES.items():
        path = REPO / "vhost-user-balloon" / place
        words += ["--config", f'patch.crates-io.{crate}.path="{path}"']
    output([*words, "--bin", "cloud-hypervisor", "--target-dir", folder / "target"], why, fix)
    return folder / "target" / "debug" / "cloud-hypervisor"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (named := os.environ.get(SOURCE)):
        pytest.skip(f"{SOURCE} names no git repository of cloud-hypervisor, and no program")
    place = Path(named).absolute()
    return build(place, tmp_path_factory.mktemp("cloud-hypervisor")) if place.is_dir() else place


@pytest.fixture
def host(
    program: Path, image: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Side]:
    """Debian's kernel with KVM, where the program and two initial RAM file systems are."""
    monkeypatch.setattr(stock, "MODULES", (*stock.MODULES, "kvm_amd"))
    kernel = image("knownzero").with_name("vmlinux")
    initramfs.write(tmp_path / "job", ["sh", "-c", JOB], "none", [], [])
    initramfs.write(tmp_path / "probe", ["conform"], "none", [], [])
    add = [(program, PROGRAM), (kernel, KERNEL)]
    add += [(tmp_path / name, f"{nested.PLACE}/{name}") for name in ("job", "probe")]
    add += [(library, str(library)) for library in nested.libraries(program)]
    outer = BootSpec(
        "stock",
        memory="1536M",
        accel="tcg",
        extra_qemu=["-cpu", nested.CPU],
        command=["sh", "-c", LOOP],
        timeout=2300,
        add=add,
    )
    with running(outer) as guest:
        side = Side("outer", guest)
        side.sh("[ -c /dev/kvm ]")
        yield side


def start(host: Side, initrd: str, memory: str, append: str = "") -> None:
    """Start the guest; $vmm is cloud-hypervisor, with its seccomp filters."""
    words = [PROGRAM, "--kernel", KERNEL, "--initramfs", f"{nested.PLACE}/{initrd}"]
    line = f"{argv.APPEND} {argv.APPEND_TCG} {nested.TICK} {CHECK} {append}".strip()
    words += ["--cmdline", line, "--cpus", "boot=1", "--memory", memory]
    words += ["--balloon", "size=0,free_page_reporting=on"]
    words += ["--serial", f"file={SERIAL}", "--console", "off", "-v", "--log-file", LOG]
    host.sh(f": > {SERIAL}; {shlex.join(words)} > {LOG}.out 2>&1 & vmm=$!")


def wait(host: Side, text: str, seconds: int) -> None:
    """Wait until the guest prints a line that begins so; its VMM must not end before."""
    host.sh(
        f"for i in $(seq {seconds}); do grep -q '^{text}' {SERIAL} && break; "
        f"[ -d /proc/$vmm ] || break; sleep 1; done; "
        f"grep -q '^{text}' {SERIAL} || {{ tail -n 20 {SERIAL} {LOG} {LOG}.out; false; }}"
    )


def resident(host: Side) -> int:
    return host.number("awk '/^VmRSS/ { print $2 }' /proc/$vmm/status") * 1024


def use(host: Side, memory: str, append: str = "") -> tuple[bool, int]:
    """Fill memory, report it, and use it again: has the guest bit 6, and what it did not zero."""
    start(host, "job", memory, append)
    wait(host, "mark full", 900)
    full = resident(host)
    wait(host, "mark reported", 300)
    reported = resident(host)
    expect_at_least(full - reported, 0.8 * FILL * MIB)
    wait(host, "mark end", 300)
    lines = [line.strip() for line in host.sh(f"cat {SERIAL}; wait $vmm")]
    found = {name: value for name, _, value in (line.partition(" ") for line in lines)}
    assert found["pgzeroed_bad"] == found["tainted"] == "0", lines
    told = next(json.loads(line) for line in lines if line.startswith("{"))
    print(f"{memory} {append}: resident {full} to {reported} bytes", told)
    assert told["bytes"] == USED * MIB
    bits = sum(1 << at for at, bit in enumerate(found["features"].strip()) if bit == "1")
    return bool(bits & BIT), told["vmstat"]["pgzeroed_skip"] * 4096


@pytest.mark.boots
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("backing", ["", ",shared=on"], ids=["anonymous", "memfd"])
def test_reported_memory_is_not_zeroed_again(host: Side, backing: str) -> None:
    """Only with bit 6. Memory that is a memfd needs more system calls of both threads."""
    memory = f"size=320M{backing}"
    has_bit, skipped = use(host, memory)
    assert has_bit
    expect_at_least(skipped, 0.8 * USED * MIB)
    has_bit, skipped = use(host, memory, REFUSED)
    assert not has_bit
    expect_at_most(skipped, 0.05 * USED * MIB)


@pytest.mark.boots
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_the_probe_finds_no_fault(host: Side) -> None:
    """The checks of `kz conform`, which boots no guest inside another one."""
    start(host, "probe", "size=512M", conform.APPEND["x86_64"].removeprefix(argv.APPEND))
    wait(host, "conform: end", 1200)
    lines = host.sh(f"cat {SERIAL}")
    assert [line for line in lines if "| FAIL |" in line] == []
    assert len([line for line in lines if "| PASS |" in line]) >= 12, lines


def test_the_mails_are_in_order() -> None:
    """Each is a mail of this project, and no file of it names the machine where it was made."""
    mails = sorted(MAILS.glob("*.patch"))
    assert mails
    assert [int(mail.name[:4]) for mail in mails] == [*range(1, len(mails) + 1)]
    for mail in mails:
        text = mail.read_text(encoding="utf-8")
        assert text.startswith(f"From {'0' * 40} "), mail.name
        assert "\nFrom: Knownzero " in text, mail.name
        assert "\n+++ b/Cargo.lock" not in text, mail.name
