# SPDX-License-Identifier: GPL-2.0
"""What is there, what is missing, and what this machine can really do."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.boot import accel
from lab.build import linux as build
from lab.build.images import compiler, jobs
from lab.build.qemu import find_qemu
from lab.core import paths, run
from lab.core.errors import LabError
from lab.machine import apt, fetch, tools

NEEDED_GB = 12
BALLOON = "virtio-balloon-pci"
REPORTED = 6  # VIRTIO_BALLOON_F_DEVICE_INIT_REPORTED
TRANSPORT = 24  # from here on bits are not the device's own (virtio 1.3, section 2.2)
INFLATE = 7  # VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``state`` is ok, note (works without) or missing."""

    name: str
    state: str
    text: str
    fix: str = ""


def examine() -> list[Finding]:
    """Look at everything; installs and builds nothing."""
    found = [Finding("python", "ok", platform.python_version()), _machine(), _space(), _mirror()]
    for name in fetch.NAMES:
        found += [_tools(name), _source(name)]
    found += [_tools(name) for name in tools.TESTS if name not in fetch.NAMES]
    found += _images()
    found += _qemu()
    found.append(_kvm())
    return found


def _machine() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    text = f"{platform.machine()}, {jobs()} CPUs, {memory:.0f} GB of memory, kernel {platform.release()}"
    if platform.machine() != "x86_64":
        return Finding(
            "machine", "missing", text, "guests and kernels are built for x86_64: use such a machine"
        )
    return Finding("machine", "ok", text)


def _space() -> Finding:
    free = shutil.disk_usage(paths.cache()).free / 1e9
    text = f"{paths.cache()}, {free:.0f} GB free"
    if free < NEEDED_GB and not (paths.cache() / "images").exists():
        return Finding(
            "cache",
            "missing",
            text,
            f"an empty cache grows to about {NEEDED_GB} GB: free some space or set KNOWNZERO_CACHE",
        )
    return Finding("cache", "ok", text)


def _mirror() -> Finding:
    try:
        mirrors = apt.mirrors()
    except LabError as error:
        return Finding("Debian mirror", "missing", error.why, error.fix)
    return Finding("Debian mirror", "ok", " ".join(mirrors))


def _tools(name: str) -> Finding:
    """Kernels and QEMU need the first of them; the tests need all."""
    absent = tools.missing(name)
    if not absent:
        if name in tools.DEMO:
            return Finding(f"tools for {name}", "ok", compiler())
        return Finding(f"tools for {name}", "ok", _version("cargo") if name == "daemon" else "all there")
    text = "absent: " + ", ".join(absent)
    if apt.may_install() is not None:
        verb = "build" if name in tools.DEMO else "test"
        return Finding(f"tools for {name}", "note", text, f"kz {verb} installs them")
    command = "run: sudo apt-get install -y --no-install-recommends " + " ".join(absent)
    return Finding(f"tools for {name}", "missing" if name in tools.DEMO else "note", text, command)


def _version(program: str) -> str:
    return f"{program} " + ".".join(map(str, tools.version(program)))


def _source(name: str) -> Finding:
    try:
        source = fetch.identify(name)
    except LabError as error:
        return Finding(f"{name} source", "missing", error.why, error.fix)
    if source.tree.exists() or source.archive.exists():
        return Finding(f"{name} source", "ok", f"{source.version} ({source.archive})")
    return Finding(
        f"{name} source", "note", f"{source.version} is not downloaded yet", "the first build does it"
    )


def _images() -> list[Finding]:
    found = []
    for variant in build.VARIANTS:
        name = f"kernel {variant}"
        try:
            image = build.find_linux(variant)
        except LabError as error:
            found.append(Finding(name, "note", error.why))
            continue
        found.append(
            Finding(name, "ok", str(image))
            if image
            else Finding(name, "note", "not built", f"kz build linux --variant {variant}")
        )
    return found


def offered_bits(qemu: Path, more: str = "") -> list[int]:
    """The device-specific feature bits a virtio-balloon with reporting on offers in this QEMU.

    ``more`` are further properties. Asked of a QEMU that is started and not run. Raises LabError when it does
    not start.
    """
    from qemu.qmp import QMPError
    from qemu.qmp.legacy import QEMUMonitorProtocol

    ours, theirs = socket.socketpair()
    argv = [
        str(qemu), "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel", "tcg", "-S", "-m", "64M",
        "-device", f"{BALLOON},id=balloon,free-page-reporting=on{more}",
        "-chardev", f"socket,id=m,fd={theirs.fileno()}", "-mon", "chardev=m,mode=control",
    ]  # fmt: skip
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    try:
        ours.settimeout(20)
        monitor = QEMUMonitorProtocol(ours)
        monitor.connect()
        path = "/machine/peripheral/balloon/virtio-backend"
        status: Any = monitor.cmd("x-query-virtio-status", path=path)
    except (OSError, QMPError) as error:
        run.end_group(process)
        said = (process.stderr.read() if process.stderr else b"").decode(errors="replace").strip()
        raise LabError(
            f"{qemu} does not answer", said or str(error), "build it again with kz build qemu"
        ) from None
    finally:
        run.end_group(process)
        ours.close()
    return _bits(status["host-features"])


NAMES = {
    "VIRTIO_BALLOON_F_MUST_TELL_HOST": 0, "VIRTIO_BALLOON_F_STATS_VQ": 1, "VIRTIO_BALLOON_F_DEFLATE_ON_OOM": 2, "VIRTIO_BALLOON_F_FREE_PAGE_HINT": 3,
    "VIRTIO_BALLOON_F_PAGE_POISON": 4, "VIRTIO_BALLOON_F_REPORTING": 5, "VIRTIO_BALLOON_F_DEVICE_INIT_REPORTED": 6, "VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE": 7,
}  # fmt: skip


def _bits(features: dict[str, Any]) -> list[int]:
    bits = {
        NAMES[text.split(":")[0]] for text in features.get("dev-features", []) if text.split(":")[0] in NAMES
    }
    unknown = int(features.get("unknown-dev-features", 0))
    return sorted(bits | {bit for bit in range(TRANSPORT) if unknown >> bit & 1})


def _qemu() -> list[Finding]:
    try:
        binary = find_qemu()
    except LabError as error:
        return [Finding("qemu", "note", error.why)]
    if not binary:
        return [Finding("qemu", "note", "not built", "kz build qemu")]
    found = [Finding("qemu", "ok", str(binary))]
    try:
        bits = offered_bits(binary)
        on_inflate = INFLATE in bits or INFLATE in offered_bits(binary, ",device-init-on-inflate=on")
    except LabError as error:
        return [*found, Finding("balloon bits", "missing", error.why, error.fix)]
    text = f"offers {', '.join(map(str, bits))}; bit {REPORTED} (device init reported): {'yes' if REPORTED in bits else 'no'}, bit {INFLATE} (on inflate): {'with device-init-on-inflate=on' if on_inflate else 'no'}"
    return [
        *found,
        Finding(
            "balloon bits",
            "ok" if REPORTED in bits else "missing",
            text,
            "" if REPORTED in bits else "build it again with kz build qemu",
        ),
    ]


def _kvm() -> Finding:
    if not os.path.exists("/dev/kvm"):
        return Finding("KVM", "note", "there is no /dev/kvm; guests are emulated (TCG)")
    qemu = find_qemu()
    kernel = next((image for v in ("base", "knownzero") if (image := build.find_linux(v))), None)
    if not qemu or not kernel:
        return Finding(
            "KVM",
            "note",
            "/dev/kvm exists; whether it runs a kernel is not known before a kernel and QEMU are built",
        )
    works, why = accel.kvm_works(qemu, kernel)
    return (
        Finding("KVM", "ok", "runs a kernel")
        if works
        else Finding("KVM", "note", f"cannot be used: {why}; guests are emulated (TCG)")
    )
