# SPDX-License-Identifier: GPL-2.0
"""Every command in the documents is run.

Here, or by a test that is named with the reason why not here.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab import clidoc
from lab.boot import accel, argv, console, initramfs, resolve
from lab.boot.argv import APPEND, APPEND_TCG
from lab.boot.guest import COMES_UP, boot
from lab.boot.spec import BootSpec
from lab.boot.verdict import EmulatorFault
from lab.build import daemon
from lab.core import paths
from lab.core.paths import REPO
from tests.lab.test_docs import PAGES, section

# Generated: what it has set apart is how each verb is called, and no command.
PAGES_WITH_COMMANDS = [page for page in PAGES if page != clidoc.PAGE]
# Blocks that hold no commands, by what they say they are.
KINDS = ("text", "xml", "json", "kconfig", "options")


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


def commands_of(block: Block) -> list[str]:
    """Its commands: lines that go on are joined, comments are left out."""
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(block.lines))
    lines = (re.sub(r"(^|\s+)#\s.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def commands(page: Path) -> list[str]:
    """All commands of a page, in their order."""
    return [
        line
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.kind == "sh"
        for line in commands_of(block)
    ]


def commands_under(page: Path, title: str) -> list[str]:
    """The commands under a title of the second level."""
    part = page.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [line for block in blocks(part) if block.kind == "sh" for line in commands_of(block)]


TUTORIAL = REPO / "docs" / "tutorial.md"
FLUSH = "echo 0 > /sys/kernel/mm/page_reporting/flush"
ZP = "/sys/kernel/mm/zero_page"

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
    f"echo 1 > {ZP}/enabled": r"\A\Z",
}
# The file has the new value afterwards.
WRITTEN = {
    f"echo 1 > {ZP}/enabled",
}

# Run on the machine, in a folder of their own, by test_a_program_for_any_machine.
ON_ANY_MACHINE = (
    "make -C tools/zeropages deb",
    "tools/zeropages/zeropages --once",
)

# Run with QEMU and a daemon, by test_the_daemon_can_be_used_as_described: what each must print.
CONTROL = "--control /run/vm1/control"
DAEMON = f"vhost-user-balloon --socket-path /run/vm1/balloon {CONTROL} &"
QEMU = (
    "qemu-system-x86_64 … -m 4G -object memory-backend-memfd,id=mem,size=4G,share=on -machine "
    "memory-backend=mem -chardev socket,id=balloon,path=/run/vm1/balloon,reconnect-ms=1000 "
    "-device vhost-user-balloon-pci,chardev=balloon"
)
HUGE = "memory-backend-file,id=mem,size=4G,mem-path=/dev/shm,align=2M,share=on"
STOCK_QEMU = (
    f"qemu-system-x86_64 … -m 4G -object {HUGE} -machine memory-backend=mem -chardev "
    "socket,id=balloon,path=/run/vm1/balloon -device "
    "vhost-user-test-device-pci,chardev=balloon,virtio-id=5,num_vqs=5,vq_size=128,config_size=24"
)
RUN = (
    f"vhost-user-balloon run {CONTROL} -- qemu-system-x86_64 … -m 4G -object {HUGE} -machine "
    "memory-backend=mem"
)
CONFORM = (
    "./kz conform -- qemu-system-x86_64 -nographic -no-reboot -m {memory} -kernel {kernel} "
    "-initrd {initrd} -append {append} -device virtio-balloon-pci,free-page-reporting=on"
)
LIVE = "./kz top --socket /run/vm1/control"
WITH_A_DAEMON = {
    f"vhost-user-balloon status {CONTROL}": r"\AIt works\.\n(?s:.*) of it proven zero\n",
    "vhost-user-balloon target 128M --wait 30 "
    f"{CONTROL}": r"\Atarget 128 MiB, the guest has given 128 MiB$",
    f"vhost-user-balloon stats {CONTROL}": r"(?m)^free_memory +\d+$",
    f"vhost-user-balloon discard off {CONTROL}": r"\Amemory is kept$",
    LIVE: r"\ANo: giving memory back is suspended ",
}

BZIMAGE = "make -C ~/kz/linux O=$HOME/kz/obj -j2 bzImage"
OF_BZIMAGE = (
    "./kz boot --kernel ~/kz/obj/arch/x86/boot/bzImage --device "
    "virtio-balloon-pci,free-page-reporting=on -- zeropages --once"
)
AM = "git am ../knownzero/linux/parts/{fixes-mm,fixes-virtio,fixes-pm,content,zeroed}/*.patch"

# Run by night, in a copy of the repository and in this order, by
# test_the_series_can_be_taken_and_changed.
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
# Of these, run in a plain tree beside the repository.
IN_A_PLAIN_TREE = IN_A_COPY[IN_A_COPY.index(AM) :]
# Run by night, each by itself, by test_what_takes_longer: what each must print.
BY_NIGHT = {
    "./kz boot --kernel debug --device daemon -- sh -c 'grep pgzeroed "
    "/proc/vmstat'": r"(?m)^pgzeroed_bad 0$",
    "./kz boot --arch um --kernel debug --device daemon --memory 512M -- zeropages "
    "--once": r"\A(Yes|Ready): ",
    f"./kz boot --device daemon -- sh -c '{FLUSH}; alloc_once --size 256 > /dev/null; zeropages "
    "--once'": r"\AYes: ",
    "./kz build linux --variant debug": r"/bzImage$",
    "./kz demo": r"/out/demo/\S+$",
    "./kz series check linux --against newest": r"(?m)^\| zeroed \| clean \|$",
    "./kz test --quick": r"\d+ passed",
    "./kz test --select zeropages": r"\d+ passed",
}
SHELL = "./kz shell"

# Not run in this file: why, and who runs it, or what does the same. FILE::TEST, or FILE: WORDS that
# are in it.
MINUTES = "it takes minutes"
ENDLESS = "it goes on until it is told to end"
THE_SUITE = "it is what runs this test"
PLACEHOLDER = "it names files of the reader's"
CHANGES = "it changes the machine: a guest is changed instead"
A_BENCH = "it takes minutes to an hour"
COMPARED = "tests/bench/test_compare.py::test_the_verb_prints_json_and_a_table"
INSTALLED = "tests/guest/test_debian.py::test_systemd_boots_and_memory_is_not_zeroed_twice"
FUZZED = "tests/rust/test_fuzz.py::test_nothing_is_found"
IN_ORDER = "tests/kernel/test_both_series.py::test_series_is_in_order"
ON_STOCK = "tests/guest/test_stock.py::test_the_daemon_on_stock_qemu"
LIBVIRT = "tests/operators/test_libvirt.py::test_the_packaged_qemu"
AUTOBALLOON = "tests/operators/test_autoballoon.py"
UNDER_LIBVIRT = "it needs a guest under libvirt"
SANDBOXES = REPO / "docs" / "how-to" / "sandboxes.md"
IN_THEIR_ORDER = "a test runs the commands of this page in their order"
PARKED = {
    "Before parking: free the page cache": "tests/guest/test_sandboxes.py::test_plain_qemu",
    "Plain QEMU": "tests/guest/test_sandboxes.py::test_plain_qemu",
    "Under libvirt": "tests/operators/test_libvirt.py::test_a_sandbox_is_parked_and_restored",
}
STAGE = "tests/lab/test_night.py::test_what_a_stage_runs"
KEY_COMMANDS = (
    'openssl req -new -x509 -newkey rsa:2048 -nodes -days 3650 -subj "/CN=Our kernels/" '
    "-keyout MOK.key -out MOK.pem",
    "cat MOK.key MOK.pem > signing.pem",
    "openssl x509 -in MOK.pem -outform der -out MOK.der",
)
ELSEWHERE: dict[str, tuple[str, str]] = {
    **{
        line: (IN_THEIR_ORDER, test)
        for title, test in PARKED.items()
        for line in commands_under(SANDBOXES, title)
    },
    "./kz top": (ENDLESS, "tests/lab/test_top.py::test_on_a_terminal_it_goes_on_until_ctrl_c"),
    "./kz top -- sh -c 'while sleep 1; do alloc_once --size 256; done'": (
        ENDLESS,
        "tests/lab/test_top.py::test_into_a_pipe_it_goes_on_until_it_is_interrupted",
    ),
    "./kz test": (THE_SUITE, ".ci/run: ./kz test"),
    "KNOWNZERO_NIGHTLY=1 KNOWNZERO_FUZZ_SECONDS=120 ./kz test --select test_fuzz": (
        THE_SUITE,
        FUZZED,
    ),
    "./kz evidence": (
        "it measures for half an hour",
        "tests/bench/test_archive.py::test_what_was_measured_is_sent_and_published",
    ),
    "./kz compare knownzero-evidence.tar.gz": (
        "it needs such an archive",
        "tests/bench/test_archive.py::test_it_is_set_beside_the_published_runs",
    ),
    "./kz publish knownzero-evidence.tar.gz": (
        "it needs such an archive",
        "tests/bench/test_archive.py::test_what_was_measured_is_sent_and_published",
    ),
    "./kz report out/thp/TIME": (
        PLACEHOLDER,
        "tests/bench/test_report.py::test_the_verb_writes_both_files",
    ),
    "./kz compare out/thp/A out/thp/B": (PLACEHOLDER, COMPARED),
    "./kz build daemon --profile release": (
        MINUTES,
        "tests/rust/test_costs.py::test_a_report_costs_little_more_than_its_holes",
    ),
    "./kz series check linux": (
        "it has passed in this run, or with the same files before",
        IN_ORDER,
    ),
    "./kz demo --accel pvm": (
        "it needs the module kvm_pvm and a quiet machine",
        "tests/guest/test_native.py::test_a_guest_runs_natively",
    ),
    "./kz series check linux --each": ("it takes hours", STAGE),
    "./kz test --nightly --stage fuzz --stage matrix": ("it takes hours", STAGE),
    "./kz test --nightly --stage matrix --select configurations": ("it takes hours", STAGE),
    "./kz package kernel": ("it takes an hour", INSTALLED),
    "./kz package kernel --sign signing.pem": (
        "it takes an hour",
        "tests/lab/test_package.py::test_debians_configuration_keeps_what_a_guest_needs",
    ),
    **dict.fromkeys(
        KEY_COMMANDS, (CHANGES, "tests/lab/test_package.py::test_the_documented_key_is_accepted")
    ),
    "sudo mokutil --import MOK.der": (
        "it needs firmware and a console",
        "tests/lab/test_package.py::test_the_documented_key_is_accepted",
    ),
    "./kz package qemu": (
        MINUTES,
        "tests/lab/test_package.py::test_kernel_and_qemu_run_from_their_packages",
    ),
    "./kz package daemon": (
        MINUTES,
        "tests/lab/test_package.py::test_the_daemon_runs_from_its_package",
    ),
    "sudo apt install ./out/packages/FILE.deb": (CHANGES, INSTALLED),
    "sudo apt install -t trixie-backports qemu-system-x86": (CHANGES, INSTALLED),
    "sudo mount -o remount,huge=advise /dev/shm": (CHANGES, ON_STOCK),
    STOCK_QEMU: ("the lab adds these options", ON_STOCK),
    RUN: ("it needs a guest", "tests/guest/test_conform.py::test_stock_qemu_as_in_the_documents"),
    CONFORM: (MINUTES, "tests/guest/test_conform.py::test_the_balloon_of_stock_qemu"),
    "./kz conform --bundle conform.tar.gz": (
        MINUTES,
        "tests/guest/test_conform.py::test_the_bundle_boots_without_the_lab",
    ),
    "make -C tools/autoballoon install": (
        CHANGES,
        f"{AUTOBALLOON}::test_it_is_installed_with_its_manual",
    ),
    "autoballoon --dry-run qmp:/run/vm1/qmp control:/run/vm2/control": (
        ENDLESS,
        f"{AUTOBALLOON}::test_once_leaves_the_target_and_a_dry_run_sets_none",
    ),
    "virsh shutdown vm1": (
        "no program of the lab's guest answers it: the test uses destroy",
        LIBVIRT,
    ),
    "virsh edit vm1": ("it opens an editor: the test defines the result", LIBVIRT),
    "virsh start vm1": (UNDER_LIBVIRT, LIBVIRT),
    "virsh dommemstat vm1": (UNDER_LIBVIRT, LIBVIRT),
    """virsh qemu-monitor-command vm1 '{"execute": "query-balloon"}'""": (UNDER_LIBVIRT, LIBVIRT),
    "groupadd --system balloon-vm1": (
        CHANGES,
        "tests/guest/test_debian.py::test_the_daemons_units_work_under_systemd",
    ),
    "systemctl enable --now vhost-user-balloon@vm1.socket": (
        CHANGES,
        "tests/guest/test_debian.py::test_the_daemons_units_work_under_systemd",
    ),
    "linux mem=512M virtio_uml.device=/run/vm1/balloon:5 …": (
        "the lab starts User-Mode Linux with these options",
        "tests/guest/test_vhost_user.py::test_user_mode_linux",
    ),
    f"vhost-user-balloon status --json {CONTROL}": (
        "the test of the units runs it",
        "tests/guest/test_debian.py::test_the_daemons_units_work_under_systemd",
    ),
    f"vhost-user-balloon report {CONTROL}": (
        "it needs a guest whose driver has the command",
        "tests/guest/test_report_now_daemon.py::test_report_under_patched_qemu",
    ),
    f"vhost-user-balloon flush {CONTROL}": (
        "it takes all memory of a guest, page by page",
        "tests/guest/test_vhost_user.py::test_flush_from_the_host",
    ),
    "cargo test --locked": (MINUTES, "tests/rust/test_vhost_user_balloon.py::test_its_own_tests"),
    "WRITE_MAN=1 cargo test --test man": (
        MINUTES,
        "tests/rust/test_vhost_user_balloon.py::test_its_own_tests",
    ),
    "systemd-socket-activate -l 127.0.0.1:9405 /lib/systemd/systemd-socket-proxyd "
    "/run/vm1/metrics": (
        "it runs until it is ended",
        "tests/rust/test_prometheus.py::test_prometheus_answers_every_query_of_the_dashboard",
    ),
    "cargo +nightly fuzz run queues": (
        "it wants a toolchain of its own: the same target, without",
        FUZZED,
    ),
    "./kz bench all": (A_BENCH, STAGE),
    "./kz bench life --only park": (
        A_BENCH,
        "tests/bench/test_bench_life.py::test_a_phase_by_itself_has_what_it_needs",
    ),
    "./kz bench both-ends": (A_BENCH, STAGE),
}

# Run one by one, in their order, by test_the_tutorial_can_be_followed.
OF_THE_TUTORIAL = [
    line for line in commands(TUTORIAL) if line not in ELSEWHERE and line not in BY_NIGHT
]

RUN_HERE = {
    *IN_A_GUEST,
    *ON_ANY_MACHINE,
    DAEMON,
    QEMU,
    *WITH_A_DAEMON,
    *IN_A_COPY,
    *BY_NIGHT,
    SHELL,
    *OF_THE_TUTORIAL,
}


def without_a_test(lines: list[str]) -> list[str]:
    """Commands that nobody runs."""
    return [line for line in lines if line not in RUN_HERE and line not in ELSEWHERE]


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda page: str(page.relative_to(REPO)))
def test_every_command_is_run(page: Path) -> None:
    lost = without_a_test(commands(page))
    assert not lost, (
        "run it in a test of this file, or name the test that does in ELSEWHERE: " + "; ".join(lost)
    )


def test_the_lists_have_nothing_that_is_in_no_page() -> None:
    documented = {line for page in PAGES_WITH_COMMANDS for line in commands(page)}
    assert documented
    assert sorted(RUN_HERE - documented) == []
    assert sorted(set(ELSEWHERE) - documented) == []
    assert sorted(RUN_HERE & set(ELSEWHERE)) == []


def functions(file: Path) -> set[str]:
    """The tests of a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def is_there(who: str) -> bool:
    """Whether a test, or a program with these words, exists."""
    file, _, test = who.partition("::")
    if test:
        return (REPO / file).is_file() and test in functions(REPO / file)
    file, _, words = who.partition(": ")
    text = (REPO / file).read_text(encoding="utf-8") if (REPO / file).is_file() else ""
    # As the words of a shell, or as a list of Python's.
    return words in re.sub(r"[\s,\"']+", " ", text)


@pytest.mark.parametrize("who", sorted({who for _, who in ELSEWHERE.values()}))
def test_each_named_test_exists(who: str) -> None:
    assert is_there(who)


def test_what_has_no_test_is_found() -> None:
    page = """
# A page

    ./kz nonsense            # of the new kind
    vhost-user-balloon \\
        --nonsense

- a list
    that goes on

```sh
echo 5 > /sys/nonsense
```

```text
not run
```
"""
    found = [line for block in blocks(page) if block.kind == "sh" for line in commands_of(block)]
    assert found == ["./kz nonsense", "vhost-user-balloon --nonsense", "echo 5 > /sys/nonsense"]
    assert without_a_test(found) == found
    assert not is_there("tests/lab/test_docs.py::test_nonsense")
    assert not is_there("tests/lab/test_nonsense.py::test_every_command_is_run")
    assert not is_there(".ci/run: kz nonsense")


def looks_like_a_command(line: str) -> bool:
    """Whether a line begins as some documented command does."""
    programs = {
        re.sub(r"^(\w+=\S+ )+", "", known).split()[0] for known in RUN_HERE | set(ELSEWHERE)
    }
    first = re.sub(r"^([$#] |(\w+=\S+ )+|sudo )", "", line.strip()).split(" ")[0]
    return first in programs


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda page: str(page.relative_to(REPO)))
def test_blocks_without_commands_name_their_kind(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        assert block.kind in ("sh", *KINDS), f"what is this? {block}"
        if block.kind == "sh":
            continue
        assert not [line for line in block.lines if looks_like_a_command(line)]
        text = "\n".join(block.lines)
        if block.kind == "json":
            json.loads(text)
        elif block.kind == "xml":
            check_xml(ElementTree.fromstring(text))
        elif block.kind == "kconfig":
            check_kconfig(block.lines)
        elif block.kind == "options":
            check_options(text)


def test_a_command_is_known_by_its_first_word() -> None:
    assert looks_like_a_command("./kz demo")
    assert looks_like_a_command("$ sudo apt install x")
    assert looks_like_a_command("KNOWNZERO_NIGHTLY=1 ./kz test")
    assert not looks_like_a_command("Yes: it works")


def properties() -> set[str]:
    """Properties of QEMU's that the documents may name."""
    return {*section("QEMU properties"), "free-page-reporting", "reconnect-ms", "id", "path"}


def check_xml(root: ElementTree.Element) -> None:
    """What libvirt hands to QEMU unread has to be understood there."""
    for element in root.iter():
        if element.tag.endswith("}property"):
            assert element.get("name") in properties()
        if element.tag.endswith("}arg"):
            check_options(element.get("value", ""))


def check_kconfig(lines: tuple[str, ...]) -> None:
    """Options are the series', or those of the kernel that ours are built with."""
    known = (REPO / "linux" / "configs" / "x86_64.config").read_text(encoding="utf-8")
    for line in lines:
        option = line.split("#")[0].strip()
        name = option.removesuffix("=y")
        assert (
            name in section("Kernel options") or option in known or name == "CONFIG_PAGE_REPORTING"
        ), line


def check_options(text: str) -> None:
    """Devices, their properties and parameters of the kernel are in the reference."""
    for name, value in re.findall(r"(?:^|\s)([\w.]+)=(\w+)(?=\s|$)", text):
        assert name in section("Module parameters") + [
            n.rstrip("=") for n in section("Boot parameters")
        ], name
        assert value
    for device in re.findall(r"(?:virtio|vhost-user)-balloon-pci\S*", text):
        for item in device.split(",")[1:]:
            assert item.partition("=")[0] in properties(), item


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


@pytest.mark.boots
@pytest.mark.parametrize("line", OF_THE_TUTORIAL)
def test_the_tutorial_can_be_followed(line: str) -> None:
    done = follow(line, REPO)
    if "zeropages" in line:
        assert done.stdout.split(": ")[0] in answers(line), done.stdout


def answers(line: str) -> tuple[str, ...]:
    """How zeropages may begin, by the text that follows a command of the tutorial."""
    rest = TUTORIAL.read_text(encoding="utf-8").split(line + "\n")[1]
    (word,) = re.findall(r"^(Yes|No|Not yet|Ready): ", rest, re.MULTILINE)[:1]
    # Nothing may have been allocated as zeros yet.
    return ("Yes", "Ready") if line.endswith("-- zeropages --once") else (word,)


@pytest.mark.boots
def test_the_commands_for_a_guest() -> None:
    script = ""
    for line in IN_A_GUEST:
        # What was written is read back.
        script += f"{line} && cat {line.split()[-1]}" if line in WRITTEN else line
        script += '\necho "== $?"\n'
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
        assert code == "0", f"{line}: {said}"
        if line in WRITTEN:
            assert said.strip() == line.split()[1], line
        else:
            assert re.search(wanted, said), f"{line}: {said}"


def test_a_program_for_any_machine(tmp_path: Path) -> None:
    for folder in ("tools/zeropages", "LICENSES"):
        shutil.copytree(REPO / folder, tmp_path / folder)
    said = [follow(line, tmp_path).stdout for line in ON_ANY_MACHINE]
    assert re.match(r"(Yes|No|Not yet|Ready): ", said[-1])


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


READY = "the guest is ready"


STAYS = f"{FLUSH}; echo {READY} > /dev/console; sleep 1000"


def qemu_arguments(folder: Path, script: str = STAYS) -> str:
    """What the documents leave to the reader.

    A kernel, and a system that runs a script: to report its memory, and to stay.
    """
    image, _ = resolve.kernel("knownzero")
    chosen = accel.choose("auto", resolve.qemu(None)).name
    initramfs.write(folder / "initrd", ["sh", "-ec", script], "none", [], [])
    words = ["-nodefaults", "-display", "none", "-no-reboot", "-machine", "q35", *argv.cpu(chosen)]
    words += [
        "-kernel",
        str(image),
        "-initrd",
        str(folder / "initrd"),
        "-serial",
        f"file:{folder / 'console'}",
    ]
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


@pytest.mark.boots
def test_the_daemon_can_be_used_as_described(machine: Path) -> None:
    qemu = QEMU.replace("…", qemu_arguments(machine))
    path = f"{machine / 'bin'}:{environment()['PATH']}"
    with started(DAEMON, machine), started(qemu, machine) as process:
        wait_until_ready(process, machine / "console")
        for line, wanted in WITH_A_DAEMON.items():
            if line == LIVE:
                with started(line, machine) as live:
                    assert live.stdout is not None
                    assert re.search(wanted, live.stdout.readline())
                    live.send_signal(signal.SIGINT)
                    assert live.wait(20) == 0
            else:
                said = follow(
                    line.replace("/run/vm1", str(machine)), REPO, more={"PATH": path}
                ).stdout.strip()
                assert re.search(wanted, said), f"{line}: {said}"


@pytest.mark.boots
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("line", BY_NIGHT)
def test_what_takes_longer(line: str) -> None:
    # Tests that run tests: those by day only, or this would have no end.
    done = follow(line, REPO, timeout=3000, more={"KNOWNZERO_NIGHTLY": ""})
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
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


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
    for line in IN_A_COPY:
        if line == AM:
            follow(
                f"git clone -q {home}/kz/linux {tree} && git -C {tree} checkout -q base",
                tmp_path,
                more=names,
            )
        where = tree if line in IN_A_PLAIN_TREE else repository
        # Braces are for bash.
        done = follow(f"bash -c {shlex.quote(line)}", where, timeout=3000, more=names)
        if line == OF_BZIMAGE:
            assert re.match("(Ready|Not yet): ", done.stdout), done.stdout
    assert (home / "kz" / "obj" / "mm" / "page_zeroed.o").is_file()
    assert (tree / "mm" / "page_zeroed.c").is_file()
    assert contents(repository / "linux") == contents(REPO / "linux")
