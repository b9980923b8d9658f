# SPDX-License-Identifier: GPL-2.0
"""``kz top``: the counters of a guest's zero pages, or of a vhost-user balloon, as they change."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lab.build import daemon
from lab.core.errors import LabError
from lab.core.units import human

# Of the guest: zeropages, and the user's command, which runs behind the view, or ends before the
# only look.
BESIDE = (
    '[ $# = 0 ] || "$@" >/dev/null 2>&1 </dev/null & exec zeropages --interval {interval}{more}'
)
BEFORE = '[ $# = 0 ] || "$@" >&2 </dev/null || exit; exec zeropages --once{more}'
# The daemon's counters in bytes.
COUNTED = ("inflated", "reported", "discarded", "proven_zero")


@dataclass(frozen=True)
class Look:
    """A daemon's status and its time."""

    seconds: float
    status: dict[str, Any]


def ask(path: Path) -> Look:
    """A daemon's status, by its control socket; raises LabError when there is no answer."""
    try:
        status = daemon.ask(path, command="status")
    except (OSError, ValueError) as error:
        why, fix = (
            str(error) or type(error).__name__,
            "name the socket of a daemon's option --control",
        )
        raise LabError(f"no answer from {path}", why, fix) from None
    if not isinstance(status, dict) or not status.get("ok"):
        raise LabError(f"{path} refuses to answer", str(status), "name the control socket")
    return Look(time.monotonic(), status)


def rates(now: Look, before: Look | None) -> dict[str, float] | None:
    """Bytes a second since the look before."""
    if before is None or now.seconds <= before.seconds:
        return None
    span = now.seconds - before.seconds
    return {name: max(0, now.status[name] - before.status[name]) / span for name in COUNTED}


def view(now: Look, before: Look | None) -> str:
    status, speed = now.status, rates(now, before)
    problems = "; ".join(status["problems"])
    works = "Yes: memory goes back to the host" if status["working"] else "No"
    lines = [
        f"{works}{': ' if not status['working'] else '; but ' if problems else '.'}{problems}",
        "",
        f"{'features':18}{', '.join(status['features']) or 'none'}",
        f"{'balloon':18}{human(status['actual'], 'bytes')}, wanted "
        f"{human(status['target'], 'bytes')}",
        "",
    ]
    for name in COUNTED:
        rate = f"{human(speed[name], 'bytes')}/s" if speed else "-"
        lines.append(f"{name.replace('_', ' '):18}{human(status[name], 'bytes'):>14}{rate:>16}")
    for kind, title in (("skipped", "not given back"), ("unproven", "not proven zero")):
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
