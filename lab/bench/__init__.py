# SPDX-License-Identifier: GPL-2.0
"""The benches: each measures the base kernel and ours side by side and returns a Result."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Literal

from lab.report.results import Result

Accel = Literal["auto", "kvm", "tcg"]


@dataclass(frozen=True)
class BenchOptions:
    """What a bench is asked to do."""

    pairs: int = 10
    size_mb: int = 256
    memory: str = "2G"
    accel: Accel = "auto"
    base: str = "base"
    ours: str = "knownzero"

    def with_accel(self, accel: Accel) -> BenchOptions:
        """The same with another accelerator."""
        return replace(self, accel=accel)


@dataclass(frozen=True)
class Bench:
    """A bench, what it shows in one sentence, and the module that measures it."""

    name: str
    sentence: str
    module: str

    def run(self, options: BenchOptions) -> Result:
        """Measure; raises LabError when that is not possible."""
        # Imported late: the command line lists the benches without loading what boots guests.
        result: Result = importlib.import_module(self.module).run(options)
        return result


BENCHES: dict[str, Bench] = {
    bench.name: bench
    for bench in (
        Bench("thp", "the main job: 256 MB of huge pages, and all that must hold around it", "lab.bench.thp"),
        Bench("order0", "the same memory in 4 KiB pages", "lab.bench.order0"),
        Bench(
            "hugetlb", "the same memory in huge pages of hugetlb, surplus and persistent", "lab.bench.hugetlb"
        ),
        Bench(
            "page-fault",
            "page faults as fast as they come, while free memory is reported",
            "lab.bench.page_fault",
        ),
        Bench("deflate", "memory that is used again after it was in the balloon", "lab.bench.deflate"),
        Bench(
            "device",
            "the balloon as a process of its own, vhost-user-balloon, against the one in QEMU",
            "lab.bench.device",
        ),
        Bench("host", "host memory that comes back when the guest frees", "lab.bench.hostmemory"),
        Bench(
            "churn",
            "memory allocated and freed all the time, at report delays of 2000, 250 and 50 ms",
            "lab.bench.churn",
        ),
        Bench("prezero", "most of a guest's memory, zeroed before it is wanted", "lab.bench.prezero"),
        Bench(
            "scale",
            "what it costs to report, flush and pre-zero guests of 1, 2, 4 and 8 GB, for each GiB",
            "lab.bench.scale",
        ),
        Bench("lockhold", "how long a zone's lock is held, in instructions", "lab.bench.lockhold"),
        Bench("zerobytes", "bytes zeroed as the emulator sees it, from outside", "lab.bench.zerobytes"),
        Bench("hotpath", "instructions of the hot paths: compiled out, idle and active", "lab.bench.hotpath"),
        Bench(
            "refpage", "memory that starts with a pattern: memset against refpage_create", "lab.bench.refpage"
        ),
    )
}
