#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Copy the functions under test out of the kernel's sources.

usage: extract.py KERNEL-TREE OUTPUT-DIRECTORY

Writes functions.h and page_zeroed.h, and an empty file for each kernel header
that the latter includes. Exits with 1 if anything is not found as expected.
"""

import re
import sys
from pathlib import Path

# In the order in which they are compiled.
FUNCTIONS = (
    ("mm/page_zeroed.c", (
        "page_zeroed_count",
        "page_zeroed_trusted",
        "page_zeroed_account",
        "page_zeroed_count_lost",
        "page_zeroed_claim",
        "page_zeroed_consume",
        "page_zeroed_lose",
        "page_zeroed_forget_all",
    )),
    ("mm/page_reporting.h", (
        "page_reported",
        "page_reporting_inherit",
    )),
    ("mm/page_alloc.h", (
        "buddy_order",
        "page_is_buddy",
        "__find_buddy_pfn",
        "find_buddy_page_pfn",
    )),
    ("mm/page_alloc.c", (
        "set_buddy_order",
        "task_capc",
        "compaction_capture",
        "account_freepages",
        "__add_to_free_list",
        "move_to_free_list",
        "__del_page_from_free_list",
        "del_page_from_free_list",
        "get_page_from_free_area",
        "buddy_merge_likely",
        "change_pageblock_range",
        "__free_one_page",
        "split_large_buddy",
        "add_page_to_zone_llist",
        "free_one_page",
        "__free_pages_ok",
        "expand",
        "page_del_and_expand",
        "choose_free_block",
        "__rmqueue_smallest",
        "__move_freepages_block",
        "prep_move_freepages_block",
        "move_freepages_block",
        "find_large_buddy",
        "toggle_pageblock_isolate",
        "__move_freepages_block_isolate",
        "try_to_claim_block",
        "isolate_untouched_block",
        "__isolate_free_page",
        "__putback_isolated_page",
        "putback_untouched_block",
        "merge_free_frozen_pages",
        "take_free_frozen_pages",
        "add_to_free_list",
        "break_down_buddy_pages",
        "take_page_off_buddy",
        "put_page_back_buddy",
    )),
    ("mm/page_reporting.c", ("page_reporting_drain",)),
    ("mm/compaction.c", ("release_free_list",)),
)

MACROS = ("mm/page_alloc.c", r"#define FPI_\w+\s.*")


def fail(what: str) -> None:
    sys.exit(f"extract.py: {what}; adapt tools/testing/page_zeroed/extract.py")


def function(lines: list[str], name: str) -> tuple[int, list[str]]:
    """The first definition of a function: its first line, from 0, and its text."""
    start_re = re.compile(rf"^(?![#/*\s]).*\b{re.escape(name)}\(")
    for first, line in enumerate(lines):
        if not start_re.match(line):
            continue

        # A definition's first "{" comes before any ";".
        last = first
        while not re.search(r"[;{]", lines[last]):
            last += 1
        if ";" in lines[last]:
            continue
        while lines[last] != "}":
            last += 1

        # The type may be on a line of its own.
        if re.fullmatch(r"static[\w\s*]*", lines[first - 1]):
            first -= 1
        return first, lines[first:last + 1]

    raise LookupError(name)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    tree, out = Path(sys.argv[1]), Path(sys.argv[2])
    (out / "linux").mkdir(parents=True, exist_ok=True)

    path, macro_re = MACROS
    macros = re.findall(f"^{macro_re}$", (tree / path).read_text(), re.MULTILINE)
    if not macros:
        fail(f"no FPI flags in {path}")

    text = ["/* Extracted from the kernel's sources. */", *macros]
    for path, names in FUNCTIONS:
        lines = (tree / path).read_text().splitlines()
        for name in names:
            try:
                first, body = function(lines, name)
            except (LookupError, IndexError):
                fail(f"{name}() is not in {path}")
            text += ["", f'#line {first + 1} "{path}"', *body]
    (out / "functions.h").write_text("\n".join(text) + "\n")

    header = (tree / "mm/page_zeroed.h").read_text()
    (out / "page_zeroed.h").write_text(header)
    for name in re.findall(r"^#include <linux/(.*)>$", header, re.MULTILINE):
        (out / "linux" / name).write_text("/* shim.h has all there is. */\n")


if __name__ == "__main__":
    main()
