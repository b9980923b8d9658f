# SPDX-License-Identifier: GPL-2.0
"""``kz conform``: boot guest/conform.c on any VMM, and see what the host gets back."""

import contextlib
import re
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lab.boot import argv, initramfs, resolve
from lab.core import paths, progress, run
from lab.core.errors import LabError, TestFailure, UsageError

PLACES = ("{kernel}", "{initrd}", "{append}", "{memory}")
APPEND = {"x86_64": f"{argv.APPEND} {argv.APPEND_TCG} retain_initrd", "um": argv.APPEND_UM}
MIB = 1 << 20
# Of free memory, the lists of CPUs and pieces below 2 MiB are not reported.
SMALL = 16 * MIB
README = """Boot bzImage with the initramfs on your VMM, with a balloon, 1 GiB of memory and this
command line:

    {append}

The guest prints a Markdown table on its serial console and switches itself off. The lines for a
pull request:

    grep '^|' console.log

`kz conform` of the project does this and also measures what your VMM gives back to its host.
"""


def files(kernel: str, arch: str, folder: Path) -> tuple[Path, Path]:
    """The kernel, and an initramfs of the probe, which starts that kernel again."""
    image, initrd = resolve.kernel(kernel, arch)[0], folder / "initramfs"
    initramfs.write(initrd, ["conform"], "none", [(image, "/kz/kernel")], [], arch)
    return image, initrd


def bundle(target: Path, kernel: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kz-conform-") as folder:
        image, initrd = files(kernel, "x86_64", Path(folder))
        readme = Path(folder) / "README"
        readme.write_text(README.format(append=APPEND["x86_64"]), encoding="utf-8")
        try:
            with tarfile.open(target, "w:gz") as archive:
                for file, name in ((image, "bzImage"), (initrd, "initramfs"), (readme, "README")):
                    archive.add(file, f"conform/{name}")
        except OSError as error:
            fix = "name a file that you may write"
            raise UsageError(f"Bad --bundle: {target}", str(error.strerror), fix) from None


def _words(command: Sequence[str], values: dict[str, str], arch: str) -> list[str]:
    if missing := [place for place in PLACES[:3] if not any(place in word for word in command)]:
        why = f"{', '.join(missing)} missing: the VMM needs all three"
        fix = "see the example in `kz conform --help`"
        raise UsageError(f"Bad command: {' '.join(command)}", why, fix)
    found: list[str] = []
    for word in command:
        replaced = re.sub(r"\{\w+\}", lambda place: values.get(place[0], place[0]), word)
        found += replaced.split() if word == "{append}" and arch == "um" else [replaced]
    return found


def _resident(process: int, session: bool) -> int:
    """Resident bytes of a process; ``session``: of the largest one in its session."""
    found = [0]
    for entry in Path("/proc").glob("[0-9]*" if session else str(process)):
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if not session or int(fields[3]) == process:
                found.append(int((entry / "statm").read_text().split()[1]) * 4096)
    return max(found)


def host_row(before: int, after: int, reported: int) -> str:
    """The row of the table about memory that the host has.

    Bytes before and after a report of ``reported``.
    """
    falls = before - after
    enough = min(0.8 * reported, max(0.5 * reported, reported - SMALL))
    verdict = "PASS" if falls > enough else "FAIL"
    seen = (
        f"{before // MIB} → {after // MIB} MiB resident after {reported // MIB} MiB were reported"
    )
    return f"| host memory | {verdict} | {seen} |"


def check(
    command: Sequence[str], *, kernel: str, arch: str, memory: str, timeout: float, pid: int | None
) -> list[str]:
    """Boot the probe; the lines of its tables.

    TestFailure when the guest does not get to its end.
    """
    if pid is not None and not Path(f"/proc/{pid}/statm").is_file():
        raise UsageError(
            f"Bad --pid: {pid}", "no process has this number", "name the process of the VMM"
        )
    if arch not in APPEND:
        raise UsageError(f"Bad --arch: {arch}", "it is unsupported", f"use {' or '.join(APPEND)}")
    _words(command, {}, arch)
    if not shutil.which(command[0]) and not any(place in command[0] for place in PLACES):
        raise UsageError(f"Bad command: {command[0]}", "there is no such program", "name your VMM")
    folder = paths.run_folder("conform")
    image, initrd = files(kernel, arch, folder)
    values = dict(zip(PLACES, (str(image), str(initrd), APPEND[arch], memory), strict=True))
    words = _words(command, values, arch)
    log, null, pipe = folder / "console.log", subprocess.DEVNULL, subprocess.PIPE
    lines: list[str] = []
    dirty, reported, again, ended = 0, False, False, False
    try:
        process = subprocess.Popen(
            words, stdin=null, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        raise UsageError(f"Bad command: {words[0]}", str(error.strerror), "name your VMM") from None
    assert process.stdout
    watchdog = threading.Timer(timeout, run.end_group, [process])
    watchdog.start()
    progress.note(f"booting the probe (console: {log})")
    try:
        with log.open("wb") as console:
            for raw in process.stdout:
                console.write(raw)
                console.flush()
                line = raw.decode(errors="replace").strip()
                if line.startswith("|") or not line:
                    lines += [line] if line or (lines and lines[-1]) else []
                elif line == "conform: dirty":
                    dirty = _resident(pid or process.pid, pid is None)
                elif match := re.fullmatch(r"conform: reported (\d+)", line):
                    time.sleep(0.2)
                    now = _resident(pid or process.pid, pid is None)
                    lines += [] if reported else [host_row(dirty, now, int(match[1]))]
                    reported = True
                elif line.startswith("conform: device"):
                    reported = False
                    lines.append(f"**{line.removeprefix('conform: device ')}**")
                again = again or line == "conform: kexec"
                ended = ended or line.startswith("conform: end")
    finally:
        watchdog.cancel()
        run.end_group(process)
    last = log.read_text(errors="replace").splitlines()[-8:]
    if again and not ended:
        lines.append(f"| reboot by kexec in the middle of reports | FAIL | {last[-1]} |")
    elif not ended:
        why = "\n".join(last) or "nothing was printed: put your VMM's serial console on stdout"
        raise TestFailure("the guest did not get to the end of the checks", why, f"read {log}")
    if not any("| PASS |" in line or "| FAIL |" in line for line in lines):
        raise LabError(
            "nothing was checked", "the guest has no balloon", "add a balloon to your command"
        )
    return lines
