# SPDX-License-Identifier: GPL-2.0
"""Hosts with a libvirt of their own.

Debian's libvirtd in namespaces, so that the machine's is left alone.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import select
import shutil
import struct
import subprocess
import tempfile
import time
import tty
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from lab.boot import argv, initramfs, resolve
from lab.core.errors import LabError, TestFailure
from lab.core.paths import REPO
from lab.machine import apt
from tests.devices import PATIENCE
from tests.documents import blocks
from tests.guest.guests import CHECK, CHECKED

PRINTK = "/proc/sys/kernel/printk"
PACKAGES = {"libvirtd": "libvirt-daemon", "virsh": "libvirt-clients", "unshare": "util-linux"}
DRIVER = Path("/usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so")
USER = "libvirt-qemu"
IMAGES = Path("/var/lib/libvirt/images")
NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
ElementTree.register_namespace("qemu", NAMESPACE)

# Process 1 of a host: private folders, a package unpacked over /usr, and libvirtd. The shell also
# reaps the processes that QEMU leaves behind when libvirt asks for its features.
HOST = """
set -e
host=$1 images=$2 name=$3
shift 3
mount --make-rprivate /
mount -t proc proc /proc
hostname $name
for folder in etc/libvirt var/lib/libvirt var/log/libvirt var/cache/libvirt run; do
    mkdir -p $host/$folder /$folder
    mount --bind $host/$folder /$folder
done
mkdir -p /var/lib/libvirt/images
mount --bind $images /var/lib/libvirt/images
for file in passwd group hosts; do mount --bind $host/$file /etc/$file; done
cp $host/*.conf /etc/libvirt/
for folder in "$@"; do
    case $folder in
    *=*) mount --bind "${folder%%=*}" "${folder#*=}" ;;
    *) mount -t overlay overlay -o "lowerdir=$folder:/usr" /usr ;;
    esac
done
libvirtd --config /etc/libvirt/libvirtd.conf
exit $?
"""
QEMU_CONF = f"""security_driver = "none"
cgroup_controllers = []
namespaces = []
stdio_handler = "file"
user = "{USER}"
group = "{USER}"
"""


def need_root(what: str) -> None:
    if os.geteuid():
        raise LabError(
            what, "only root may change what is mounted in a namespace", "run the tests as root"
        )


def need_libvirt() -> None:
    """Install libvirt, or raise an error that has the command."""
    what = "cannot test under libvirt"
    lacking = [package for program, package in PACKAGES.items() if not shutil.which(program)]
    if not DRIVER.is_file():
        lacking.append("libvirt-daemon-driver-qemu")
    if lacking:
        apt.install(lacking, what)
    need_root(what)


def documented(page: str, start: str) -> ElementTree.Element:
    """The XML of a how-to page whose text, as it stands there, contains ``start``."""
    text = (REPO / "docs" / "how-to" / page).read_text(encoding="utf-8")
    found = ["\n".join(block.lines) for block in blocks(text) if block.kind == "xml"]
    (one,) = [xml for xml in found if start in xml]
    return ElementTree.fromstring(one)


class Host:
    """A machine with a libvirtd; ``images``: storage that hosts share.

    ``usr``: folders to put over /usr, and FOLDER=PLACE for those to bind to a folder there.
    """

    def __init__(self, name: str, images: Path, *usr: str | Path) -> None:
        self.name, self.images = name, images
        self.folder = Path(tempfile.mkdtemp(prefix="kz-", dir="/tmp"))
        self.socket = self.folder / "run" / "libvirt" / "libvirt-sock"
        self.uri = f"qemu+unix:///system?socket={self.socket}"
        users, groups = (
            Path(f"/etc/{name}").read_text(encoding="utf-8") for name in ("passwd", "group")
        )
        try:
            self.uid = pwd.getpwnam(USER).pw_uid
        except KeyError:
            self.uid = 64055  # Debian's
            users += f"{USER}:x:{self.uid}:{self.uid}::/var/lib/libvirt:/usr/sbin/nologin\n"
            groups += f"{USER}:x:{self.uid}:\n"
        files = {
            "passwd": users,
            "group": groups,
            "hosts": "127.0.0.1 localhost kz-one kz-two\n",
            "qemu.conf": QEMU_CONF,
            "libvirtd.conf": f'host_uuid = "{uuid.uuid4()}"\nauth_unix_rw = "none"\n',
            "libvirt.conf": "",
        }
        for file, content in files.items():
            (self.folder / file).write_text(content, encoding="utf-8")
        self.log = self.folder / "libvirtd.log"
        spaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        words = [*spaces, "sh", "-c", HOST, "sh", self.folder, images, name, *usr]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE
        while not self.socket.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise LabError(
                    "libvirtd does not start", self.said or "it printed nothing", "run it by hand"
                )
            time.sleep(0.05)

    said = ""

    def virsh(self, *words: str | Path, timeout: float = 120) -> str:
        """Run virsh and return what it prints.

        TestFailure with libvirt's own words when it fails.
        """
        argv = ["virsh", "-q", "-c", self.uri, *map(str, words)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode:
            logs = sorted((self.folder / "var/log/libvirt/qemu").glob("*.log"))
            more = "".join(log.read_text(errors="replace")[-1500:] for log in logs)
            raise TestFailure(
                f"virsh {' '.join(map(str, words))} fails",
                f"{done.stderr}\n{more}",
                f"see {self.log}",
            )
        return done.stdout

    def follow(self, line: str, timeout: float = 120) -> None:
        """Run a command of a page, whose virsh uses this host; TestFailure when it fails."""
        done = subprocess.run(
            ["sh", "-c", line],
            env={**os.environ, "LIBVIRT_DEFAULT_URI": self.uri},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise TestFailure(f"{line} fails", f"{done.stdout}\n{done.stderr}", f"see {self.log}")

    def define(self, domain: ElementTree.Element) -> None:
        file = self.folder / "domain.xml"
        file.write_bytes(ElementTree.tostring(domain))
        self.virsh("define", file)

    def statistics(self, name: str) -> dict[str, int]:
        pairs = (line.split() for line in self.virsh("dommemstat", name).splitlines())
        return {key: int(value) for key, value in pairs}

    def actual(self, name: str, wanted_kib: int) -> bool:
        """Whether the balloon reaches a size."""
        return eventually(lambda: self.statistics(name)["actual"] == wanted_kib)

    def run_in(self, name: str, script: str, timeout: float = 300) -> str:
        """Run commands in the shell on a guest's serial console; what they print.

        The kernel writes to this console, too, in the middle of a line perhaps: while the shell
        prints what the commands have said, messages of the kernel wait.
        """
        path = self.virsh("ttyconsole", name).strip()
        device = os.open(path, os.O_RDWR | os.O_NOCTTY)
        mark, seen = f"kz{time.monotonic_ns()}", ""
        # Quotes keep the echo of a command from looking like its output.
        asks = (
            f"read shown rest < {PRINTK}; {{ {script}; }} > /said 2>&1; code=$?; "
            f"echo 1 > {PRINTK}; sleep 0.1; echo BEGIN'{mark}'; cat /said; echo END'{mark}' $code; "
            f"echo $shown > {PRINTK}\n"
        )
        try:
            tty.setraw(device)
            # A guest that boots loses input.
            deadline, asked, sent = time.monotonic() + timeout, 0.0, False
            while not (end := re.search(rf"END{mark} (\d+)", seen)):
                now = time.monotonic()
                if now > deadline:
                    raise TestFailure(
                        f"the guest does not answer: {script}", seen[-1500:], "see its console"
                    )
                if not sent and f"READY{mark}" in seen:
                    os.write(device, asks.encode())
                    sent = True
                elif not sent and now > asked + 3:
                    os.write(device, f"\necho READY'{mark}'\n".encode())
                    asked = now
                if select.select([device], [], [], 0.2)[0]:
                    seen += os.read(device, 1 << 16).decode(errors="replace").replace("\r", "")
        finally:
            os.close(device)
        told = seen[: end.start()].partition(f"BEGIN{mark}")[2].lstrip()
        assert end[1] == "0", told
        assert "BUG" not in seen, seen
        return told

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.said = self.log.read_text(errors="replace")[-2000:]
        shutil.rmtree(self.folder, ignore_errors=True)


def eventually(holds: object, seconds: float = PATIENCE) -> bool:
    """Whether a condition becomes true in time."""
    assert callable(holds)
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def hosts(names: tuple[str, ...], *usr: str | Path) -> Iterator[tuple[list[Host], Path]]:
    """Hosts that share a folder of images, with a kernel and a file system for guests in it."""
    need_libvirt()
    running: list[Host] = []
    images = Path(tempfile.mkdtemp(prefix="kz-images-", dir="/tmp"))
    try:
        images.chmod(0o755)
        shutil.copyfile(resolve.kernel(CHECKED)[0], images / "vmlinuz")
        shell = "stty -echo; PS1=; exec sh -i"
        command = ["sh", "-c", f"exec </dev/ttyS0 >/dev/ttyS0 2>&1; {shell}"]
        initramfs.write(images / "initrd", command, "none", [], [])
        for name in names:
            running.append(Host(name, images, *usr))
        yield running, images
    finally:
        for host in running:
            host.close()
        shutil.rmtree(images, ignore_errors=True)


def empty_qcow2(file: Path, mib: int = 64) -> None:
    """An empty disk.

    The header, a table of reference counts for its four clusters, an empty L1 table.
    """
    cluster = 1 << 16
    header = struct.pack(
        ">4sIQIIQIIQQIIQ", b"QFI\xfb", 3, 0, 0, 16, mib << 20, 0, 1, 3 * cluster, cluster, 1, 0, 0
    )
    header += struct.pack(">QQQII", 0, 0, 0, 4, 104)
    table, counts = struct.pack(">Q", 2 * cluster), struct.pack(">4H", 1, 1, 1, 1)
    file.write_bytes(b"".join(part.ljust(cluster, b"\0") for part in (header, table, counts, b"")))
    file.chmod(0o666)


def for_a_test(domain: ElementTree.Element, memory_mib: int = 512) -> ElementTree.Element:
    """A documented domain with what the lab has: emulation, a kernel, a console.

    Nothing else is changed.
    """
    domain.set("type", "qemu")
    memory = domain.find("memory")
    system, devices = domain.find("os"), domain.find("devices")
    assert memory is not None and system is not None and devices is not None
    memory.text, memory.attrib["unit"] = str(memory_mib), "MiB"
    for boot in system.findall("boot"):
        system.remove(boot)
    for tag, text in {
        "kernel": str(IMAGES / "vmlinuz"),
        "initrd": str(IMAGES / "initrd"),
        "cmdline": f"{argv.APPEND} {argv.APPEND_TCG} {CHECK}",
    }.items():
        ElementTree.SubElement(system, tag).text = text
    for console in devices.findall("console"):
        devices.remove(console)
    ElementTree.SubElement(devices, "serial", {"type": "pty"})
    return domain
