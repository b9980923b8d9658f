# SPDX-License-Identifier: GPL-2.0
"""The state of this machine: tools, sources, images, KVM, and the bits that QEMU offers."""

import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lab.boot import accel
from lab.build import linux as build
from lab.build.images import compiler, jobs
from lab.build.qemu import find_qemu
from lab.core import paths, run
from lab.core.errors import LabError
from lab.machine import apt, fetch, others, stock, tools

NEEDED_GB = 12
BALLOON = "virtio-balloon-pci"
# With the properties of QEMU.
BITS = {6: "x-device-init-reported", 7: "device-init-on-inflate", 16: "x-report-now"}
OK, NOTE, MISSING = "ok", "note", "missing"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``state`` is ok, note (works without) or missing."""

    name: str
    state: str
    text: str
    fix: str = ""


def examine(removed: Sequence[str]) -> list[Finding]:
    """Look at everything; installs and builds nothing.

    ``removed``: the variables that the lab has removed from its environment.
    """
    found = [Finding("python", OK, platform.python_version()), _machine(), _space()]
    found.append(_try("Debian mirror", MISSING, lambda: (OK, " ".join(apt.mirrors()), "")))
    for name in (*fetch.NAMES, *(name for name in tools.TESTS if name not in fetch.NAMES)):
        found.append(_tools(name))
        if name in fetch.NAMES:
            found.append(_try(f"{name} source", MISSING, partial(_source, name)))
    for variant in build.VARIANTS:
        found.append(_try(f"kernel {variant}", NOTE, partial(_kernel, variant)))
    found += [*_qemu(), _try("Debian's QEMU", MISSING, _stock_qemu), _kvm()]
    return [*found, _settings(removed), _swap(), _huge_pages()]


def _try(name: str, otherwise: str, look: Callable[[], tuple[str, str, str]]) -> Finding:
    try:
        return Finding(name, *look())
    except LabError as error:
        return Finding(name, otherwise, error.why, error.fix)


def _machine() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    text = (
        f"{platform.machine()}, {jobs()} CPUs, {memory:.0f} GiB of memory, kernel "
        f"{platform.release()}"
    )
    if platform.machine() == "x86_64":
        return Finding("machine", OK, text)
    return Finding(
        "machine", MISSING, text, "use an x86_64 machine: guests and kernels are built for it"
    )


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
    if not (absent := tools.missing(name)):
        cargo = (
            "cargo " + ".".join(map(str, tools.version("cargo")))
            if name == "daemon"
            else "all found"
        )
        return Finding(what, OK, compiler() if built else cargo)
    text = "absent: " + ", ".join(tools.CHECKS.get(one, one) for one in absent)
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
    return (
        (OK, str(image), "")
        if image
        else (NOTE, "not built", f"kz build linux --variant {variant}")
    )


def offers(qemu: Path) -> dict[int, bool]:
    """Whether the virtio-balloon of a QEMU can offer the bits of the series, by its properties."""
    what, fix = f"{qemu} does not answer", "build it again with kz build qemu"
    listed = run.output([qemu, "-no-user-config", "-device", f"{BALLOON},help"], what, fix)
    return {bit: f"  {name}=" in listed for bit, name in BITS.items()}


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


def _stock_qemu() -> tuple[str, str, str]:
    """Whether the unpacked QEMU runs without a module of the QEMU that is installed here."""
    if not (binary := stock.find_qemu()):
        return NOTE, "not downloaded yet", "the first guest with --qemu stock downloads it"
    fix = f"remove {binary.parent}: it is downloaded again"
    done = run.ask([binary, "-no-user-config", "-device", "help"])
    if done.returncode or done.stderr:
        raise LabError(f"{binary} does not run", done.stderr.strip(), fix)
    return OK, str(binary), ""


def _settings(removed: Sequence[str]) -> Finding:
    """The variables that would change builds and guests.

    The lab removes them from what it starts.
    """
    if removed:
        return Finding("environment", NOTE, f"without effect in the lab: {', '.join(removed)}")
    return Finding("environment", OK, "no variable changes builds or guests")


def _swap() -> Finding:
    if not (swaps := others.swaps()):
        return Finding("swap", OK, "off")
    size, used = (sum(sizes) / 2**30 for sizes in zip(*swaps.values(), strict=True))
    text = (
        f"{', '.join(swaps)}: {used:.1f} of {size:.1f} GiB in use; host memory and time in a "
        "bench are wrong once a guest is swapped out"
    )
    return Finding("swap", NOTE, text, "before a bench, run: sudo swapoff --all")


def _huge_pages() -> Finding:
    used, have = others.huge_pages()
    text = f"{used} of {have} in use"
    if not used:
        return Finding("huge pages", OK, text)
    text += ": tests skip if they need an empty pool, or more pages than the machine can add"
    return Finding("huge pages", NOTE, text, "end the programs that use them before kz test")


def _offers(binary: Path) -> tuple[str, str, str]:
    found = offers(binary)
    text = ", ".join(f"{bit} ({BITS[bit]}): {'yes' if has else 'no'}" for bit, has in found.items())
    return (
        (OK, text, "")
        if all(found.values())
        else (MISSING, text, "build it again with kz build qemu")
    )


def _kvm() -> Finding:
    if not os.path.exists("/dev/kvm"):
        return Finding("KVM", NOTE, "there is no /dev/kvm; guests are emulated (TCG)")
    if not (qemu := find_qemu()):
        return Finding("KVM", NOTE, "/dev/kvm exists; kz doctor tries it after QEMU is built")
    if accel.module() == accel.PVM:
        text = f"{accel.PVM}: guests are emulated (TCG), and with --accel pvm native"
        return Finding("KVM", NOTE, text, "docs/how-to/measure.md")
    why = accel.kvm_obstacle(qemu)
    no = f"cannot be used: {why}; guests are emulated (TCG)"
    return Finding("KVM", NOTE, no) if why else Finding("KVM", OK, "runs Debian's kernel")
