# SPDX-License-Identifier: GPL-2.0
"""Our packages installed in a Debian that boots them.

Systemd, the balloon, a bench, and the daemon's units.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lab.boot import initramfs
from lab.boot.guest import BootResult, boot
from lab.build import linux as build
from lab.build import package
from lab.build import programs as guest
from lab.core.run import Argv, output
from lab.machine import stock
from tests.guest import debian
from tests.guest.guests import (
    BALLOON,
    DIRTY,
    REPORT,
    counters,
    expect_at_least,
    expect_at_most,
    fine,
    objects,
)
from tests.operators.packages import unpacked_qemu

pytestmark = [
    pytest.mark.boots,
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.packages,
    pytest.mark.timeout(5 * 3600),
]

# A package of a kernel to install: its path, or cloud to have that one built, which takes more than
# an hour.
GIVEN = os.environ.get("KNOWNZERO_TEST_KERNEL_PACKAGE", "")
MEGABYTES = 128
PAGES = MEGABYTES << 8
# Another guest in the guest: User-Mode Linux is a front end that needs nothing but its one file. In
# it memory is made dirty, reported, and wanted again.
INNER = (
    f"exec >/dev/console 2>&1; fillfree --share 60 >/dev/null; {REPORT}; alloc_once --size 64 "
    "--pages nothp --verify; echo inner is done; while :; do sleep 1; done"
)
INNER_PAGES = 64 << 8


# What test_a_guest_has_network_file_systems_firewall_and_apparmor runs.
TOOLS_OF_A_GUEST = ("iproute2", "iputils-ping", "nftables", "xfsprogs", "btrfs-progs", "apparmor")


@dataclass(frozen=True)
class Installed:
    """A system, the QEMU of its package, and the names of what was installed in it."""

    system: debian.System
    qemu: Path
    names: list[str]
    folder: Path

    def run(self, script: str, *more: Path, extra_qemu: Sequence[str] = ()) -> BootResult:
        """Run a shell script as a service; every failing command in it ends it.

        ``more``: files in its PATH.
        """
        programs = guest.build_programs()
        spec = debian.boot_spec(
            self.system,
            ["sh", "-ec", script],
            self.folder,
            qemu=self.qemu,
            devices=[BALLOON],
            memory="2G",
            extra_qemu=[*extra_qemu],
            add=[
                *((programs[name], name) for name in ("alloc_once", "fillfree", "zeropages")),
                *((file, file.name) for file in more),
            ],
        )
        result = boot(spec)
        print(result.stdout, result.stderr, sep="\n")
        fine(result)
        return result


# Debian's own, on which the daemon has to run as well: a host's kernel is none of ours.
STOCK = "stock"
CLOUD = pytest.param(
    package.CLOUD,
    marks=pytest.mark.skipif(
        not GIVEN,
        reason="takes more than an hour: set KNOWNZERO_TEST_KERNEL_PACKAGE=cloud, or to a .deb",
    ),
)


@pytest.fixture(scope="module")
def installed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    """All our packages in a Debian; the parameter says with which kernel."""
    folder = tmp_path_factory.mktemp("debian")
    usr = unpacked_qemu(folder)
    packages = [
        *(folder / "out").glob("*.deb"),
        package.package_daemon(folder, "dev"),
        debian.zeropages(folder),
    ]
    more = []
    if request.param == STOCK:
        more.append(stock.KERNEL_PACKAGE)
    elif request.param == package.CLOUD and GIVEN != package.CLOUD:
        packages.append(Path(GIVEN).absolute())
    else:
        packages += package.package_kernel(folder, request.param)[:1]
    if request.param == package.CLOUD:
        more += TOOLS_OF_A_GUEST
    system = debian.install(packages, folder, more)
    names = [debian.field(file, "Package") for file in packages]
    yield Installed(system, usr / "bin/qemu-system-x86_64-knownzero", names, folder)
    system.disk.unlink()


def lines(result: BootResult, word: str) -> list[str]:
    """What follows a word at the start of lines of the guest's stdout."""
    return [
        line.removeprefix(word).strip()
        for line in result.stdout.splitlines()
        if line.startswith(word)
    ]


@pytest.mark.parametrize("installed", [package.SERVER, CLOUD], indirect=True)
def test_systemd_boots_and_memory_is_not_zeroed_twice(installed: Installed) -> None:
    result = installed.run(
        f"""
        echo "kernel $(uname -r)"
        echo "root $(findmnt -no SOURCE,FSTYPE /)"
        echo "state $(systemctl is-system-running --wait)"
        systemctl --failed --plain --no-legend --no-pager | sed 's/^/failed /'
        systemctl is-active multi-user.target systemd-udevd dbus
        dpkg-query -W -f '${{db:Status-Abbrev}} ${{Package}}\\n' {" ".join(installed.names)} |
            sed 's/^/package /'
        qemu-system-x86_64-knownzero --version | sed -n 's/^QEMU/QEMU/p'
        echo "service $(sed 's/.*://' /proc/self/cgroup)"
        echo "features $(cat /sys/bus/virtio/drivers/virtio_balloon/virtio*/features)"
        lsmod | sed -n 's/^\\(virtio_balloon\\|virtio_blk\\|ext4\\) .*/module \\1/p'
        {DIRTY}; {REPORT}
        alloc_once --size {MEGABYTES} --pages thp --verify --mode touch_all
        zeropages --once
        systemctl start zeropages-check && echo "check passed"
        journalctl --unit zeropages-check --output cat --no-pager | sed 's/^/check /'
        journalctl --boot --dmesg --priority warning --output cat --no-pager | sed 's/^/warning /'
        grep pgzeroed_ /proc/vmstat
        """
    )
    assert lines(result, "kernel") == [installed.system.release]
    (root,) = lines(result, "root")
    assert root.startswith("/dev/vd") and root.endswith("ext4")
    assert (lines(result, "state"), lines(result, "failed")) == (["running"], [])
    assert result.stdout.splitlines().count("active") == 3
    assert sorted(lines(result, "package")) == [f"ii  {name}" for name in sorted(installed.names)]
    assert len(lines(result, "QEMU")) == 1
    checked = lines(result, "check")
    assert checked[0] == "passed" and any(
        line.startswith("Yes: the kernel skipped") for line in checked
    ), checked
    assert lines(result, "service") == ["/system.slice/kz-job.service"]
    # The balloon is a module that udev loads; so is what the initramfs needs to find the disk.
    assert {"virtio_balloon", "virtio_blk"} <= set(lines(result, "module"))
    (features,) = lines(result, "features")
    assert features[5] == "1" and features[6] == "1", features
    found = counters(result)
    assert found["pgzeroed_bad"] == 0
    told = objects(result)[0]["vmstat"]
    expect_at_least(found["pgzeroed_set_reported"], PAGES)
    expect_at_least(told["pgzeroed_skip"], 0.99 * PAGES)
    # What else runs in such a system wants pages too.
    expect_at_most(told["pgzeroed_cleared"], 0.05 * PAGES)
    print("\n".join(lines(result, "warning")))


@pytest.mark.parametrize("installed", [CLOUD], indirect=True)
def test_a_guest_has_network_file_systems_firewall_and_apparmor(installed: Installed) -> None:
    """The default configuration of ``kz package kernel``, with user networking of QEMU."""
    result = installed.run(
        """
        systemctl is-system-running --wait >/dev/null
        # A pair of interfaces, IPv4 and IPv6, and a rule that counts what passes.
        ip netns add other
        ip link add here type veth peer name there netns other
        ip addr add 192.0.2.1/24 dev here; ip addr add 2001:db8::1/64 dev here nodad
        ip link set here up
        ip -n other addr add 192.0.2.2/24 dev there
        ip -n other addr add 2001:db8::2/64 dev there nodad
        ip -n other link set there up
        nft -f - <<'RULES'
        table inet kz {
            chain in { type filter hook input priority 0; iifname "here" counter accept; }
            chain out { type nat hook postrouting priority 100; masquerade; }
        }
        RULES
        ping -c 1 -w 30 192.0.2.2 >/dev/null && echo "ping 4"
        ping -c 1 -w 30 2001:db8::2 >/dev/null && echo "ping 6"
        echo "packets $(nft list table inet kz | sed -n 's/.*packets \\([0-9]*\\).*/\\1/p')"
        echo "interface $(ls /sys/bus/virtio/drivers/virtio_net/virtio*/net)"
        for kind in xfs btrfs; do
            truncate -s 400M /var/tmp/disk
            mkfs.$kind -q /var/tmp/disk
            mkdir -p /mnt/$kind
            mount -o loop /var/tmp/disk /mnt/$kind
            echo text >/mnt/$kind/file
            umount /mnt/$kind; mount -o loop /var/tmp/disk /mnt/$kind
            echo "mounted $(findmnt -no FSTYPE /mnt/$kind) $(cat /mnt/$kind/file)"
            umount /mnt/$kind
            rm /var/tmp/disk
        done
        echo "apparmor $(cat /sys/module/apparmor/parameters/enabled)"
        echo 'profile kz-test /usr/bin/head { deny /etc/shadow r, file, }' | apparmor_parser -a
        head -c 1 /etc/shadow 2>/dev/null || echo "denied"
        """.replace("\n        ", "\n"),
        extra_qemu=["-nic", "user,model=virtio-net-pci"],
    )
    assert lines(result, "ping") == ["4", "6"]
    assert int(lines(result, "packets")[0]) >= 2
    assert lines(result, "interface") != [""]
    assert lines(result, "mounted") == ["xfs text", "btrfs text"]
    assert lines(result, "apparmor") == ["Y"]
    assert lines(result, "denied") == [""]


@pytest.mark.parametrize("installed", [package.SERVER, CLOUD, STOCK], indirect=True)
def test_the_daemons_units_work_under_systemd(installed: Installed) -> None:
    unit = "vhost-user-balloon@guest"
    inner = build.build_linux("knownzero", "um")
    initramfs.write(installed.folder / "inner.cpio", ["sh", "-c", INNER], "ssl", [], [], "um")
    ask = "vhost-user-balloon status --json --control /run/vhost-user-balloon-guest/control"
    journal = f"journalctl --boot --unit {unit}.service --unit {unit}.socket --no-pager"
    result = installed.run(
        f"""
        trap '{journal} >&2' EXIT
        systemctl is-system-running --wait >/dev/null
        groupadd --system balloon-guest
        mkdir -p /run/systemd/system/{unit}.service.d
        printf '[Service]\\nEnvironment=BALLOON_OPTIONS=--user-mode-linux\\n' \\
            >/run/systemd/system/{unit}.service.d/uml.conf
        systemctl daemon-reload
        # A front end that connects starts the service.
        systemctl start {unit}.socket
        echo "before $(systemctl is-active {unit}.service || true)"
        echo "socket $(stat -c '%a %G' /run/vhost-user-balloon/guest.sock)"
        # A file cannot be waited for: its console is a pipe.
        mkfifo /run/fifo
        cat /run/fifo >/run/inner &
        {inner.name} mem=512M initrd=/{debian.JOB}/bin/inner.cpio con=null ssl=null \
            con0=null,fd:1 console=tty0 \
            virtio_uml.device=/run/vhost-user-balloon/guest.sock:5 \
            </dev/null >/run/fifo 2>&1 &
        inner=$!
        for second in $(seq 900); do
            ! grep -q 'inner is done' /run/inner && kill -0 $inner && sleep 1 || break
        done
        sed -n '/^{{/p' /run/inner
        tail -n 20 /run/inner >&2
        echo "active $(systemctl is-active {unit}.service)"
        pid=$(systemctl show --property MainPID --value {unit})
        sed -n 's/^\\(Seccomp\\|Seccomp_filters\\|NoNewPrivs\\|CapEff\\):\\s*/confined \\1 /p' \
            /proc/$pid/status
        echo "user $(stat -c %u /proc/$pid)"
        echo "status $({ask})"
        # Not because the front end hangs up, which would end it as well.
        systemctl stop {unit}.service
        kill -KILL $inner
        # And by hand, without a front end.
        systemctl start {unit}
        echo "again $(systemctl is-active {unit}.service)"
        systemctl stop {unit}.service {unit}.socket
        echo "after $(systemctl is-active {unit}.service {unit}.socket | xargs)"
        [ ! -e /run/vhost-user-balloon/guest.sock ]
        systemctl --failed --plain --no-legend --no-pager | sed 's/^/failed /'
        {journal} --output cat | sed 's/^/journal /'
        {journal} --output cat --priority warning | sed 's/^/complaint /'
        """,
        inner,
        installed.folder / "inner.cpio",
    )
    assert lines(result, "before") == ["inactive"]
    assert lines(result, "socket") == ["660 balloon-guest"]
    assert lines(result, "active") == ["active"]
    confined = dict(line.split() for line in lines(result, "confined"))
    assert confined["Seccomp"] == "2"
    # The lines of the unit, and its own.
    assert int(confined["Seccomp_filters"]) >= 2
    assert confined["NoNewPrivs"] == "1"
    assert int(confined["CapEff"], 16) == 0
    assert int(lines(result, "user")[0]) >= 61184  # of DynamicUser=
    # Confined like that it does what it is there for.
    told = objects(result)[0]["vmstat"]
    assert told["pgzeroed_bad"] == 0
    expect_at_least(told["pgzeroed_skip"], 0.7 * INNER_PAGES)
    status = json.loads(lines(result, "status")[0])
    assert status["working"] is True
    assert "device-init-reported" in status["features"]
    expect_at_least(status["proven_zero"], INNER_PAGES << 12)
    # Landlock of Debian 12 can do a part only.
    assert status["sandbox"].startswith("seccomp, landlock")
    assert lines(result, "again") == ["active"]
    assert lines(result, "after") == ["inactive inactive"]
    assert lines(result, "failed") == []
    assert lines(result, "complaint") == []
    said = lines(result, "journal")
    # What has ended is forgotten, and what is left of it is in the journal.
    assert said.count(f"{unit}.service: Deactivated successfully.") == 2, said
    own = [json.loads(line) for line in said if line.startswith("{")]
    assert [line["message"] for line in own].count("ready") == 2, own
    assert [line for line in own if line["level"] not in ("INFO", "DEBUG")] == []


@pytest.mark.parametrize("installed", [package.SERVER, CLOUD], indirect=True)
def test_removal_leaves_no_file(installed: Installed) -> None:
    """Also while the daemon waits for a front end, and with the initramfs that was made for the
    kernel.
    """
    names = " ".join(installed.names)
    socket = "vhost-user-balloon@guest.socket"
    result = installed.run(
        f"""
        systemctl is-system-running --wait >/dev/null
        groupadd --system balloon-guest
        systemctl start {socket}
        release=$(uname -r)
        dpkg -L {names} | grep . | sort -u >/run/theirs
        echo "/boot/initrd.img-$release" >>/run/theirs
        # What stays in folders that others share is nobody's trace.
        while read -r file; do [ -d "$file" ] && [ ! -L "$file" ] || echo "$file"
        done </run/theirs >/run/files
        while read -r file; do [ -e "$file" ] || [ -L "$file" ] || echo "missing $file"
        done </run/files
        echo "files $(wc -l </run/files)"
        DEBIAN_FRONTEND=noninteractive apt-get --yes --purge --option Dpkg::Use-Pty=0 \
            remove {names} >&2
        while read -r file; do [ ! -e "$file" ] && [ ! -L "$file" ] || echo "left $file"
        done </run/files
        [ ! -e /lib/modules/$release ] || find /lib/modules/$release | sed 's/^/left /'
        dpkg-query --show --showformat '${{Package}}\\n' {names} 2>/dev/null | sed 's/^/known /'
        echo "socket $(systemctl is-active {socket} || true)"
        systemctl daemon-reload
        systemctl --failed --plain --no-legend --no-pager | sed 's/^/failed /'
        """
    )
    assert lines(result, "missing") == []
    assert int(lines(result, "files")[0]) > 3 * len(installed.names)
    assert lines(result, "left") == []
    assert lines(result, "known") == []
    assert lines(result, "socket") == ["inactive"]
    assert lines(result, "failed") == []


@pytest.mark.parametrize("config", [package.SERVER, CLOUD])
def test_an_upgrade_from_debians_kernel_and_back(config: str, tmp_path: Path) -> None:
    """Debian's kernel runs and ours is installed. Ours boots on both QEMUs and removes itself.

    Debian's boots again.
    """
    ours = (
        Path(GIVEN).absolute()
        if config == package.CLOUD != GIVEN
        else package.package_kernel(tmp_path, config)[0]
    )
    name, files = debian.field(ours, "Package"), tmp_path / "files"
    files.mkdir()
    start = debian.install(
        [package.package_daemon(tmp_path, "dev")], tmp_path, [stock.KERNEL_PACKAGE]
    )

    def run(system: debian.System, script: str, qemu: str | None = None) -> BootResult:
        programs = guest.build_programs()
        add = [(ours, ours.name), *((programs[one], one) for one in ("alloc_once", "fillfree"))]
        # The kernel that a boot loader starts by default.
        newest = "linux-version list | linux-version sort --reverse | sed 's/^/newest /;q'"
        told = (
            f"systemctl is-system-running --wait >/dev/null; echo kernel $(uname -r); {script}; "
            f"{newest}"
        )
        spec = debian.boot_spec(
            system, ["sh", "-ec", told], tmp_path, devices=[BALLOON], qemu=qemu, add=add
        )
        kept = [word.replace("snapshot=on", "snapshot=off") for word in spec.extra_qemu]
        result = boot(replace(spec, extra_qemu=kept))
        print(result.stdout, result.stderr, sep="\n")
        fine(result)
        assert lines(result, "kernel") == [system.release]
        return result

    first = run(
        start, f"DEBIAN_FRONTEND=noninteractive dpkg --install /{debian.JOB}/bin/{ours.name} >&2"
    )
    (release,) = lines(first, "newest")
    assert release != start.release and release in name
    upgraded = debian.System(
        start.disk, files / f"vmlinuz-{release}", files / f"initrd.img-{release}"
    )
    for file in (upgraded.kernel, upgraded.initrd):
        argv: Argv = ["debugfs", "-R", f"dump /boot/{file.name} {file}", start.disk]
        output(argv, f"cannot read {file.name} from the disk", "run `kz doctor`")
    job = f"{DIRTY}; {REPORT}; alloc_once --size {MEGABYTES} --pages thp --verify --mode touch_all"
    with_stock = run(upgraded, job, "stock")
    assert objects(with_stock)[0]["vmstat"]["pgzeroed_skip"] == 0  # its balloon has no bit 6
    back = run(
        upgraded, f"{job}; DEBIAN_FRONTEND=noninteractive apt-get --yes --purge remove {name} >&2"
    )
    expect_at_least(objects(back)[0]["vmstat"]["pgzeroed_skip"], 0.99 * PAGES)
    assert lines(back, "newest") == [start.release]
    assert (
        lines(run(start, "systemctl --failed --plain --no-legend | sed 's/^/failed /'"), "failed")
        == []
    )
