# SPDX-License-Identifier: GPL-2.0
"""glibc's own tests of malloc, with all sources of zeros at work and every skipped page read, and
on the base.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab.boot.guest import BootResult
from lab.build.images import jobs
from lab.core import lock, paths, progress, run
from lab.machine import apt, debs, tools
from tests.guest.guests import (
    BALLOON,
    CHECK,
    HUGE_PAGES,
    STRESS_SEED,
    Record,
    counters,
    expect_at_least,
    fine,
    hunted,
    text,
)
from tests.guest.guests import run as boot
from tests.guest.test_stress_ng import SOURCES

pytestmark = [pytest.mark.boots, pytest.mark.slow, pytest.mark.nightly, pytest.mark.hunt]

PLACE = "/glibc"
SECONDS = 900  # for each of them, under emulation
CONFIGURE = ("--prefix=/usr", "--disable-werror", "--disable-nscd", "--disable-crypt")
# Debian's source has no manual, which the makefiles of all folders expect.
MANUAL = "subdir := manual\ninclude ../Makeconfig\ninclude ../Rules\n"
# Runs in place of a test, and writes down how the test is to be run.
RECORDER = "#!/bin/sh\n{ printf '%s\\037' \"$@\"; echo; } >> {commands}\n"
# Checks of the C library's own, which run the same tests again; and two that take over ten minutes
# under emulation.
LEFT_OUT = r"try tst-mallocfork[23]|try [^ ]*-(malloc-check|mcheck) "
RAN = re.compile(r"^glibc: (\S+): (\d+)$", re.MULTILINE)
HUNT = 30


def made() -> Path:
    """A folder with glibc's tests of malloc, their libraries, and the script ``commands``, which
    runs each with ``try``.
    """
    release, source = apt.PrivateApt(apt.codename(), "deb-src"), paths.sub("downloads")
    release.update()
    version = release.show("glibc")[0]["version"]
    target = paths.sub("guest") / f"glibc-{version}"
    if target.is_dir():
        return target
    tools.need("linux")  # a compiler, make and bison
    log, fix = paths.log_file("glibc"), "see the log"
    with (
        progress.step(f"building glibc {version} and its tests of malloc", log),
        tempfile.TemporaryDirectory(prefix=".glibc-", dir=source) as name,
        lock.new_directory(target) as work,
    ):
        folder = Path(name)
        (archive,) = release.download("glibc", folder)
        run.logged(["tar", "xf", archive, "-C", folder], log, f"cannot unpack {archive.name}", fix)
        (tree,) = folder.glob("glibc-*/")
        (tree / "manual").mkdir()
        (tree / "manual" / "Makefile").write_text(MANUAL)
        gawk = debs.with_dependencies("gawk", "usr/bin/gawk")
        program = shlex.join([*debs.loader(gawk), str(gawk / "usr/bin/gawk")])
        script(folder / "bin" / "gawk", f'#!/bin/sh\nexec {program} "$@"\n')
        script(folder / "record", RECORDER.replace("{commands}", str(folder / "commands")))
        (folder / "build").mkdir()
        environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        tests = ["make", "malloc/tests"]
        commands: list[list[str | Path]] = [
            [tree / "configure", *CONFIGURE],
            ["make", f"-j{jobs()}"],
            [*tests, f"-j{jobs()}", "run-built-tests=no"],
            [*tests, f"test-wrapper={folder / 'record'}"],
        ]
        for argv in commands:
            run.logged(
                argv, log, "glibc does not build", fix, cwd=folder / "build", env=environment
            )
        collect(folder, work)
    return target


def script(file: Path, content: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    file.chmod(0o755)


def collect(folder: Path, work: Path) -> None:
    """Copy what the recorded commands need, all into one folder, and write the commands for it."""
    build = folder / "build"
    under = re.compile(re.escape(str(build)) + r"/(?:[\w.+-]*/)*([\w.+-]+)")
    lines, files = [], [*build.glob("**/lib*.so.[0-9]*")]
    for line in (folder / "commands").read_text().splitlines():
        words = line.rstrip("\037").split("\037")
        if "--library-path" in words:
            words[words.index("--library-path") + 1] = PLACE
        files += [Path(found[0]) for word in words for found in under.finditer(word)]
        words = [under.sub(rf"{PLACE}/\1", word) for word in words]
        lines.append(shlex.join(["try", words[-1].removeprefix(f"{PLACE}/"), *words]))
    # To end a thread, the C library loads the compiler's.
    files.append(
        Path(
            run.output(
                ["cc", "-print-file-name=libgcc_s.so.1"], "no libgcc_s", "install gcc"
            ).strip()
        )
    )
    for file in {file.resolve(): file for file in files if file.is_file()}.values():
        run.output(
            ["strip", "-g", "-o", work / file.name, file], f"cannot copy {file}", "free some space"
        )
    (work / "commands").write_text("\n".join(lines) + "\n")


def guest(folder: Path, kernel: str, devices: list[str], before: str, after: str) -> BootResult:
    """Run each test once; some want huge pages of a pool, and fall back to others."""
    return boot(
        # tst-safe-linking crashes on purpose: the kernel does not report it.
        f"echo 0 > /proc/sys/debug/exception-trace; {HUGE_PAGES}; echo 64 > "
        f"/proc/sys/vm/nr_overcommit_hugepages; {before}\n"
        "try() { name=$1; shift; code=0; "
        f'TIMEOUTFACTOR=20 timeout -k 10 {SECONDS} "$@" < /dev/null > /tmp/log 2>&1 || code=$?; '
        'echo "glibc: $name: $code"; [ $code = 0 ] || { echo "== $name"; tail -n 20 /tmp/log; } '
        ">&2; }\n"
        f"grep -Ev '{LEFT_OUT}' {PLACE}/commands > /tmp/commands; . /tmp/commands\n{after}",
        kernel=kernel,
        devices=devices,
        append=CHECK,
        cpus=2,
        memory="2G",
        add=[(file, f"{PLACE}/{file.name}") for file in sorted(folder.iterdir())],
        timeout=12000.0,
    )


def ended(result: BootResult) -> dict[str, int]:
    return {name: int(code) for name, code in RAN.findall(text(result))}


@pytest.mark.timeout(30000)
def test_malloc(record_property: Record) -> None:
    hunt = f"leak_hunter --setup --seconds {HUNT} --seed {STRESS_SEED} --workers 2 --dirty 96"
    after, folder = f"{hunt}; grep pgzeroed_ /proc/vmstat", made()
    with ThreadPoolExecutor() as both:
        first = both.submit(guest, folder, "knownzero", [BALLOON], SOURCES, after)
        base = guest(folder, "base", [], "", "")
        ours = first.result()
    fine(ours)
    fine(base)
    hunted(ours, record_property)
    with_series, without = ended(ours), ended(base)
    print(f"{len(without)} tests of malloc end on base with {dict(Counter(without.values()))}")
    changed = {
        name: (code, with_series.get(name))
        for name, code in without.items()
        if with_series.get(name) != code
    }
    assert not changed, f"on base and ours: {changed}\n{ours.stderr[-3000:]}"
    commands = (folder / "commands").read_text().splitlines()
    assert len(without) == len([line for line in commands if not re.match(LEFT_OUT, line)])
    assert Counter(without.values())[0] > 0.9 * len(without), base.stderr[-3000:]
    expect_at_least(counters(ours)["pgzeroed_skip"], 1)
