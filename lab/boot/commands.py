# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz doctor``, ``kz boot``, ``kz shell`` and ``kz conform``."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated

import typer
from typer import Argument, Option

from lab.boot.spec import BootSpec
from lab.core import errors
from lab.core.options import OlderLinux, Several, writable_file
from lab.machine import arches

app = typer.Typer()
PASSED_ON = {
    "allow_interspersed_args": False
}  # what follows the first word belongs to the guest's command
BALLOON = "virtio-balloon-pci,free-page-reporting=on"
FOREVER = 7 * 86400.0  # seconds
KERNEL = "knownzero"


# The guest that the command line describes.
Kernel = Annotated[str, Option(help="base, knownzero, off, debug, stock (Debian's) or a file.")]
Qemu = Annotated[str | None, Option(help="base, knownzero, stock (Debian's) or a file.")]
Memory = Annotated[str, Option(help="Guest memory, such as 2G.")]
Cpus = Annotated[int, Option(min=1, max=255, help="Virtual CPUs.")]
Devices = Annotated[
    Several, Option(help=f"A QEMU device, such as {BALLOON}, or daemon,OPTION=…. Repeatable.")
]
Append = Annotated[str, Option(help="More kernel command line.")]
Added = Annotated[Several, Option(metavar="FILE[:GUESTPATH]", help="Copy this in. Repeatable.")]
Accel = Annotated[str, Option(help="auto, kvm, pvm or tcg.")]
QemuArgs = Annotated[Several, Option(help="A raw QEMU argument. Repeatable.")]


def _use(linux: str, spec: BootSpec) -> None:
    """Get another Linux for a guest, if it can be."""
    from lab.machine import fetch

    if linux:
        spec.check()
        fetch.use("linux", linux)


def _added(item: str) -> tuple[Path, str]:
    name, _, place = item.partition(":")
    if not Path(name).exists():
        why, fix = "there is no such file", "give --add FILE or --add FILE:GUESTPATH"
        raise errors.UsageError(f"Bad --add: {name}", why, fix)
    return Path(name), place


@app.command()
def doctor(context: typer.Context) -> None:
    from lab.boot import doctor as doctors

    findings = doctors.examine(context.obj or [])
    width = max(len(f.name) for f in findings)
    for f in findings:
        fix = f"\n{'':8}{'':{width}}  fix: {f.fix}" if f.fix else ""
        print(f"{f.state:8}{f.name:{width}}  {f.text}{fix}")
    if any(f.state == "missing" for f in findings):
        raise typer.Exit(errors.MACHINE)


def _streams() -> list[Callable[[bytes], None]]:
    def put(data: bytes, stream: IO[bytes]) -> None:
        stream.write(data)
        stream.flush()

    return [functools.partial(put, stream=stream.buffer) for stream in (sys.stdout, sys.stderr)]


@app.command(context_settings=PASSED_ON)
def boot(
    command: Annotated[Several, Argument(metavar="-- CMD...", help="The command.")] = None,
    kernel: Kernel = KERNEL,
    qemu: Qemu = None,
    memory: Memory = "2G",
    cpus: Cpus = 1,
    device: Devices = None,
    append: Append = "",
    add: Added = None,
    accel: Accel = "auto",
    qemu_arg: QemuArgs = None,
    linux: OlderLinux = "",
    timeout: Annotated[float, Option(min=1, help="Seconds until the guest is ended.")] = 300,
    arch: Annotated[str, Option(help=f"{', '.join(arches.GUESTS)}; um has no QEMU.")] = "x86_64",
    mte: Annotated[bool, Option("--mte", help="arm64 with memory tags.")] = False,
    allow_warnings: Annotated[
        bool, Option("--allow-warnings", help="Pass despite kernel faults.")
    ] = False,
) -> None:
    """The kernel's console goes to a log under out/boot. A kernel warning, an oops or a dirty
    known-zero page makes the exit code 1, even if the command succeeded.
    """
    from lab.boot import guest
    from lab.core import progress

    spec = BootSpec(
        kernel=kernel,
        qemu=qemu,
        memory=memory,
        cpus=cpus,
        devices=device or [],
        append=append,
        add=[_added(item) for item in add or []],
        accel=accel,
        extra_qemu=qemu_arg or [],
        command=command or ["uname", "-a"],
        timeout=timeout,
        arch=arch,
        mte=mte,
        allow_warnings=allow_warnings,
    )
    _use(linux, spec)
    result = guest.boot(spec, *_streams())
    if sys.stderr.isatty():
        about = f"{result.accel} ({result.accel_reason})" if result.accel_reason else result.accel
        progress.note(f"{about}, {result.seconds:.1f} s, console: {result.console}")
    raise typer.Exit(result.exit_code)


@app.command(context_settings=PASSED_ON)
def shell(
    command: Annotated[Several, Argument(metavar="[-- CMD...]", help="Instead of a shell.")] = None,
    kernel: Kernel = KERNEL,
    qemu: Qemu = None,
    memory: Memory = "2G",
    cpus: Cpus = 1,
    device: Devices = None,
    append: Append = "",
    add: Added = None,
    accel: Accel = "auto",
    qemu_arg: QemuArgs = None,
    linux: OlderLinux = "",
) -> None:
    from lab.boot import guest

    spec = BootSpec(
        kernel=kernel,
        qemu=qemu,
        memory=memory,
        cpus=cpus,
        devices=device or [BALLOON],
        append=append,
        add=[_added(item) for item in add or []],
        accel=accel,
        extra_qemu=qemu_arg or [],
        command=command or ["sh", "-i"],
        timeout=FOREVER,
    )
    _use(linux, spec)
    raise typer.Exit(guest.interactive(spec))


@app.command(context_settings=PASSED_ON)
def conform(
    command: Annotated[
        Several,
        Argument(metavar="-- COMMAND...", help="Your VMM, with its serial console on stdout."),
    ] = None,
    kernel: Annotated[str, Option(help="A variant or a file.")] = "debug",
    arch: Annotated[str, Option(help="x86_64, or um (the kernel as a program).")] = "x86_64",
    memory: Annotated[str, Option(help="The value of {memory}.")] = "1G",
    pid: Annotated[
        int | None, Option(min=1, help="The process with the guest's memory, if another one.")
    ] = None,
    timeout: Annotated[float, Option(min=1, help="Seconds until the guest is ended.")] = 300,
    bundle: Annotated[
        Path | None, Option(help="Only write kernel, initramfs and README to this tarball.")
    ] = None,
) -> None:
    """In COMMAND, {kernel}, {initrd}, {append} and {memory} are replaced.

    The result is a Markdown table; a failed check makes the exit code 1. Example: kz conform --
    qemu-system-x86_64 -nographic -m {memory} -kernel {kernel} -initrd {initrd} -append {append}
    -device virtio-balloon-pci,free-page-reporting=on
    """
    from lab.boot import conform as conforming

    if bundle:
        writable_file("--bundle", bundle)
        conforming.bundle(bundle, kernel)
        print(bundle)
        return
    lines = conforming.check(
        command or [], kernel=kernel, arch=arch, memory=memory, timeout=timeout, pid=pid
    )
    print("\n".join(lines))
    if any("| FAIL |" in line for line in lines):
        raise typer.Exit(errors.FAILED)
