# SPDX-License-Identifier: GPL-2.0
"""The command line of a guest, made without files, builds and guests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.boot import argv
from lab.boot.argv import Ends, Images
from lab.boot.spec import BootSpec

NOWHERE = Path("/nowhere")


def ends(*names: str, **more: object) -> Ends:
    sockets = {name: 10 + at for at, name in enumerate(names)}
    return Ends(NOWHERE / "initrd", NOWHERE / "console", sockets, **more)  # type: ignore[arg-type]


def images(accel: str = "tcg", tsc_khz: int = 0) -> Images:
    return Images(NOWHERE / "kernel", accel, NOWHERE / "qemu", (), argv.FRONT_END, tsc_khz)


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_a_guest_with_channels_and_devices() -> None:
    spec = BootSpec(
        memory="1G", cpus=2, devices=["virtio-rng-pci"], append="quiet", extra_qemu=["-S"]
    )
    words = argv.make(spec, images(), ends("ctl", "out", "qmp"))
    assert words[0] == "/nowhere/qemu" and words[-1] == "-S"
    assert (value(words, "-m"), value(words, "-smp"), value(words, "-machine")) == (
        "1G",
        "2",
        "q35",
    )
    assert value(words, "-append") == f"{argv.APPEND} {argv.APPEND_TCG} quiet"
    text = " ".join(words)
    assert "-chardev socket,id=kzout,fd=11 -device virtserialport,chardev=kzout,name=kz.out" in text
    assert "-chardev socket,id=kzqmp,fd=12 -mon chardev=kzqmp,mode=control" in text
    assert "-device virtio-rng-pci" in text


@pytest.mark.parametrize(
    ("accel", "khz", "extra", "counter", "tcg"),
    [
        ("tcg", 2100000, [], True, True),
        ("tcg", 2100000, ["-icount", "0"], False, True),
        ("tcg", 0, [], False, True),
        ("kvm", 2100000, [], False, False),
    ],
)
def test_an_emulated_counter_gets_the_machines_speed(
    accel: str, khz: int, extra: list[str], counter: bool, tcg: bool
) -> None:
    line = value(argv.make(BootSpec(extra_qemu=extra), images(accel, khz), ends()), "-append")
    assert (f"tsc_early_khz={khz}" in line, argv.APPEND_TCG in line) == (counter, tcg)


def test_the_daemon_is_a_device_with_shared_memory() -> None:
    spec = BootSpec(
        memory="1G", devices=["daemon,target=1M", "virtio-rng-pci"], shared_memory="hugetlb=on"
    )
    assert spec.daemon_options() == ["--target=1M"]
    words = argv.make(spec, images(), ends(daemon=NOWHERE / "socket"))
    assert "memory-backend-memfd,hugetlb=on,id=kzmemory,size=1G,share=on" in words
    assert "socket,id=kzballoon,path=/nowhere/socket,reconnect-ms=100" in words
    assert "vhost-user-balloon-pci,chardev=kzballoon" in words and "daemon,target=1M" not in words
    words = argv.make(
        spec, replace(images(), front_end=argv.GENERIC), ends(daemon=NOWHERE / "socket")
    )
    assert "socket,id=kzballoon,path=/nowhere/socket" in words
    assert f"{argv.GENERIC},chardev=kzballoon" in words


def test_the_emulated_processor_clears_memory_word_by_word() -> None:
    assert value(argv.cpu("tcg"), "-cpu").startswith("qemu64")
    assert "erms" not in " ".join(argv.cpu("tcg"))
