# SPDX-License-Identifier: GPL-2.0
"""What the series adds compiles for other processors, with nothing else configured than what it
needs (P5).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.build.images import jobs
from lab.core import paths, run
from lab.machine import fetch, tools
from lab.patches import apply, parts

PREFIXES = {
    "arm64": "aarch64-linux-gnu-",
    "riscv": "riscv64-linux-gnu-",
    "i386": "i686-linux-gnu-",
    "arm": "arm-linux-gnueabihf-",
    "s390": "s390x-linux-gnu-",
    "powerpc": "powerpc64le-linux-gnu-",
}
# 64 bits and an MMU where Kconfig asks for them, and what selects VIRTIO.
MORE = {
    "arm64": ["VIRTIO_MMIO"],
    "riscv": ["ARCH_RV64I", "VIRTIO_MMIO"],
    "i386": ["VIRTIO_MMIO"],
    "arm": ["MMU", "VIRTIO_MMIO"],
    "s390": ["S390_GUEST"],
    "powerpc": ["PPC64", "CPU_LITTLE_ENDIAN", "VIRTIO_MMIO"],
}
OURS = ["PAGE_ZEROED", "PREZERO_PAGE", "REFPAGE"]
NEEDED = ["PROC_FS", "SYSFS", "VM_EVENT_COUNTERS", "COMPACTION", "VIRTIO_MENU", "VIRTIO_BALLOON"]
OBJECTS = [
    "mm/page_alloc.o",
    "mm/page_zeroed.o",
    "mm/page_reporting.o",
    "mm/prezero.o",
    "mm/refpage.o",
    "drivers/virtio/virtio_balloon.o",
]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", PREFIXES)
def test_it_compiles(arch: str, tmp_path: Path) -> None:
    tools.need("linux", arch)
    wanted = [f"CONFIG_{name}=y" for name in [*MORE[arch], *NEEDED, *OURS]]
    (tmp_path / "wanted").write_text("\n".join(wanted) + "\n", encoding="utf-8")
    with apply.working_copy(parts.get("linux"), fetch.obtain("linux")) as tree:
        make = [
            "make",
            "-C",
            str(tree),
            f"O={tmp_path}/obj",
            f"ARCH={arch}",
            f"CROSS_COMPILE={PREFIXES[arch]}",
        ]
        log = paths.log_file(f"linux-{arch}-objects")
        for argv in (
            [*make, f"KCONFIG_ALLCONFIG={tmp_path}/wanted", "allnoconfig"],
            [*make, f"-j{jobs()}", *OBJECTS],
        ):
            what = f"the series does not compile for {arch}"
            run.logged(argv, log, what, "correct the first error in the log")
    config = (tmp_path / "obj" / ".config").read_text(encoding="utf-8").splitlines()
    assert not [line for line in wanted if line not in config]
    assert "warning:" not in log.read_text(encoding="utf-8", errors="replace")
