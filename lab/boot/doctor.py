# SPDX-License-Identifier: GPL-2.0
"""The state of this machine: tools, sources, images, KVM, and the bits that QEMU offers."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.boot import accel
from lab.build import linux as build
from lab.build.images import compiler, jobs
from lab.build.qemu import find_qemu
from lab.core import paths
from lab.core.errors import LabError
from lab.machine import apt, fetch, tools

NEEDED_GB = 12
BALLOON = "virtio-balloon-pci"
REPORTED = 6  # VIRTIO_BALLOON_F_DEVICE_INIT_REPORTED
INFLATE = 7  # VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE
TRANSPORT = 24  # from here on bits are not the device's own (virtio 1.3, section 2.2)
OK, NOTE, MISSING = "ok", "note", "missing"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``state`` is ok, note (works without) or missing."""

    name: str
    state: str
    text: str
    fix: str = ""


def examine() -> list[Finding]:
    """Look at everything; installs and builds nothing."""
    found = [Finding("python", OK, platform.python_version()), _machine(), _space()]
    found.append(_try("Debian mirror", MISSING, lambda: (OK, " ".join(apt.mirrors()), "")))
    for name in (*fetch.NAMES, *(name for name in tools.TESTS if name not in fetch.NAMES)):
        found.append(_tools(name))
        if name in fetch.NAMES:
            found.append(_try(f"{name} source", MISSING, lambda name=name: _source(name)))  # type: ignore[misc]
    for variant in build.VARIANTS:
        found.append(_try(f"kernel {variant}", NOTE, lambda variant=variant: _kernel(variant)))  # type: ignore[misc]
    return [*found, *_qemu(), _kvm()]


def _try(name: str, otherwise: str, look: Callable[[], tuple[str, str, str]]) -> Finding:
    """The finding of ``look``, or its error."""
    try:
        return Finding(name, *look())
    except LabError as error:
        return Finding(name, otherwise, error.why, error.fix)


def _machine() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    text = f"{platform.machine()}, {jobs()} CPUs, {memory:.0f} GB of memory, kernel {platform.release()}"
    if platform.machine() == "x86_64":
        return Finding("machine", OK, text)
    return Finding("machine", MISSING, text, "use an x86_64 machine: guests and kernels are built for it")


def _space() -> Finding:
    free = shutil.disk_usage(paths.cache()).free / 1e9
    text = f"{paths.cache()}, {free:.0f} GB free"
    if free >= NEEDED_GB or (paths.cache() / "images").exists():
        return Finding("cache", OK, text)
    fix = f"an empty cache grows to about {NEEDED_GB} GB: free some space or set KNOWNZERO_CACHE"
    return Finding("cache", MISSING, text, fix)


def _tools(name: str) -> Finding:
    """Builds of kernels and QEMU need some tools; the tests need all."""
    what, built = f"tools for {name}", name in tools.DEMO
    absent = tools.missing(name)
    if not absent:
        cargo = "cargo " + ".".join(map(str, tools.version("cargo"))) if name == "daemon" else "all found"
        return Finding(what, OK, compiler() if built else cargo)
    text = "absent: " + ", ".join(absent)
    if apt.may_install() is not None:
        return Finding(what, NOTE, text, f"kz {'build' if built else 'test'} installs them")
    command = "run: sudo apt-get install -y --no-install-recommends " + " ".join(absent)
    return Finding(what, MISSING if built else NOTE, text, command)


def _source(name: str) -> tuple[str, str, str]:
    source = fetch.identify(name)
    if source.tree.exists() or source.archive.exists():
        return OK, f"{source.version} ({source.archive})", ""
    return NOTE, f"{source.version} is not downloaded yet", "the first build downloads it"


def _kernel(variant: str) -> tuple[str, str, str]:
    image = build.find_linux(variant)
    return (OK, str(image), "") if image else (NOTE, "not built", f"kz build linux --variant {variant}")


def offered_bits(qemu: Path, more: str = "") -> list[int]:
    """The device-specific bits of a reporting virtio-balloon in a QEMU, whose guest does not start."""
    path = {"path": "/machine/peripheral/balloon/virtio-backend"}
    asked = (
        {"execute": "qmp_capabilities"},
        {"execute": "x-query-virtio-status", "arguments": path},
        {"execute": "quit"},
    )
    argv = [
        str(qemu), "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel", "tcg", "-S", "-m", "64M",
        "-device", f"{BALLOON},id=balloon,free-page-reporting=on{more}", "-qmp", "stdio",
    ]  # fmt: skip
    words, fix = "\n".join(map(json.dumps, asked)), "build it again with kz build qemu"
    try:
        done = subprocess.run(argv, input=words, capture_output=True, text=True, timeout=20, check=False)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{qemu} does not answer", str(error), fix) from None
    found = [one["return"]["host-features"] for one in answers if "host-features" in one.get("return", ())]
    if not found:
        raise LabError(f"{qemu} does not answer", done.stderr.strip() or done.stdout[-300:], fix)
    return _bits(found[0])


# The names that QEMU has for bits 0 to 7; it counts the bits that it does not know by itself.
NAMES = ("MUST_TELL_HOST", "STATS_VQ", "DEFLATE_ON_OOM", "FREE_PAGE_HINT", "PAGE_POISON", "REPORTING",
         "DEVICE_INIT_REPORTED", "DEVICE_INIT_ON_INFLATE")  # fmt: skip


def _bits(features: dict[str, Any]) -> list[int]:
    named = {
        text.split(":")[0].removeprefix("VIRTIO_BALLOON_F_") for text in features.get("dev-features", [])
    }
    unknown = int(features.get("unknown-dev-features", 0))
    bits = {number for number, name in enumerate(NAMES) if name in named}
    return sorted(bits | {bit for bit in range(TRANSPORT) if unknown >> bit & 1})


def _qemu() -> Iterator[Finding]:
    try:
        binary = find_qemu()
    except LabError as error:
        yield Finding("qemu", NOTE, error.why)
        return
    if not binary:
        yield Finding("qemu", NOTE, "not built", "kz build qemu")
        return
    yield Finding("qemu", OK, str(binary))
    yield _try("balloon bits", MISSING, lambda: _offers(binary))


def _offers(binary: Path) -> tuple[str, str, str]:
    bits = offered_bits(binary)
    reported = REPORTED in bits
    inflates = INFLATE in bits or INFLATE in offered_bits(binary, ",device-init-on-inflate=on")
    text = (
        f"offers {', '.join(map(str, bits))}; bit {REPORTED} (device init reported): {'yes' if reported else 'no'}, "
        f"bit {INFLATE} (on inflate): {'with device-init-on-inflate=on' if inflates else 'no'}"
    )
    return (OK, text, "") if reported else (MISSING, text, "build it again with kz build qemu")


def _kvm() -> Finding:
    if not os.path.exists("/dev/kvm"):
        return Finding("KVM", NOTE, "there is no /dev/kvm; guests are emulated (TCG)")
    qemu = find_qemu()
    kernel = next((image for v in ("base", "knownzero") if (image := build.find_linux(v))), None)
    if not qemu or not kernel:
        return Finding("KVM", NOTE, "/dev/kvm exists; kz doctor tries it after a kernel and QEMU are built")
    works, why = accel.kvm_works(qemu, kernel)
    if works:
        return Finding("KVM", OK, "runs a kernel")
    return Finding("KVM", NOTE, f"cannot be used: {why}; guests are emulated (TCG)")
