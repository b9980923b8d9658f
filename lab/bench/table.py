# SPDX-License-Identifier: GPL-2.0
"""The benches by name."""

from lab.bench import (
    allocation,
    boot,
    both_ends,
    device,
    fleet,
    hotpath,
    init_on_alloc,
    life,
    lockhold,
    page_fault,
    prezero,
    programs,
    refpage,
)
from lab.bench.plan import (
    DEBIAN,
    LINUX,
    MEMORY,
    NATIVE,
    PAIRS,
    SIZE,
    Bench,
    Kernel,
    Needs,
    Parts,
)
from lab.boot import nested

# The base kernel with a patch (linux/measure) that leaves the memory of large mappings as it is.
FLOOR = {"floor": Kernel("floor")}
OFF = {"off": Kernel("off")}
OUTER = {
    "outer_base": Kernel("base", config=nested.CONFIG),
    "outer_ours": Kernel("knownzero", config=nested.CONFIG),
}

_ALL = (
    Bench(
        "boot",
        "a fresh guest: what it knows of its memory, and its first program",
        boot.measure,
        needs=Needs(daemon=True),
        fixed=(SIZE, MEMORY),
    ),
    Bench(
        "thp",
        "the main job: 256 MiB of huge pages",
        allocation.thp,
        needs=Needs(kernels=FLOOR),
        takes=(NATIVE, DEBIAN, LINUX),
    ),
    Bench(
        "order0",
        "the same memory in 4 KiB pages",
        allocation.order0,
        needs=Needs(kernels=FLOOR),
        takes=(NATIVE, LINUX),
    ),
    Bench(
        "hugetlb",
        "the same memory in hugetlb pages, surplus and persistent",
        allocation.hugetlb,
        needs=Needs(kernels=FLOOR),
        takes=(NATIVE,),
    ),
    Bench(
        "page-fault",
        "page faults while free memory is reported",
        page_fault.measure,
        takes=(NATIVE, DEBIAN),
        fixed=(SIZE,),
    ),
    Bench(
        "device",
        "vhost-user-balloon against the balloon in QEMU",
        device.measure,
        needs=Needs(base=False, daemon=True),
    ),
    Bench(
        "both-ends",
        "a guest in a guest: bytes zeroed by the host and by the guest",
        both_ends.measure,
        accel="tcg",
        needs=Needs(kernels=OUTER),
    ),
    Bench(
        "prezero",
        "free memory zeroed before it is used",
        prezero.measure,
        takes=(NATIVE,),
        fixed=(SIZE,),
    ),
    Bench(
        "init-on-alloc",
        "small allocations with init_on_alloc=1, distributions' default",
        init_on_alloc.measure,
        takes=(NATIVE,),
        fixed=(SIZE,),
    ),
    Bench(
        "life",
        "a guest's life: boot, programs, idle, park, save, restore, burst",
        life.measure,
        needs=Needs(gb=7.2),
        parts=Parts(life.PHASES),
        fixed=(SIZE, MEMORY),
    ),
    Bench(
        "fleet",
        "host memory of six guests with bursts, by policy",
        fleet.measure,
        needs=Needs(gb=7.2),
        takes=(DEBIAN,),
        fixed=(SIZE, MEMORY, PAIRS),
    ),
    Bench(
        "programs",
        "real programs in a Debian",
        programs.measure,
        accel="tcg",
        needs=Needs(gb=9.0, config="programs", plugins=("zerobytes",), disk=programs.disk),
        parts=Parts(programs.NAMES, emulated=programs.NOT_NATIVE),
        takes=(NATIVE, DEBIAN),
        fixed=(SIZE,),
    ),
    Bench(
        "lockhold",
        "instructions while a zone's lock is held",
        lockhold.measure,
        accel="tcg",
        needs=Needs(gb=8.4, plugins=("lockhold",)),
        fixed=(SIZE, MEMORY, PAIRS),
    ),
    Bench(
        "hotpath",
        "the hot paths: instructions compiled out, idle and active; with --accel pvm, time",
        hotpath.measure,
        accel="tcg",
        needs=Needs(kernels=FLOOR | OFF),
        takes=(NATIVE,),
        fixed=(SIZE,),
    ),
    Bench(
        "refpage",
        "filling memory with a pattern: memset against refpage_create",
        refpage.measure,
        needs=Needs(base=False),
        takes=(NATIVE,),
        fixed=(SIZE,),
    ),
)
BENCHES: dict[str, Bench] = {bench.name: bench for bench in _ALL}
