# SPDX-License-Identifier: GPL-2.0
"""The pages of the documents, the commands in them, and how a test runs such a command."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.boot import accel, argv, console, initramfs, resolve
from lab.boot.argv import APPEND, APPEND_TCG
from lab.boot.guest import COMES_UP
from lab.boot.verdict import EmulatorFault
from lab.build import daemon
from lab.core.paths import REPO

PAGES = sorted(
    [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md"), *REPO.glob("vhost-user-balloon/**/*.md")]
)
TUTORIAL = REPO / "docs" / "tutorial.md"
SANDBOXES = REPO / "docs" / "how-to" / "sandboxes.md"
FLUSH = "echo 0 > /sys/kernel/mm/page_reporting/flush"
READY = "the guest is ready"
STAYS = f"{FLUSH}; echo {READY} > /dev/console; sleep 1000"


@dataclass(frozen=True)
class Block:
    """Lines that are set apart: commands (``kind`` is sh), or what ``kind`` says."""

    kind: str
    lines: tuple[str, ...]


def blocks(text: str) -> list[Block]:
    """The indented and the fenced blocks of a page; AssertionError when a fence is never closed."""
    found: list[Block] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        fence = re.match(r"( *)(```+|~~~+)(.*)", lines[at])
        indented = lines[at].startswith(("    ", "\t")) and (at == 0 or not lines[at - 1].strip())
        held: list[str] = []
        if fence:
            at += 1
            while at < len(lines) and lines[at].strip() != fence[2]:
                held.append(lines[at].removeprefix(fence[1]))
                at += 1
            assert at < len(lines), f"a fence is never closed: {fence[0]}"
            found.append(Block(fence[3].strip() or "?", tuple(held)))
        elif indented:
            while at < len(lines) and (
                lines[at].startswith(("    ", "\t")) or not lines[at].strip()
            ):
                held.append(lines[at].expandtabs(4)[4:])
                at += 1
            found.append(Block("sh", tuple(held)))
            continue
        at += 1
    return found


def commands_in(text: str) -> list[str]:
    """All commands of a text, in their order.

    Lines that go on are joined, comments are left out.
    """
    found = []
    for block in blocks(text):
        if block.kind == "sh":
            joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(block.lines))
            found += [re.sub(r"(^|\s+)#\s.*$", "", line).strip() for line in joined.splitlines()]
    return [line for line in found if line]


def commands(page: Path) -> list[str]:
    return commands_in(page.read_text(encoding="utf-8"))


def commands_under(page: Path, title: str) -> list[str]:
    """The commands under a title of the second level."""
    text = page.read_text(encoding="utf-8")
    return commands_in(text.split(f"\n## {title}\n")[1].split("\n## ")[0])


def environment(**more: str) -> dict[str, str]:
    """Where python, and what it brings, comes first."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}


def follow(
    line: str, folder: Path, timeout: float = 600, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command as a reader would, in a folder; AssertionError when it fails."""
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=folder,
        env=environment(**(more or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


@pytest.fixture
def machine() -> Iterator[Path]:
    """A folder in place of /run/vm1, with the daemon and our QEMU in its bin.

    Unix sockets want a short path.
    """
    with tempfile.TemporaryDirectory(prefix="kz-doc-") as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        (folder / "bin" / "vhost-user-balloon").symlink_to(daemon.build())
        (folder / "bin" / "qemu-system-x86_64").symlink_to(resolve.qemu(None))
        yield folder


@contextlib.contextmanager
def started(line: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that runs beside others; killed with the block."""
    path = f"{folder / 'bin'}:{environment()['PATH']}"
    argv = shlex.split(line.removesuffix("&").replace("/run/vm1", str(folder)))
    # Popen looks for a program in our own PATH.
    argv[0] = shutil.which(argv[0], path=path) or argv[0]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            argv,
            cwd=REPO,
            env=environment(PATH=path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def qemu_arguments(folder: Path, script: str = STAYS) -> str:
    """What the documents leave to the reader.

    A kernel, and a system that runs a script: to report its memory, and to stay.
    """
    image, _ = resolve.kernel("knownzero")
    chosen = accel.choose("auto", resolve.qemu(None)).name
    initrd, log = folder / "initrd", folder / "console"
    initramfs.write(initrd, ["sh", "-ec", script], "none", [], [])
    words = ["-nodefaults", "-display", "none", "-no-reboot", "-machine", "q35", *argv.cpu(chosen)]
    words += ["-kernel", str(image), "-initrd", str(initrd), "-serial", f"file:{log}"]
    words += ["-append", f"{APPEND} {APPEND_TCG}" if chosen == "tcg" else APPEND]
    return shlex.join(words)


def wait_until_ready(process: subprocess.Popen[str], console_log: Path) -> None:
    """Wait for the guest; EmulatorFault when it never came up for no fault of ours."""
    deadline = time.monotonic() + COMES_UP
    while True:
        text = console_log.read_text(errors="replace") if console_log.exists() else ""
        if READY in text:
            return
        if process.poll() is not None or time.monotonic() > deadline:
            if console.timer_race(text) or (process.poll() is None and console.is_hang(text)):
                raise EmulatorFault(
                    "the guest never came up", console.last_lines(text), "run it again"
                )
            log = (console_log.parent / "log").read_text(errors="replace")
            raise AssertionError(f"QEMU: {process.poll()}\n{log}\n{text[-2000:]}")
        time.sleep(0.05)
