# SPDX-License-Identifier: GPL-2.0
"""Debian's libvirt runs guests as the how-to pages define them, through all that moves their
memory.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from lab.build import daemon
from lab.core.errors import LabError, TestFailure
from lab.core.run import Argv
from lab.machine import apt, fetch, stock
from tests.documents import SANDBOXES, commands_under
from tests.guest.guests import DELAY, expect_at_least
from tests.operators.hosts import (
    Host,
    documented,
    empty_qcow2,
    eventually,
    for_a_test,
    hosts,
    need_libvirt,
)
from tests.operators.packages import unpacked_qemu

pytestmark = [pytest.mark.boots, pytest.mark.slow]

BITS = "cat /sys/bus/virtio/drivers/virtio_balloon/virtio*/features"
VIRTIO_BITS = {"reporting": 5, "bit 6": 6, "bit 7": 7}
FLUSH = "echo 0 > /sys/kernel/mm/page_reporting/flush"
DIRTY = "fillfree --share 60 > /dev/null"
REPORT = f"{DIRTY}; {FLUSH}"
JOB = "alloc_once --size 64 --verify > /dev/null"
COUNTERS = "grep pgzeroed_ /proc/vmstat"
BALLOON = '{"execute": "query-balloon"}'
REPORT_NOW = '{"execute": "balloon-report-now", "arguments": {"timeout": 10000}}'
MIB = 1 << 20


def bits(host: Host, name: str) -> set[str]:
    """The balloon's features that the guest's driver uses."""
    told = host.run_in(name, BITS)
    shown = re.search(r"^[01]{64,}$", told, re.MULTILINE)
    assert shown, told
    return {feature for feature, bit in VIRTIO_BITS.items() if shown[0][bit] == "1"}


def counters(host: Host, name: str) -> dict[str, int]:
    pairs = re.findall(r"^pgzeroed_(\w+) (\d+)$", host.run_in(name, COUNTERS), re.MULTILINE)
    found = {counter: int(value) for counter, value in pairs}
    assert found["bad"] == 0
    return found


def saves(host: Host, name: str) -> None:
    """The guest reports its memory, uses some, and does not zero that again."""
    before = counters(host, name)
    host.run_in(name, f"{REPORT}; {JOB}")
    after = counters(host, name)
    # DIRTY is 60 % of about 400 MiB, and free blocks under 2 MiB are never reported.
    expect_at_least(after["set_reported"] - before["set_reported"], 150 * MIB >> 12)
    assert after["skip"] - before["skip"] >= 0.9 * (64 * MIB >> 12)


@pytest.mark.nightly
@pytest.mark.parametrize("base", ["10.0", "10.2"])
def test_the_packaged_qemu(tmp_path: Path, base: str, request: pytest.FixtureRequest) -> None:
    """Define, start, statistics, target, save, restore, snapshot, migrate, detach, undefine."""
    if base == "10.2":
        request.getfixturevalue("newer_qemu")
    domain = for_a_test(documented("operate.md", "qemu-system-x86_64-knownzero"))
    with hosts(("kz-one", "kz-two"), unpacked_qemu(tmp_path)) as ((one, two), images):
        empty_qcow2(images / "vm1.qcow2")
        one.define(domain)
        one.virsh("start", "vm1")
        assert bits(one, "vm1") == {"reporting", "bit 6", "bit 7"}
        # Only a flush reports from here on; a pass that waits already comes within two seconds.
        one.run_in("vm1", f"echo 3600000 > {DELAY}; {FLUSH}; sleep 3; {DIRTY}")
        full = one.statistics("vm1")["rss"]
        one.run_in("vm1", FLUSH)
        assert one.statistics("vm1")["rss"] < full - (150 << 10)
        saves(one, "vm1")
        # The same without a program in the guest.
        one.run_in("vm1", DIRTY)
        full = one.statistics("vm1")["rss"]
        assert '"id":1' in one.virsh("qemu-monitor-command", "vm1", REPORT_NOW)
        assert eventually(
            lambda: '"status":"completed"' in one.virsh("qemu-monitor-command", "vm1", BALLOON)
        )
        assert one.statistics("vm1")["rss"] < full - (150 << 10)
        assert one.run_in("vm1", "zeropages --once").startswith("Yes: ")

        one.virsh("setmem", "vm1", "384M")
        assert one.actual("vm1", 384 << 10)
        assert eventually(lambda: one.statistics("vm1")["unused"] < 384 << 10)
        one.virsh("setmem", "vm1", "512M")
        assert one.actual("vm1", 512 << 10)
        assert counters(one, "vm1")["set_freed"] >= 64 * MIB >> 12
        assert '"inflated":{"zero":134217728' in one.virsh("qemu-monitor-command", "vm1", BALLOON)

        one.virsh("managedsave", "vm1")
        one.virsh("start", "vm1")
        saves(one, "vm1")

        one.virsh("snapshot-create-as", "vm1", "now")
        one.run_in("vm1", f"{DIRTY}; touch /tmp/later")
        one.virsh("snapshot-revert", "vm1", "now")
        one.run_in("vm1", "test ! -e /tmp/later")
        saves(one, "vm1")
        one.virsh("snapshot-delete", "vm1", "now")

        # Unsafe for libvirt, which cannot see that the folder of the disk is the same one.
        one.virsh(
            "migrate", "--live", "--unsafe", "vm1", two.uri, "--migrateuri", "tcp://127.0.0.1"
        )
        assert one.virsh("list", "--name").split() == []
        assert bits(two, "vm1") == {"reporting", "bit 6", "bit 7"}
        saves(two, "vm1")

        with pytest.raises(TestFailure, match="memballoon"):
            two.virsh("detach-device-alias", "vm1", "balloon0")
        two.virsh("destroy", "vm1")
        one.virsh("detach-disk", "vm1", "vda", "--config")
        assert "vda" not in one.virsh("domblklist", "vm1", "--inactive")
        one.virsh("undefine", "vm1", "--snapshots-metadata")
        assert one.virsh("list", "--all", "--name").split() == []


def test_a_sandbox_is_parked_and_restored(tmp_path: Path) -> None:
    """The commands of sandboxes.md, in their order."""
    start, *park, suspend, save, restore, resume = commands_under(SANDBOXES, "Under libvirt")
    domain = for_a_test(documented("operate.md", "qemu-system-x86_64-knownzero"))
    with hosts(("kz-one",), unpacked_qemu(tmp_path)) as ((host,), images):
        empty_qcow2(images / "vm1.qcow2")
        host.define(domain)
        host.follow(start)
        host.run_in("vm1", f"echo 3600000 > {DELAY}; {FLUSH}; sleep 3; {DIRTY}")
        full = host.statistics("vm1")["rss"]
        for line in park:
            host.follow(line)
        assert host.statistics("vm1")["rss"] < full - (150 << 10)
        host.follow(suspend)
        host.follow(save)
        assert host.virsh("list", "--name").split() == []
        size = (images / "vm1.saved").stat().st_blocks * 512
        print(f"the saved file has {size // MIB} MiB, QEMU had {full >> 10}")
        assert 0 < size < (full << 10) - 150 * MIB
        host.follow(restore)
        assert host.virsh("domstate", "vm1").strip() == "paused"
        host.follow(resume)
        before = counters(host, "vm1")
        host.run_in("vm1", JOB)
        # Free blocks under 2 MiB are never reported.
        assert counters(host, "vm1")["skip"] - before["skip"] >= 0.8 * (64 * MIB >> 12)


def test_debians_qemu_with_the_daemon(tmp_path: Path) -> None:
    """The same for the daemon, which has its own command for the balloon's size and does not
    migrate.
    """
    domain = for_a_test(documented("operate.md", "qemu-system-x86_64-knownzero"))
    for_the_daemon(domain, documented("vhost-user-balloon.md", "vhost-user-test-device-pci"))
    emulator = domain.find("devices/emulator")
    assert emulator is not None
    emulator.text = "/usr/bin/qemu-system-x86_64"
    with hosts(("kz-one",), *debians_qemu(tmp_path)) as ((host,), images):
        empty_qcow2(images / "vm1.qcow2")
        place = host.folder / "run" / "vhost-user-balloon"
        place.mkdir()
        control = place / "vm1.control"
        argv: Argv = [daemon.build(), "--socket-path", place / "vm1.sock", "--control", control]
        with subprocess.Popen(argv) as device:
            try:
                assert eventually((place / "vm1.sock").exists)
                (place / "vm1.sock").chmod(0o666)
                host.define(domain)
                host.virsh("start", "vm1")
                assert bits(host, "vm1") == {"reporting", "bit 6"}
                saves(host, "vm1")
                assert daemon.ask(control, command="status")["proven_zero"] >= 200 * MIB
                daemon.ask(control, command="target", bytes=128 * MIB)
                assert eventually(
                    lambda: daemon.ask(control, command="status")["actual"] == 128 * MIB
                )
                daemon.ask(control, command="target", bytes=0)
                assert eventually(lambda: daemon.ask(control, command="status")["actual"] == 0)
                saves(host, "vm1")
                with pytest.raises(TestFailure, match="non-migratable"):
                    host.virsh("managedsave", "vm1")
                assert bits(host, "vm1") == {"reporting", "bit 6"}
                host.virsh("destroy", "vm1")
                host.virsh("undefine", "vm1")
            finally:
                device.terminate()


def with_bits(domain: ElementTree.Element, value: str) -> ElementTree.Element:
    """The domain with properties for bits 6 and 16 in place of its override for bit 7."""
    (front_end,) = [element for element in domain.iter() if element.tag.endswith("}frontend")]
    tag = front_end[0].tag
    front_end.clear()
    for name in ("x-device-init-reported", "x-report-now"):
        ElementTree.SubElement(front_end, tag, name=name, type="string", value=value)
    return domain


@pytest.mark.nightly
def test_migration_to_and_from_debians_qemu(tmp_path: Path) -> None:
    """Of the same version. A guest moves there only without the bits.

    The refusal leaves it running.
    """
    ours = with_bits(for_a_test(documented("operate.md", "qemu-system-x86_64-knownzero")), "off")
    emulator = ours.find("devices/emulator")
    assert emulator is not None
    places = [unpacked_qemu(tmp_path), *debians_qemu(tmp_path / "debian", fetch.base("qemu").suite)]
    with hosts(("kz-one", "kz-two"), *places) as ((one, two), images):
        empty_qcow2(images / "vm1.qcow2")

        def move(source: Host, target: Host, program: str) -> None:
            """Migrate live, to another emulator."""
            domain = ElementTree.fromstring(source.virsh("dumpxml", "--migratable", "vm1"))
            there = domain.find("devices/emulator")
            assert there is not None
            there.text = f"/usr/bin/{program}"
            for override in [part for part in domain if part.tag.endswith("}override")]:
                domain.remove(override)
            (images / "there.xml").write_bytes(ElementTree.tostring(domain))
            words = ["--live", "--unsafe", "--undefinesource", "--xml", str(images / "there.xml")]
            source.virsh("migrate", "vm1", target.uri, "--migrateuri", "tcp://127.0.0.1", *words)

        one.define(ours)
        one.virsh("start", "vm1")
        assert bits(one, "vm1") == {"reporting"}
        move(one, two, "qemu-system-x86_64")
        assert bits(two, "vm1") == {"reporting"}
        move(two, one, "qemu-system-x86_64-knownzero")
        assert bits(one, "vm1") == {"reporting"}
        one.virsh("destroy", "vm1")

        one.define(with_bits(ours, "on"))
        one.virsh("start", "vm1")
        assert bits(one, "vm1") == {"reporting", "bit 6"}
        with pytest.raises(TestFailure, match=r"migrat|[Ff]eature"):
            move(one, two, "qemu-system-x86_64")
        saves(one, "vm1")
        one.virsh("destroy", "vm1")


def for_the_daemon(domain: ElementTree.Element, page: ElementTree.Element) -> None:
    """Change a domain as the daemon's page says: its parts replace those of the same name."""
    for part in page:
        if part.tag == "devices":
            devices = domain.find("devices")
            assert devices is not None
            for device in part:
                for old in devices.findall(device.tag):
                    devices.remove(old)
                devices.append(device)
            continue
        for old in domain.findall(part.tag):
            domain.remove(old)
        domain.append(part)
    for override in [part for part in domain if part.tag.endswith("}override")]:
        domain.remove(override)


def debians_qemu(folder: Path, suite: str = "") -> list[str | Path]:
    """Debian's QEMU for a host.

    The command in /usr/bin, its files and libraries in a folder of their own.
    """
    script, place = stock.qemu(suite=suite), Path("/usr/lib/qemu-stock")
    (folder / "usr" / "bin").mkdir(parents=True)
    (folder / "usr" / "lib" / place.name).mkdir(parents=True)
    program = folder / "usr" / "bin" / script.name
    program.write_text(script.read_text(encoding="utf-8").replace(str(script.parent), str(place)))
    program.chmod(0o755)
    return [folder / "usr", f"{script.parent}={place}"]


def test_libvirt_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without it that may install nothing, the error has the command.

    Nothing is skipped.
    """
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(apt, "may_install", lambda: None)
    with pytest.raises(LabError) as raised:
        need_libvirt()
    assert "libvirt-daemon" in raised.value.why
    assert raised.value.fix.startswith("run: sudo apt-get install")
