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

from lab.core import errors
from lab.core.options import Json

app = typer.Typer()


@app.command()
def doctor(as_json: Json = False) -> None:
    """What is there, what is missing, whether KVM really runs a kernel, which bits QEMU offers."""
    from lab.boot import doctor as doctors

    findings = doctors.examine()
    if as_json:
        print(json.dumps([vars(f) for f in findings]))
    else:
        width = max(len(f.name) for f in findings)
        for f in findings:
            print(
                f"{f.state:8}{f.name:{width}}  {f.text}"
                + (f"\n{'':8}{'':{width}}  fix: {f.fix}" if f.fix else "")
            )
    if any(f.state == "missing" for f in findings):
        raise typer.Exit(errors.MACHINE)


@app.command(context_settings={"allow_interspersed_args": False})
def boot(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD...", help="What to run in the guest.")
    ] = None,
    kernel: Annotated[
        str, typer.Option(help="base, knownzero, off, debug, stock (the distribution's), or an image.")
    ] = "knownzero",
    qemu: Annotated[
        str | None, typer.Option(help="base, knownzero, stock (the distribution's), or a binary.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Guest memory, as QEMU's -m takes it.")] = "2G",
    cpus: Annotated[int, typer.Option(min=1, max=255, help="Virtual CPUs.")] = 1,
    device: Annotated[
        list[str] | None,
        typer.Option(help="A QEMU device, such as virtio-balloon-pci,free-page-reporting=on. Repeatable."),
    ] = None,
    append: Annotated[str, typer.Option(help="More kernel command line.")] = "",
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE[:GUESTPATH]", help="Put a file or folder into the guest. Repeatable."),
    ] = None,
    accel: Annotated[str, typer.Option(help="auto, kvm or tcg.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until the guest is ended.")] = 300,
    arch: Annotated[
        str, typer.Option(help="x86_64, um (the kernel as a program; no QEMU), i386 or arm64 (emulated).")
    ] = "x86_64",
    mte: Annotated[
        bool, typer.Option("--mte", help="With --arch arm64: a machine with memory tags.")
    ] = False,
    qemu_arg: Annotated[list[str] | None, typer.Option(help="A raw QEMU argument. Repeatable.")] = None,
    allow_warnings: Annotated[
        bool, typer.Option("--allow-warnings", help="Do not fail on faults the kernel reports.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a command in a fresh guest; its stdout, stderr and exit code are passed through.

    The kernel's console goes to a log under out/boot. A kernel warning, oops or oracle
    report fails the run with exit code 1, whatever the command said.
    """
    from lab.boot import guest as guests
    from lab.core import progress

    spec = guests.BootSpec(
        kernel=kernel, qemu=qemu, memory=memory, cpus=cpus, devices=device or [], append=append,
        add=[_added(item) for item in add or []], accel=accel, timeout=timeout, command=command or ["uname", "-a"],
        extra_qemu=qemu_arg or [], allow_warnings=allow_warnings, arch=arch, mte=mte,
        console_lines=None if as_json else _write(sys.stdout.buffer), errors=None if as_json else _write(sys.stderr.buffer),
    )  # fmt: skip
    result = guests.boot(spec)
    if as_json:
        print(
            json.dumps(
                {
                    "exit_code": result.exit_code, "stdout": result.stdout, "stderr": result.stderr, "accelerator": result.accel,
                    "seconds": round(result.seconds, 3), "console": str(result.console), "violations": result.violations,
                }
            )
        )  # fmt: skip
    elif progress.console.is_terminal:
        progress.note(f"{result.accel}, {result.seconds:.1f} s, console: {result.console}")
    raise typer.Exit(result.exit_code)


def _write(stream: IO[bytes]) -> Callable[[bytes], None]:
    def put(data: bytes) -> None:
        stream.write(data)
        stream.flush()

    return put


def _added(item: str) -> tuple[Path, str]:
    name, _, place = item.partition(":")
    path = Path(name)
    if not path.exists():
        raise errors.UsageError(
            f"cannot add {name} to the guest",
            "there is no such file",
            "give --add FILE or --add FILE:GUESTPATH",
        )
    return path, place


@app.command(context_settings={"allow_interspersed_args": False})
def shell(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD...]", help="What to run instead of a shell.")
    ] = None,
    kernel: Annotated[
        str, typer.Option(help="base, knownzero, off, debug, stock, or an image.")
    ] = "knownzero",
    qemu: Annotated[str | None, typer.Option(help="base, knownzero, stock, or a binary.")] = None,
    memory: Annotated[str, typer.Option(help="Guest memory, as QEMU's -m takes it.")] = "2G",
    cpus: Annotated[int, typer.Option(min=1, max=255, help="Virtual CPUs.")] = 1,
    device: Annotated[list[str] | None, typer.Option(help="A QEMU device. Repeatable.")] = None,
    append: Annotated[str, typer.Option(help="More kernel command line.")] = "",
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE[:GUESTPATH]", help="Put a file or folder into the guest."),
    ] = None,
    accel: Annotated[str, typer.Option(help="auto, kvm or tcg.")] = "auto",
    qemu_arg: Annotated[list[str] | None, typer.Option(help="A raw QEMU argument. Repeatable.")] = None,
) -> None:
    """A shell in a fresh guest, on this terminal; leave it with exit or Ctrl-D."""
    from lab.boot import guest as guests

    spec = guests.BootSpec(
        kernel=kernel, qemu=qemu, memory=memory, cpus=cpus, devices=device or ["virtio-balloon-pci,free-page-reporting=on"], append=append,
        add=[_added(item) for item in add or []], accel=accel, timeout=7 * 86400, command=command or ["sh", "-i"], extra_qemu=qemu_arg or [],
    )  # fmt: skip
    raise typer.Exit(guests.interactive(spec))


@app.command("top", context_settings={"allow_interspersed_args": False})
def top_verb(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- CMD...]", help="What to run in the guest meanwhile."),
    ] = None,
    kernel: Annotated[
        str, typer.Option(help="base, knownzero, off, debug, stock, or an image.")
    ] = "knownzero",
    qemu: Annotated[str | None, typer.Option(help="base, knownzero, stock, or a binary.")] = None,
    memory: Annotated[str, typer.Option(help="Guest memory, as QEMU's -m takes it.")] = "2G",
    cpus: Annotated[int, typer.Option(min=1, max=255, help="Virtual CPUs.")] = 1,
    device: Annotated[list[str] | None, typer.Option(help="A QEMU device. Repeatable.")] = None,
    append: Annotated[str, typer.Option(help="More kernel command line.")] = "",
    accel: Annotated[str, typer.Option(help="auto, kvm or tcg.")] = "auto",
    interval: Annotated[int, typer.Option(min=1, max=3600, help="Seconds between two looks.")] = 2,
    once: Annotated[
        bool, typer.Option("--once", help="Look once, when the command has come to its end.")
    ] = False,
    socket_path: Annotated[
        Path | None,
        typer.Option("--socket", help="No guest: ask a vhost-user-balloon by its control socket."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a look.")] = False,
) -> None:
    """Watch known-zero memory in a fresh guest (zeropages), or a vhost-user balloon; Ctrl-C ends it."""
    from lab.boot import guest as guests
    from lab.boot import top

    if socket_path is not None:
        if command:
            raise errors.UsageError(
                "nothing can be run there",
                "with --socket there is no guest of ours",
                "leave out the command, or --socket",
            )
        with contextlib.suppress(KeyboardInterrupt):
            top.watch(socket_path, interval=interval, once=once, as_json=as_json, out=sys.stdout)
        return
    live = not once and not as_json and sys.stdout.isatty() and sys.stdin.isatty()
    spec = guests.BootSpec(
        kernel=kernel,
        qemu=qemu,
        memory=memory,
        cpus=cpus,
        devices=device or [top.BALLOON],
        append=append,
        accel=accel,
        timeout=top.FOREVER,
        command=top.guest_command(command or [], interval=interval, once=once, as_json=as_json),
        console_lines=None if live else _write(sys.stdout.buffer),
        errors=None if live else _write(sys.stderr.buffer),
    )
    raise typer.Exit(top.show_guest(spec, live))
