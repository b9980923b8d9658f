# SPDX-License-Identifier: GPL-2.0
"""The command line of a guest, made without files, builds and guests."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.boot import argv
from lab.boot.argv import Ends, Images
from lab.boot.spec import BootSpec

NOWHERE = Path("/nowhere")


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


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
    images = Images(NOWHERE / "kernel", accel, NOWHERE / "qemu", (), argv.FRONT_END, khz)
    ends = Ends(NOWHERE / "initrd", NOWHERE / "console", {})
    line = value(argv.make(BootSpec(extra_qemu=extra), images, ends), "-append")
    assert (f"tsc_early_khz={khz}" in line, argv.APPEND_TCG in line) == (counter, tcg)


def test_the_emulated_processor_clears_memory_word_by_word() -> None:
    assert value(argv.cpu("tcg"), "-cpu").startswith("qemu64")
    assert "erms" not in " ".join(argv.cpu("tcg"))
