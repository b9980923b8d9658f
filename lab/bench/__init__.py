# SPDX-License-Identifier: GPL-2.0
"""The benches: each measures the base kernel and ours side by side. Imports core to report."""

import importlib
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from lab.boot.spec import ACCELS as ACCELS
from lab.core.paths import REPO
from lab.report.results import Result

PROGRAMS = REPO / "guest" / "programs"
PARTS = tuple(sorted(file.stem for file in PROGRAMS.glob("*.sh")))


@dataclass(frozen=True)
class BenchOptions:
    """The options of a bench."""

    pairs: Annotated[int, Option(min=1, max=1000, help="Pairs of repetitions, by turns.")] = 10
    size_mb: Annotated[int, Option("--size", min=2, max=65536, help="MB the job allocates.")] = 256
    memory: Annotated[str, Option(help="Memory of each guest, such as 2G.")] = "2G"
    accel: Annotated[str, Option(help="auto, kvm or tcg.")] = "auto"
    base: Annotated[str, Option(help="The kernel to compare with.")] = "base"
    ours: Annotated[str, Option(help="The kernel measured: a variant or image.")] = "knownzero"
    qemu: Annotated[str, Option(help="knownzero, or stock: Debian's, with the daemon.")] = (
        "knownzero"
    )
    only: Annotated[str, Option(metavar="NAME,…", help="programs only: run these.")] = ""

    @property
    def memory_mb(self) -> int:
        """Memory of a guest in MB."""
        return int(self.memory[:-1]) * {"G": 1024, "M": 1}[self.memory[-1]]


@dataclass(frozen=True)
class Bench:
    """A bench.

    A function of its name in ``module`` takes its figures, or ``measure`` of its own module.

    ``accel`` is the only accelerator it can use, if any; ``both`` is False for a bench that runs
    our kernel only. ``needs_gb`` of the machine's memory must be available. ``config``: a fragment
    for both kernels. ``parts``: the names that --only takes.
    """

    name: str
    sentence: str
    module: str = ""
    accel: str = ""
    both: bool = True
    needs_gb: float = 0.0
    config: str = ""
    parts: tuple[str, ...] = ()

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of its module. It is imported here.

        To list the benches loads nothing that boots guests.
        """
        module = importlib.import_module(f"lab.bench.{self.module or self.name.replace('-', '_')}")
        getattr(module, function)(*arguments)

    def measure(self, run: Any) -> None:
        """Take the figures with a ``Run`` of lab/bench/runner.py."""
        self.call(self.name if self.module else "measure", run)

    def run(self, options: BenchOptions) -> Result:
        """Measure; raises LabError when that is not possible."""
        result: Result = importlib.import_module("lab.bench.runner").measure(self, options)
        return result


_ALL = (
    Bench("boot", "a fresh guest: what it knows of its memory, and its first program"),
    Bench("thp", "the main job: 256 MB of huge pages", "allocation"),
    Bench("order0", "the same memory in 4 KiB pages", "allocation"),
    Bench("hugetlb", "the same memory in hugetlb pages, surplus and persistent", "allocation"),
    Bench("page-fault", "page faults while free memory is reported"),
    Bench("deflate", "memory used again after it was in the balloon", "allocation"),
    Bench("device", "vhost-user-balloon against the balloon in QEMU"),
    Bench(
        "both-ends", "a guest in a guest: bytes zeroed by the host and by the guest", accel="tcg"
    ),
    Bench("host", "host memory that returns when the guest frees"),
    Bench("churn", "memory allocated and freed all the time, by report delay"),
    Bench("prezero", "free memory zeroed before it is used"),
    Bench("init-on-alloc", "small allocations with init_on_alloc=1, distributions' default"),
    Bench("fleet", "host memory of six guests with bursts, by policy", needs_gb=7.2),
    Bench("programs", "real programs in a Debian", "", "tcg", True, 6.0, "programs", PARTS),
    Bench(
        "scale", "reporting, flushing and pre-zeroing guests of 1 to 8 GB, per GiB", needs_gb=8.4
    ),
    Bench("lockhold", "instructions while a zone's lock is held", accel="tcg", needs_gb=8.4),
    Bench("zerobytes", "bytes zeroed, counted by the emulator", "allocation", "tcg"),
    Bench("hotpath", "instructions of the hot paths: compiled out, idle and active", accel="tcg"),
    Bench("refpage", "filling memory with a pattern: memset against refpage_create", both=False),
)
BENCHES: dict[str, Bench] = {bench.name: bench for bench in _ALL}
