# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz doctor``, ``kz boot``, ``kz shell`` and ``kz top``."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated

import typer

from lab.boot import options
from lab.boot.options import Accel, Add, Append, Cpus, Device, Kernel, Memory, Qemu, QemuArg
from lab.core import errors
from lab.core.options import Json

app = typer.Typer()
PASSED_ON = {"allow_interspersed_args": False}  # what follows the first word belongs to the guest's command


@app.command()
def doctor(as_json: Json = False) -> None:
    """Report tools, sources, space, whether KVM runs a kernel, and which bits QEMU offers."""
    from lab.boot import doctor as doctors

    findings = doctors.examine()
    if as_json:
        print(json.dumps([vars(f) for f in findings]))
    else:
        width = max(len(f.name) for f in findings)
        for f in findings:
            fix = f"\n{'':8}{'':{width}}  fix: {f.fix}" if f.fix else ""
            print(f"{f.state:8}{f.name:{width}}  {f.text}{fix}")
    if any(f.state == "missing" for f in findings):
        raise typer.Exit(errors.MACHINE)


def _write(stream: IO[bytes]) -> Callable[[bytes], None]:
    def put(data: bytes) -> None:
        stream.write(data)
        stream.flush()

    return put


@app.command(context_settings=PASSED_ON)
def boot(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD...", help="The command to run in the guest.")
    ] = None,
    kernel: Kernel = "knownzero",
    qemu: Qemu = None,
    memory: Memory = "2G",
    cpus: Cpus = 1,
    device: Device = None,
    append: Append = "",
    add: Add = None,
    accel: Accel = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until the guest is ended.")] = 300,
    arch: Annotated[
        str, typer.Option(help="x86_64, um (the kernel as a program; no QEMU), i386 or arm64 (emulated).")
    ] = "x86_64",
    mte: Annotated[
        bool, typer.Option("--mte", help="With --arch arm64: a machine with memory tags.")
    ] = False,
    qemu_arg: QemuArg = None,
    allow_warnings: Annotated[
        bool, typer.Option("--allow-warnings", help="Do not fail on faults that the kernel reports.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a command in a fresh guest; its stdout, stderr and exit code are passed through.

    The kernel's console goes to a log under out/boot. A kernel warning, oops or oracle
    report fails the run with exit code 1, even if the command succeeded.
    """
    from lab.boot import guest
    from lab.core import progress

    spec = options.spec(
        kernel, qemu, memory, cpus, device, append, accel, command or ["uname", "-a"], timeout, add, qemu_arg
    )
    spec.arch, spec.mte, spec.allow_warnings = arch, mte, allow_warnings
    sinks = () if as_json else (_write(sys.stdout.buffer), _write(sys.stderr.buffer))
    result = guest.boot(spec, *sinks)
    if as_json:
        found = {
            "exit_code": result.exit_code, "stdout": result.stdout, "stderr": result.stderr, "accelerator": result.accel,
            "seconds": round(result.seconds, 3), "console": str(result.console), "violations": result.violations,
        }  # fmt: skip
        print(json.dumps(found))
    elif progress.console.is_terminal:
        progress.note(f"{result.accel}, {result.seconds:.1f} s, console: {result.console}")
    raise typer.Exit(result.exit_code)


@app.command(context_settings=PASSED_ON)
def shell(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD...]", help="A command to run instead of a shell.")
    ] = None,
    kernel: Kernel = "knownzero",
    qemu: Qemu = None,
    memory: Memory = "2G",
    cpus: Cpus = 1,
    device: Device = None,
    append: Append = "",
    add: Add = None,
    accel: Accel = "auto",
    qemu_arg: QemuArg = None,
) -> None:
    """A shell in a fresh guest, on this terminal; leave it with exit or Ctrl-D."""
    from lab.boot import guest

    device = device or [options.BALLOON]
    spec = options.spec(
        kernel, qemu, memory, cpus, device, append, accel, command or ["sh", "-i"], options.FOREVER, add, qemu_arg
    )  # fmt: skip
    raise typer.Exit(guest.interactive(spec))


@app.command("top", context_settings=PASSED_ON)
def watch(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- CMD...]", help="A command to run in the guest meanwhile."),
    ] = None,
    kernel: Kernel = "knownzero",
    qemu: Qemu = None,
    memory: Memory = "2G",
    cpus: Cpus = 1,
    device: Device = None,
    append: Append = "",
    accel: Accel = "auto",
    interval: Annotated[int, typer.Option(min=1, max=3600, help="Seconds between two looks.")] = 2,
    once: Annotated[bool, typer.Option("--once", help="Look once, after the command's end.")] = False,
    socket_path: Annotated[
        Path | None,
        typer.Option("--socket", help="No guest: ask a vhost-user-balloon by its control socket."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per look.")] = False,
) -> None:
    """Watch known-zero memory in a fresh guest (zeropages), or a vhost-user balloon; Ctrl-C ends it."""
    from lab.boot import top

    if socket_path is not None:
        if command:
            raise errors.UsageError(
                f"Bad command: {command[0]}",
                "--socket watches a guest that runs already, and takes no command",
                "leave out the command, or --socket",
            )
        with contextlib.suppress(KeyboardInterrupt):
            top.watch(socket_path, interval=interval, once=once, as_json=as_json, out=sys.stdout)
        return
    live = not once and not as_json and sys.stdout.isatty() and sys.stdin.isatty()
    words = top.guest_command(command or [], interval=interval, once=once, as_json=as_json)
    device = device or [options.BALLOON]
    spec = options.spec(kernel, qemu, memory, cpus, device, append, accel, words, options.FOREVER)
    sinks = () if live else (_write(sys.stdout.buffer), _write(sys.stderr.buffer))
    raise typer.Exit(top.show_guest(spec, live, sinks))
