# SPDX-License-Identifier: GPL-2.0
"""Commands of the documents, run as a reader would run them."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from lab import clidoc
from lab.boot.guest import boot
from lab.boot.spec import BootSpec
from lab.core import paths
from lab.core.paths import REPO
from tests.documents import (
    FLUSH,
    PAGES,
    SANDBOXES,
    TUTORIAL,
    commands,
    commands_under,
    environment,
    follow,
    machine,
    qemu_arguments,
    started,
    wait_until_ready,
)

__all__ = ["machine"]  # the fixture

ENABLE = "echo 1 > /sys/kernel/mm/zero_page/enabled"
# Run in one guest, in this order: what each must print.
IN_A_GUEST = {
    "zeropages --once": r"\A(Yes|Ready): ",
    "zeropages --json --once": r"\A\{",
    "dmesg": r"Linux version 7",
    "grep -E 'MemFree|^Cached' /proc/meminfo": r"\AMemFree: .*\nCached: ",
    "cat /proc/buddyinfo": r"(?m)^Node 0, zone +DMA32( +\d+){11} *$",
    "cat /sys/module/page_reporting/parameters/page_reporting_order": r"\A9$",
    FLUSH: r"\A\Z",
    "grep pgzeroed /proc/vmstat": r"(?m)^pgzeroed_set_reported [1-9]\d{4,}$",
    "dmesg | grep -E "
    "'page_zeroed|DEVICE_INIT|prezero'": r"not using DEVICE_INIT_ON_INFLATE: refused by parameter",
    ENABLE: r"\A\Z",
}
ON_ANY_MACHINE = ("make -C tools/zeropages deb", "tools/zeropages/zeropages --once")
CONTROL = "--control /run/vm1/control"
DAEMON = f"vhost-user-balloon --socket-path /run/vm1/balloon {CONTROL} &"
QEMU = (
    "qemu-system-x86_64 … -m 4G -object memory-backend-memfd,id=mem,size=4G,share=on -machine "
    "memory-backend=mem -chardev socket,id=balloon,path=/run/vm1/balloon,reconnect-ms=1000 "
    "-device vhost-user-balloon-pci,chardev=balloon"
)
RUN = (
    f"vhost-user-balloon run {CONTROL} -- qemu-system-x86_64 … -m 4G -object "
    "memory-backend-file,id=mem,size=4G,mem-path=/dev/shm,align=2M,share=on -machine "
    "memory-backend=mem"
)
# Run beside a guest with the daemon: what each must print.
WITH_A_DAEMON = {
    f"vhost-user-balloon status {CONTROL}": r"\AIt works\.\n(?s:.*) of it proven zero\n",
    "vhost-user-balloon target 128M --wait 30 "
    f"{CONTROL}": r"\Atarget 128 MiB, the guest has given 128 MiB$",
    f"vhost-user-balloon stats {CONTROL}": r"(?m)^free_memory +\d+$",
    f"vhost-user-balloon discard off {CONTROL}": r"\Amemory is kept$",
}
BZIMAGE = "make -C ~/kz/linux O=$HOME/kz/obj -j2 bzImage"
OF_BZIMAGE = (
    "./kz boot --kernel ~/kz/obj/arch/x86/boot/bzImage --device "
    "virtio-balloon-pci,free-page-reporting=on -- zeropages --once"
)
AM = (
    "git am ../knownzero/linux/parts/"
    "{fixes-stable,fixes-virtio,fixes-mm,fixes-pm,content,zeroed}/*.patch"
)
# Run by night, in a copy of the repository, in this order.
IN_A_COPY = (
    "./kz tree linux --path ~/kz/linux",
    "mkdir -p ~/kz/obj",
    "./kz boot --kernel debug -- zcat /proc/config.gz > ~/kz/obj/.config",
    "make -C ~/kz/linux O=$HOME/kz/obj olddefconfig",
    "make -C ~/kz/linux O=$HOME/kz/obj mm/page_zeroed.o",
    BZIMAGE,
    OF_BZIMAGE,
    "./kz series save linux --path ~/kz/linux",
    AM,
    "./tools/testing/kunit/kunit.py run --kunitconfig mm/tests",
    "git am ../knownzero/linux/parts/{hugetlb,prezero,accept,harness}/*.patch",
    "make -C tools/testing/page_zeroed run",
)
# Run by night, each by itself: what each must print.
BY_NIGHT = {
    "./kz boot --kernel debug --device daemon -- sh -c 'grep pgzeroed "
    "/proc/vmstat'": r"(?m)^pgzeroed_bad 0$",
    "./kz boot --arch um --kernel debug --device daemon --memory 512M -- zeropages "
    "--once": r"\A(Yes|Ready): ",
    f"./kz boot --qemu stock --device daemon -- sh -c '{FLUSH}; alloc_once --size 256 > "
    "/dev/null; zeropages --once'": r"\AYes: ",
    "./kz demo": r"(?m)^Report: \S+/out/demo/\S+/report\.html$",
    "./kz series check linux --against newest": r"(?m)^zeroed +clean$",
}
SHELL = "./kz shell"
OF_THE_TUTORIAL = [
    line for line in commands(TUTORIAL) if line.startswith("./kz boot") and "sleep" not in line
]


def test_what_is_run_is_documented() -> None:
    pages = (page for page in PAGES if page != clidoc.PAGE)
    documented = {line for page in pages for line in commands(page)}
    listed = {*IN_A_GUEST, *ON_ANY_MACHINE, DAEMON, QEMU, RUN, *WITH_A_DAEMON}
    assert sorted(listed.union(IN_A_COPY, BY_NIGHT, [SHELL]) - documented) == []
    assert len(OF_THE_TUTORIAL) == 3
    assert commands_under(SANDBOXES, "Plain QEMU")


@pytest.mark.boots
@pytest.mark.parametrize("line", OF_THE_TUTORIAL)
def test_the_tutorial_can_be_followed(line: str) -> None:
    done = follow(line, REPO)
    rest = TUTORIAL.read_text(encoding="utf-8").split(line + "\n")[1]
    (word,) = re.findall(r"^(Yes|No|Not yet|Ready): ", rest, re.MULTILINE)[:1]
    # Nothing may have been allocated as zeros yet.
    words = ("Yes", "Ready") if line.endswith("-- zeropages --once") else (word,)
    assert done.stdout.split(": ")[0] in words, done.stdout


@pytest.mark.boots
def test_the_commands_for_a_guest() -> None:
    script = ""
    for line in IN_A_GUEST:
        script += f'{line}\necho "== $?"\n'
    script += "cat /sys/kernel/mm/zero_page/enabled"
    done = boot(
        BootSpec(
            memory="1G",
            devices=["virtio-balloon-pci,free-page-reporting=on,device-init-on-inflate=on"],
            append="page_zeroed.verify=1 virtio_balloon.device_init_on_inflate=0",
            command=["sh", "-c", script],
        )
    )
    assert done.exit_code == 0, done.console
    parts = re.split(r"^== (\d+)\n", done.stdout, flags=re.MULTILINE)
    assert len(parts) == 2 * len(IN_A_GUEST) + 1, done.stdout
    for (line, wanted), said, code in zip(
        IN_A_GUEST.items(), parts[0::2], parts[1::2], strict=False
    ):
        assert code == "0" and re.search(wanted, said), f"{line}: {said}"
    assert parts[-1] == "1\n"


def test_a_program_for_any_machine(tmp_path: Path) -> None:
    for folder in ("tools/zeropages", "LICENSES"):
        shutil.copytree(REPO / folder, tmp_path / folder)
    said = [follow(line, tmp_path).stdout for line in ON_ANY_MACHINE]
    assert re.match(r"(Yes|No|Not yet|Ready): ", said[-1])


@pytest.mark.boots
def test_the_daemon_can_be_used_as_described(machine: Path) -> None:
    qemu = QEMU.replace("…", qemu_arguments(machine))
    path = f"{machine / 'bin'}:{environment()['PATH']}"
    with started(DAEMON, machine), started(qemu, machine) as process:
        wait_until_ready(process, machine / "console")
        for line, wanted in WITH_A_DAEMON.items():
            command = line.replace("/run/vm1", str(machine))
            said = follow(command, REPO, more={"PATH": path}).stdout.strip()
            assert re.search(wanted, said), f"{line}: {said}"


@pytest.mark.boots
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("line", BY_NIGHT)
def test_what_takes_longer(line: str) -> None:
    done = follow(line, REPO, timeout=3000)
    assert re.search(BY_NIGHT[line], done.stdout.strip()), done.stdout[-2000:]


@pytest.mark.boots
@pytest.mark.nightly
def test_a_shell_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    seen = b""
    with subprocess.Popen(
        ["sh", "-c", SHELL],
        cwd=REPO,
        env=environment(),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            # Not what is echoed, but what comes of it.
            for wanted, line in ((b"# ", b"echo $((6 * 7))7\n"), (b"\n427", b"exit 5\n")):
                while wanted not in seen.replace(b"\r", b""):
                    seen += os.read(ours, 4096)
                os.write(ours, line)
            with contextlib.suppress(OSError):
                while os.read(ours, 4096):
                    pass
            assert process.wait(60) == 5, seen
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            os.close(ours)


def contents(folder: Path) -> dict[str, bytes]:
    """The files under a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.boots
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_the_series_can_be_taken_and_changed(tmp_path: Path) -> None:
    """The way of README and CONTRIBUTING from a checkout to a tree, a kernel, and back.

    And the parts in a plain tree.
    """
    repository, home, tree = tmp_path / "knownzero", tmp_path / "home", tmp_path / "tree"
    ignored = shutil.ignore_patterns("out", ".git", ".*_cache", ".hypothesis", "__pycache__")
    shutil.copytree(REPO, repository, ignore=ignored, symlinks=True)
    home.mkdir()
    names = {
        f"GIT_{who}_{what}": f"kz@{who}.example"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    names |= {"HOME": str(home), "KNOWNZERO_CACHE": str(paths.cache())}
    where = repository
    for line in IN_A_COPY:
        if line == AM:
            clone = f"git clone -q {home}/kz/linux {tree} && git -C {tree} checkout -q base"
            follow(clone, tmp_path, more=names)
            where = tree
        # Braces are for bash.
        done = follow(f"bash -c {shlex.quote(line)}", where, timeout=3000, more=names)
        if line == OF_BZIMAGE:
            assert re.match("(Ready|Not yet): ", done.stdout), done.stdout
    assert (home / "kz" / "obj" / "mm" / "page_zeroed.o").is_file()
    assert (tree / "mm" / "page_zeroed.c").is_file()
    assert contents(repository / "linux") == contents(REPO / "linux")
