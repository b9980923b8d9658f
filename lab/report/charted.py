# SPDX-License-Identifier: GPL-2.0
"""Which figures are drawn together in a report, under which title, and which of them stand at its top."""

# Title, sentence, and what is in it: a metric and its label.
CHARTS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Bytes the guest sets to zero",
        "The host has already zeroed this memory; a guest that knows it leaves it alone.",
        (
            ("thp.populate.guest_zeroed_bytes", "populate"),
            ("thp.touch_line.guest_zeroed_bytes", "populate, touch a line per page"),
            ("thp.touch_all.guest_zeroed_bytes", "populate, touch everything"),
            ("order0.populate.guest_zeroed_bytes", "populate, 4 KiB pages"),
        ),
    ),
    (
        "CPU time of the job",
        "Populating alone hides the host's faults, which come when memory is touched: all three are shown.",
        (
            ("thp.populate.task_clock", "populate"),
            ("thp.touch_line.task_clock", "populate, touch a line per page"),
            ("thp.touch_all.task_clock", "populate, touch everything"),
            ("order0.populate.task_clock", "populate, 4 KiB pages"),
        ),
    ),
    (
        "Page faults the host handled for the VMM",
        "Memory that the guest leaves alone is not taken from the host; memory that it touches is.",
        (
            ("thp.populate.host_faults", "populate"),
            ("thp.touch_line.host_faults", "populate, touch a line per page"),
            ("thp.touch_all.host_faults", "populate, touch everything"),
        ),
    ),
    (
        "Share of the host's fault handling in the CPU time of the job",
        "Less work in the guest leaves the host a larger share of what is left.",
        (
            ("thp.populate.host_share", "populate"),
            ("thp.touch_line.host_share", "populate, touch a line per page"),
            ("thp.touch_all.host_share", "populate, touch everything"),
        ),
    ),
    (
        "4 KiB pages whose zeroing was skipped",
        "Small pages come from split blocks; this many of them were still known to be zero.",
        (("order0.populate.skipped_percent", "of the job's pages"),),
    ),
    (
        "Host memory held by the VMM",
        "What the host gets back when the guest frees its memory and reports it.",
        (
            ("host.resident_before_fill_bytes", "before"),
            ("host.resident_full_bytes", "guest's memory filled"),
            ("host.resident_after_free_bytes", "freed and reported"),
        ),
    ),
    *(
        (
            f"Page faults: {pages}, {tasks}",
            "Each row of ours against the base kernel with reporting off: more is better.",
            tuple(
                (f"page_fault.{kind}.{row}", label)
                for row, label in (
                    ("off", "reporting off"),
                    ("on", "reporting on"),
                    ("bit6", "reporting on, bit 6"),
                    ("shuffle", "reporting on, bit 6, page shuffling"),
                )
            ),
        )
        for kind, pages, tasks in (
            ("thp.1", "huge pages", "one task"),
            ("thp.2", "huge pages", "two tasks"),
            ("nothp.1", "4 KiB pages", "one task"),
            ("nothp.2", "4 KiB pages", "two tasks"),
        )
    ),
    (
        "What reporting costs page faults, bit 6 on",
        "Our kernel on both sides: the first bar is without reporting, the second with it.",
        (
            ("page_fault.thp.1.loss", "huge pages, one task"),
            ("page_fault.thp.2.loss", "huge pages, two tasks"),
            ("page_fault.nothp.1.loss", "4 KiB pages, one task"),
            ("page_fault.nothp.2.loss", "4 KiB pages, two tasks"),
        ),
    ),
    (
        "CPU time of QEMU for a page, bit 6 on",
        "The same guests; this counts reports and the host's faults, and not what else the machine does.",
        (
            ("page_fault.thp.1.loss_cpu", "huge pages, one task"),
            ("page_fault.thp.2.loss_cpu", "huge pages, two tasks"),
            ("page_fault.nothp.1.loss_cpu", "4 KiB pages, one task"),
            ("page_fault.nothp.2.loss_cpu", "4 KiB pages, two tasks"),
        ),
    ),
    (
        "Host memory after the guest freed its own",
        "Our kernel on both sides: the first bar is without reporting, the second with it.",
        (
            ("page_fault.resident.on", "reporting on"),
            ("page_fault.resident.bit6", "reporting on, bit 6"),
            ("page_fault.resident.shuffle", "reporting on, bit 6, page shuffling"),
        ),
    ),
    *(
        (
            f"{what} of one allocation, {job}",
            "Memory freed and used again at once; what is reported early costs the next allocation a fault of the "
            "host, and, where nobody knows that it is zero, zeroing it a second time.",
            tuple(
                (f"churn.{name}.{row}.{metric}", label)
                for row, label in (
                    ("2000ms", "reports after 2000 ms"),
                    ("250ms", "after 250 ms"),
                    ("50ms", "after 50 ms"),
                    ("early", "base after 2000 ms, ours after 250 ms"),
                )
            ),
        )
        for name, job in (("loop", "one process"), ("six", "six processes"))
        for metric, what in (("alloc_wall", "Time"), ("alloc_task_clock", "CPU time"))
    ),
    *(
        (
            f"Mappings a second, {job}",
            "Allocated, used, freed, and a short pause: more is better.",
            tuple(
                (f"churn.{name}.{delay}ms.cycles", f"reports after {delay} ms") for delay in (2000, 250, 50)
            ),
        )
        for name, job in (("loop", "one process"), ("six", "six processes"))
    ),
    *(
        (
            f"{what} after pre-zeroing, {pages}",
            sentence,
            tuple(
                (f"prezero.{word}.{mode}.{metric}", label)
                for mode, label in (
                    ("populate", "populate"),
                    ("touch_line", "populate, touch a line per page"),
                    ("touch_all", "populate, touch everything"),
                )
            ),
        )
        for word, pages in (("4k", "4 KiB pages"), ("thp", "huge pages"))
        for metric, what, sentence in (
            (
                "task_clock",
                "CPU time of a job",
                "The zeroing was done before, by kzeropaged; what that took is not in here.",
            ),
            (
                "guest_zeroed_bytes",
                "Bytes set to zero in a job",
                "What was zeroed before is not zeroed again while the job waits.",
            ),
        )
    ),
    (
        "What kzeropaged takes beforehand",
        "To zero all memory that is free once, with no pauses. The base kernel has no such thread.",
        (
            ("prezero.background_cpu", "CPU time of the thread"),
            ("prezero.time_until_zero", "time until it is done"),
        ),
    ),
    *(
        (
            f"Ways to zero, {pages}: {what}",
            sentence,
            tuple(
                (f"prezero.peers.{word}.{name}.{metric}", label)
                for name, label in (
                    ("ours", "base, and ours with kzeropaged"),
                    ("init_on_alloc", "base, and base with init_on_alloc=1"),
                    ("init_on_free", "base, and base with init_on_free=1"),
                )
            ),
        )
        for word, pages in (("4k", "4 KiB pages"), ("thp", "huge pages"))
        for metric, what, sentence in (
            ("job", "the job", "CPU time of a job that fills half of the guest's memory."),
            (
                "whole",
                "everything",
                "CPU time of the VMM for the same, with the zeroing that is done before or after.",
            ),
        )
    ),
    (
        "A load that gains nothing from pre-zeroing",
        "Short processes one after the other, as in a build, with kzeropaged on as it is by default.",
        (
            ("prezero.build_load.wall", "time"),
            ("prezero.build_load.whole", "CPU time of the VMM, the thread's included"),
        ),
    ),
    (
        "CPU time of a job after pre-zeroing, not emulated",
        "In User-Mode Linux, 4 KiB pages.",
        (
            ("prezero.um.4k.populate.task_clock", "populate"),
            ("prezero.um.4k.touch_all.task_clock", "populate, touch everything"),
        ),
    ),
    (
        "Bytes set to zero in a job after pre-zeroing, not emulated",
        "In User-Mode Linux, 4 KiB pages.",
        (
            ("prezero.um.4k.populate.guest_zeroed_bytes", "populate"),
            ("prezero.um.4k.touch_all.guest_zeroed_bytes", "populate, touch everything"),
        ),
    ),
    (
        "What kzeropaged takes beforehand, not emulated",
        "In User-Mode Linux, for all memory that is free.",
        (
            ("prezero.um.background_cpu", "CPU time of the thread"),
            ("prezero.um.time_until_zero", "time until it is done"),
        ),
    ),
    (
        "A program whose cache the zeroing shares",
        "Steps through 1 MiB of its own memory: by itself, and with 2 MiB zeroed after each turn. More is better.",
        (
            ("prezero.native.corunner.movnti", "non-temporal stores, as kzeropaged has them"),
            ("prezero.native.corunner.stos", "rep stosb, as memory is zeroed on demand"),
        ),
    ),
    *(
        (
            f"Memory with a pattern, {touched} touched: {what}",
            sentence,
            tuple(
                (f"refpage.{name}.{metric}", label)
                for metric, label in (
                    (kind, "memset, and refpage_create"),
                    (f"against_memset_huge.{kind}", "memset with huge pages"),
                    (f"against_memfd.{kind}", "a private mapping of a memfd"),
                    (f"against_uffd.{kind}", "userfaultfd"),
                )
            ),
        )
        for name, touched in (("page", "one page"), ("half", "half"), ("all", "all"))
        for kind, what, sentence in (
            ("time", "time", "Of one mapping of 4 MB. The second bar is refpage_create each time."),
            ("max_rss", "peak resident size", "Of the process. The second bar is refpage_create each time."),
        )
    ),
    (
        "Memory with a pattern: instructions",
        "Of one mapping, kernel and program: exact, but blind to what memory costs.",
        (
            ("refpage.page.instructions", "one page touched"),
            ("refpage.half.instructions", "half touched"),
            ("refpage.all.instructions", "all touched"),
        ),
    ),
    *(
        (
            f"Memory from hugetlb: {what}",
            sentence,
            (
                (f"hugetlb.surplus.populate.{metric}", "surplus pages"),
                (f"hugetlb.persistent.populate.{metric}", "pages of a persistent pool"),
            ),
        )
        for metric, what, sentence in (
            ("task_clock", "CPU time", "Populated and not touched."),
            ("guest_zeroed_bytes", "bytes set to zero", "The pool keeps what is known of its pages."),
        )
    ),
    *(
        (
            f"Memory that was in the balloon: {what}",
            sentence,
            ((f"deflate.thp.{metric}", "huge pages"), (f"deflate.nothp.{metric}", "4 KiB pages")),
        )
        for metric, what, sentence in (
            ("guest_zeroed_bytes", "bytes set to zero", "The host has zeroed it, and says so with bit 7."),
            ("task_clock", "CPU time", "Populated and not touched."),
            ("host_faults", "page faults of the host", "What is left alone is not taken from the host."),
            ("host_share", "the host's part of the CPU time", "Mostly for those faults."),
        )
    ),
    *(
        (
            f"The balloon's device: {what}",
            sentence,
            tuple(
                (f"device.{step}.{metric}", label)
                for step, label in (
                    ("report", "all free memory reported"),
                    ("inflate", "the balloon filled"),
                    ("deflate", "the balloon emptied"),
                )
            ),
        )
        for metric, what, sentence in (
            ("rate", "memory per second", "More is better."),
            ("host_cpu", "CPU time for each GB", "Of QEMU, guest included, and of the daemon."),
            ("daemon_cpu", "the daemon's part of it", "The device in QEMU has no daemon."),
        )
    ),
    (
        "Bytes stored by rep stos",
        "Counted by the emulator, from outside the guest.",
        (
            ("zerobytes.populate.rep_stos_bytes", "populate"),
            ("zerobytes.touch_all.rep_stos_bytes", "populate, touch everything"),
        ),
    ),
    (
        "Until the host has its memory back",
        "From freeing memory until most of it is back.",
        (
            ("churn.2000ms.time_until_back", "reports after 2000 ms"),
            ("churn.250ms.time_until_back", "after 250 ms"),
            ("churn.50ms.time_until_back", "after 50 ms"),
            ("churn.early.time_until_back", "base after 2000 ms, ours after 250 ms"),
        ),
    ),
    *(
        (
            f"{what} for each GiB, {sizes}",
            "The cost of a whole guest ought to grow with its memory, and no faster: bars of one length.",
            tuple(
                (f"scale.{step}.{gb}gb.{kind}", label)
                for step, label in (
                    ("report_base", "reported by the base kernel"),
                    ("report", "reported"),
                    ("flush", "flushed"),
                    ("prezero", "pre-zeroed"),
                )
            ),
        )
        for gb, sizes in ((2, "1 GB and 2 GB"), (4, "1 GB and 4 GB"), (8, "1 GB and 8 GB"))
        for kind, what in (("wall", "Time"), ("cpu", "CPU time"))
    ),
    *(
        (
            f"The longest hold of a zone's lock, {what}",
            sentence,
            tuple((f"lockhold.{step}.{gb}gb.longest", f"a guest of {gb} GB") for gb in (1, 2, 4, 8)),
        )
        for step, what, sentence in (
            ("program", "memory used and freed", "Small and large pages by turns, next to long free lists."),
            ("report", "reporting", "The worker reports, without delay, what a program freed."),
            (
                "flush",
                "all reported at once",
                "By the flush parameter, which base does not have: its bar is the longest that it has anywhere.",
            ),
            (
                "prezero",
                "pre-zeroing",
                "By kzeropaged, which base does not have: its bar is the longest that it has anywhere.",
            ),
        )
    ),
    *(
        (
            f"{title}, {what}",
            sentence,
            tuple((f"lockhold.{step}.{gb}gb.{metric}", f"a guest of {gb} GB") for gb in (1, 2, 4, 8)),
        )
        for step, what in (("program", "memory used and freed"), ("report", "reporting"))
        for metric, title, sentence in (
            ("p99", "99th percentile of the holds of a zone's lock", "Each hold counts once, however short."),
            ("holds", "Holds of a zone's lock", "How many there were: a larger guest has more to do."),
        )
    ),
    *(
        (
            f"The longest hold of a zone's lock, {sizes}",
            "In instructions: bars of one length, where a hold does not depend on the guest's memory.",
            tuple(
                (f"scale.lock_hold.{step}.{gb}gb", label)
                for step, label in (
                    ("program_base", "memory used and freed, base"),
                    ("program", "memory used and freed"),
                    ("report_base", "reported by the base kernel"),
                    ("report", "reported"),
                    ("flush", "flushed"),
                    ("prezero", "pre-zeroed"),
                )
            ),
        )
        for gb, sizes in ((2, "1 GB and 2 GB"), (4, "1 GB and 4 GB"), (8, "1 GB and 8 GB"))
    ),
    *(
        (
            f"{what} {program}",
            "In a guest with one CPU. What there is without reports is the machine's noise.",
            tuple(
                (f"device.stall.{mode}.{gap}.{state}", label)
                for state, label in (
                    ("reporting", "while all free memory is reported"),
                    ("idle", "while nothing is reported"),
                )
            ),
        )
        for mode, program in (
            ("spin", "a program that spins"),
            ("alloc", "a program that allocates and frees"),
        )
        for gap, what in (
            ("longest", "The longest stall of"),
            ("p99", "99th percentile of the steps of"),
            ("lost", "Time lost in stalls of 1 ms and more by"),
        )
    ),
    *(
        (
            f"Instructions of the {length} paths, {state}",
            sentence,
            tuple((f"hotpath.{which}{path}.instructions", label) for path, label in labels),
        )
        for which, state, sentence in (
            ("", "reporting off", "What the feature costs where it is compiled in and nothing is reported."),
            ("off.", "compiled out", "The series applied, every option off."),
            (
                "active.",
                "memory known to be zero",
                "After all free memory was reported to a balloon, with bit 6 on ours.",
            ),
        )
        for length, labels in (
            (
                "short",
                (
                    ("new_fault", "4 KiB page fault in unused memory"),
                    ("fault", "4 KiB page fault"),
                    ("alloc_free", "order-0 page, allocated and freed"),
                    ("buddy_alloc_free", "the same through the buddy lists"),
                    ("alloc_free_order3", "order-3 page, allocated and freed"),
                ),
            ),
            (
                "long",
                (
                    ("alloc_free_order9", "order-9 page, allocated and freed"),
                    ("new_thp_fault", "fault of a huge page in unused memory"),
                    ("thp_fault", "fault of a huge page"),
                    ("fork_exit", "fork and exit"),
                    ("fork_exec", "fork and exec"),
                ),
            ),
        )
    ),
)

# Figure, and what it is the figure of.
HEADLINES = (
    ("thp.populate.guest_zeroed_bytes", "bytes zeroed by the guest"),
    ("thp.populate.task_clock", "CPU time to populate"),
    ("thp.touch_all.task_clock", "CPU time to populate and touch all"),
    ("order0.populate.skipped_percent", "of small pages not zeroed again"),
    ("hotpath.alloc_free.instructions", "instructions to allocate and free a page, feature idle"),
    ("host.resident_after_free_bytes", "held by the VMM after the guest freed"),
)
