# SPDX-License-Identifier: GPL-2.0
"""``kz top``: what a guest knows of zero pages, or what a vhost-user balloon has done, as it changes."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from lab import boot as guests
from lab import errors
from lab.errors import LabError, UsageError
from lab.units import human

BALLOON = "virtio-balloon-pci,free-page-reporting=on"
FOREVER = 7 * 86400.0
# The command goes on behind the view, or comes to its end before the only look.
BESIDE = '[ $# = 0 ] || "$@" >/dev/null 2>&1 </dev/null & exec zeropages --interval {interval}{more}'
BEFORE = '[ $# = 0 ] || "$@" >&2 </dev/null || exit; exec zeropages --once{more}'
# What the daemon counts in bytes.
COUNTED = ("inflated", "reported", "discarded", "proven_zero")


@dataclass(frozen=True)
class Look:
    """What a daemon said, and when."""

    seconds: float
    status: dict[str, Any]


def guest_command(command: list[str], *, interval: int, once: bool, as_json: bool) -> list[str]:
    """What a guest runs: zeropages, with the user's command beside or before it."""
    script = (BEFORE if once else BESIDE).format(interval=interval, more=" --json" if as_json else "")
    return ["sh", "-c", script, "sh", *command]


def ask(path: Path) -> Look:
    """A daemon's status, by its control socket; raises LabError when there is no answer."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(15)
            connection.connect(str(path))
            connection.sendall(b'{"command":"status"}\n')
            with connection.makefile("rb") as answers:
                status = json.loads(answers.readline())
    except (OSError, ValueError) as error:
        raise LabError(
            f"no answer from {path}",
            str(error) or type(error).__name__,
            "name the control socket of a running vhost-user-balloon (its option --control)",
        ) from None
    if not isinstance(status, dict) or not status.get("ok"):
        raise LabError(f"{path} refuses to answer", str(status), "is it the control socket?")
    return Look(time.monotonic(), status)


def rates(now: Look, before: Look | None) -> dict[str, float] | None:
    """Bytes a second since the look before."""
    if before is None or now.seconds <= before.seconds:
        return None
    span = now.seconds - before.seconds
    return {name: max(0, now.status[name] - before.status[name]) / span for name in COUNTED}


def view(now: Look, before: Look | None) -> str:
    """The daemon's figures as a screen of text."""
    status, speed = now.status, rates(now, before)
    problems = "; ".join(status["problems"])
    works = "Yes: memory goes back to the host" if status["working"] else "No"
    lines = [
        f"{works}{': ' if not status['working'] else '; but ' if problems else '.'}{problems}",
        "",
        f"{'features':18}{', '.join(status['features']) or 'none'}",
        f"{'balloon':18}{human(status['actual'], 'bytes')}, wanted {human(status['target'], 'bytes')}",
        "",
    ]
    for name in COUNTED:
        rate = f"{human(speed[name], 'bytes')}/s" if speed else "-"
        lines.append(f"{name.replace('_', ' '):18}{human(status[name], 'bytes'):>14}{rate:>16}")
    for kind, title in (("skipped", "not given back"), ("unproven", "not said zero")):
        for reason, amount in status[kind].items():
            if amount:
                lines.append(f"{title:18}{human(amount, 'bytes'):>14}  {reason}")
    return "\n".join(lines) + "\n"


def watch(path: Path, *, interval: int, once: bool, as_json: bool, out: IO[str]) -> None:
    """Show a daemon's figures until interrupted, or once."""
    before: Look | None = None
    screen = out.isatty() and not once and not as_json
    while True:
        now = ask(path)
        if as_json:
            out.write(json.dumps({**now.status, "per_second": rates(now, before)}) + "\n")
        else:
            out.write(("\033[H\033[2J" if screen else "") + view(now, before))
        out.flush()
        if once:
            return
        before = now
        time.sleep(interval)


def show_guest(spec: guests.BootSpec, interactive: bool) -> int:
    """Run zeropages in a guest; leaving it with Ctrl-C is how it ends."""
    try:
        code = guests.interactive(spec) if interactive else guests.boot(spec).exit_code
    except KeyboardInterrupt:
        return errors.OK
    return errors.OK if code == errors.INTERRUPTED else code


def _pass_through(stream: IO[bytes], data: bytes) -> None:
    stream.write(data)
    stream.flush()


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""

    @app.command("top", context_settings={"allow_interspersed_args": False})
    def command(
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
        if socket_path is not None:
            if command:
                raise UsageError(
                    "nothing can be run there",
                    "with --socket there is no guest of ours",
                    "leave out the command, or --socket",
                )
            with contextlib.suppress(KeyboardInterrupt):
                watch(socket_path, interval=interval, once=once, as_json=as_json, out=sys.stdout)
            return
        live = not once and not as_json and sys.stdout.isatty() and sys.stdin.isatty()
        spec = guests.BootSpec(
            kernel=kernel,
            qemu=qemu,
            memory=memory,
            cpus=cpus,
            devices=device or [BALLOON],
            append=append,
            accel=accel,
            timeout=FOREVER,
            command=guest_command(command or [], interval=interval, once=once, as_json=as_json),
            console_lines=None if live else lambda data: _pass_through(sys.stdout.buffer, data),
            errors=None if live else lambda data: _pass_through(sys.stderr.buffer, data),
        )
        raise typer.Exit(show_guest(spec, live))
