# SPDX-License-Identifier: GPL-2.0
"""What a bench is, what a run of it wants, and everything that is built for that.

plan() checks all arguments and builds nothing. build() builds everything, so that nothing is built
while guests are measured.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.bench.plugin import build_plugin
from lab.boot import initramfs, resolve
from lab.boot.spec import ACCELS, BootSpec
from lab.build import daemon, linux
from lab.build.qemu import build_qemu
from lab.core.errors import LabError, UsageError
from lab.machine.arches import PVM
from lab.patches import parts
from lab.patches.parts import split

Image = str | Path
NOT_EMULATED = ("kvm", "pvm")
KERNEL, DEBIAN = "kernel", "debian"  # whose defaults guests have
NATIVE, LINUX = "pvm", "linux"  # what a bench may take, beside DEBIAN
# Fields of BenchOptions that a bench may set itself, and their options.
SIZE, MEMORY, PAIRS = "size_mb", "memory", "pairs"
FLAGS = {PAIRS: "--pairs", SIZE: "--size", MEMORY: "--memory"}


@dataclass(frozen=True)
class BenchOptions:
    """The options of a bench."""

    pairs: int = 10  # of repetitions, by turns
    size_mb: int = 256  # that the job allocates
    memory: str = "2G"  # of each guest
    accel: str = "auto"
    ours: str = "knownzero"  # the kernel that is measured
    only: str = ""  # these parts of the bench
    defaults: str = KERNEL
    linux: str = ""  # another one, see linux/base.toml

    @property
    def memory_mb(self) -> int:
        """Memory of a guest in MB."""
        return int(self.memory[:-1]) * {"G": 1024, "M": 1}[self.memory[-1]]


@dataclass(frozen=True)
class Kernel:
    """A kernel of a bench: a variant or a file, and a fragment of configuration for a variant."""

    named: str
    arch: str = "x86_64"
    config: str = ""


@dataclass(frozen=True)
class Needs:
    """What a bench needs beside QEMU and two kernels, all built before it begins.

    ``base`` is False for a bench that runs our kernel only. ``gb`` of the machine's memory must be
    available. ``config``: a fragment for both kernels. ``kernels``: those beside base and ours, by
    name. ``plugins``: of the emulator. ``daemon``: the vhost-user daemon. ``disk`` makes the file
    system of real programs.
    """

    base: bool = True
    gb: float = 0.0
    config: str = ""
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    daemon: bool = False
    disk: Callable[[], Path] | None = None


@dataclass(frozen=True)
class Parts:
    """The names that --only takes; ``emulated``: those that --accel pvm leaves out."""

    names: tuple[str, ...] = ()
    emulated: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bench:
    """A bench: its name, a sentence, and the function that observes a ``Run`` (runner.py).

    ``accel`` is the only accelerator it can use, if any. ``takes``: NATIVE for one with figures
    with --accel pvm, DEBIAN for --defaults debian, LINUX for --linux. ``fixed``: those of SIZE,
    MEMORY and PAIRS that it sets itself.
    """

    name: str
    sentence: str
    measure: Callable[[Any], None] = field(repr=False)
    accel: str = ""
    needs: Needs = Needs()
    parts: Parts = Parts()
    takes: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A run of a bench that can be: its arguments are checked.

    ``verb``: the words after ./kz that ask for it.
    """

    bench: Bench
    options: BenchOptions
    verb: tuple[str, ...]
    kernels: Mapping[str, Kernel]

    def name(self, accel: str) -> str:
        """The name of the result of a run on this accelerator.

        Those of KVM, PVM, Debian's defaults and another Linux stand beside the others.
        """
        native = {"pvm": "-native", "kvm": "-kvm"}.get(accel, "")
        defaults = "-debian" if self.options.defaults == DEBIAN else ""
        linux = f"-{self.options.linux.replace('.', '-')}" if self.options.linux else ""
        return f"{self.verb[-1]}{native}{defaults}{linux}"

    def reproduce(self, options: BenchOptions, accel: str) -> str:
        """The command that repeats the run."""
        chosen: dict[str, object] = {"pairs": options.pairs, "size": options.size_mb}
        for name in self.bench.fixed:
            chosen.pop(FLAGS[name].removeprefix("--"), None)
        chosen["accel"] = accel
        usual = BenchOptions()
        for flag in ("memory", "ours", "only", "defaults", "linux"):
            if (value := getattr(options, flag)) != getattr(usual, flag):
                chosen[flag] = value
        words = (word for flag, value in chosen.items() for word in (f"--{flag}", str(value)))
        return shlex.join(["./kz", *self.verb, *words])


@dataclass(frozen=True)
class Images:
    """Everything that the guests of a plan run on.

    The images stay the same when the sources change meanwhile.
    """

    qemu: Path
    kernels: Mapping[str, Image]
    plugins: Mapping[str, Path] = field(default_factory=dict)
    daemon: Path | None = None
    disk: Path | None = None
    parts: Mapping[str, str] = field(default_factory=dict)  # keys; none of a kernel given as a file

    @property
    def base(self) -> Image:
        return self.kernels["base"]

    @property
    def ours(self) -> Image:
        return self.kernels["ours"]


def check(options: BenchOptions) -> None:
    """UsageError for options that cannot work."""
    if options.accel not in ACCELS:
        known = f"use {', '.join(ACCELS)}"
        raise UsageError(f"Bad --accel: {options.accel}", "it is not an accelerator", known)
    if options.defaults not in (KERNEL, DEBIAN):
        why, fix = "the lab knows no such defaults", f"use {KERNEL} or {DEBIAN}"
        raise UsageError(f"Bad --defaults: {options.defaults}", why, fix)
    if not re.fullmatch(r"\d+[MG]", options.memory):
        fix = "write it as 2G or 2048M"
        raise UsageError(f"Bad --memory: {options.memory}", "it is not a size", fix)
    if options.memory_mb < options.size_mb + 512:
        why = (
            f"{options.size_mb} MiB in a guest of {options.memory_mb} MiB leaves less than 512 MiB "
            "for the rest"
        )
        fix = "give the guest more with --memory, or take a smaller --size"
        raise UsageError("The job does not fit", why, fix)
    if options.linux and options.accel == "pvm":
        why = "the patch that runs natively under kvm_pvm is for the newest kernel only"
        raise UsageError(f"Bad --linux: {options.linux}", why, "leave one of the two out")
    resolve.check(BootSpec(kernel=options.ours, accel=options.accel))


def plan(bench: Bench, options: BenchOptions, verb: tuple[str, ...] = ()) -> Plan:
    """The plan of a run; UsageError for options that cannot work. Builds nothing."""
    check(options)
    if unknown := set(split(options.only)).difference(bench.parts.names):
        why = f"{bench.name} has no part {min(unknown)}"
        fix = f"use {', '.join(bench.parts.names) or 'all of it'}"
        raise UsageError(f"Bad --only: {options.only}", why, fix)
    for name in bench.fixed:
        if (value := getattr(options, name)) != getattr(BenchOptions(), name):
            why = f"{bench.name} has its own"
            raise UsageError(f"Bad {FLAGS[name]}: {value}", why, "leave it out, or measure thp")
    if options.defaults == DEBIAN and DEBIAN not in bench.takes:
        why = f"{bench.name} has settings of its own"
        raise UsageError(f"Bad --defaults: {DEBIAN}", why, "leave it out, or measure thp")
    native = options.accel == NATIVE
    if bench.accel and options.accel not in ("auto", bench.accel, NATIVE):
        why = f"{bench.name} runs on {bench.accel} only"
        raise UsageError(f"Bad --accel: {options.accel}", why, "leave it out, or measure thp")
    if native and NATIVE not in bench.takes:
        why = f"{bench.name} needs the emulator, several CPUs or other guests, or is slow there"
        raise UsageError("Bad --accel: pvm", why, "leave it out, or measure thp")
    if native and (emulated := set(split(options.only)).intersection(bench.parts.emulated)):
        why = f"{min(emulated)} needs the emulator, or kvm_pvm does not run it well"
        fix = "leave it out, or use --accel tcg"
        raise UsageError(f"Bad --only: {options.only}", why, fix)
    if options.linux and LINUX not in bench.takes:
        why = f"{bench.name} measures parts that {options.linux} lacks, or needs patches for it"
        raise UsageError(f"Bad --linux: {options.linux}", why, "leave it out, or measure thp")
    if bench.accel and not native:
        options = replace(options, accel=bench.accel)
    named = {"base": "base" if bench.needs.base else options.ours, "ours": options.ours}
    kernels = {side: Kernel(name, config=bench.needs.config) for side, name in named.items()}
    kernels |= bench.needs.kernels
    if options.linux:
        kernels.pop("floor", None)  # a patch for the newest kernel
    if native:  # without those that only the emulator needs
        kernels = {
            name: replace(kernel, arch=PVM) for name, kernel in kernels.items() if name != "off"
        }
    return Plan(bench, options, verb or ("bench", bench.name), kernels)


def build(wanted: Plan) -> Images:
    """Build or find everything for a plan.

    LabError when that fails, or when the machine has too little memory for the guests.
    """
    bench, options, needs = wanted.bench, wanted.options, wanted.bench.needs
    check_memory(bench)
    disk = needs.disk() if needs.disk else None
    kernels = kernels_of(wanted)
    native = options.accel == NATIVE
    initramfs.base_archive()
    return Images(
        build_qemu(),
        kernels,
        {} if native else {name: build_plugin(name) for name in needs.plugins},
        daemon.build("release") if needs.daemon else None,
        disk,
        parts.keys() if wanted.kernels["ours"].named in linux.VARIANTS else {},
    )


def kernels_of(wanted: Plan) -> dict[str, Image]:
    """The kernels of a plan by name, built when the cache lacks them."""
    return {name: _kernel(kernel) for name, kernel in wanted.kernels.items()}


def _kernel(kernel: Kernel) -> Image:
    if kernel.named not in linux.VARIANTS:
        return kernel.named
    return linux.build_linux(kernel.named, kernel.arch, config=kernel.config)


def available_gb() -> float:
    """Memory that the machine can give to guests, in GiB."""
    found = re.search(r"^MemAvailable: +(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) / 2**20 if found else 0.0


def check_memory(bench: Bench) -> None:
    """LabError when the machine has less memory available than a bench needs."""
    if (available := available_gb()) < bench.needs.gb:
        why = f"{available:.1f} GiB of memory are available, {bench.needs.gb:.1f} GiB are needed"
        fix = "end other programs on the machine"
        raise LabError(f"Cannot run the bench {bench.name}", why, fix)
