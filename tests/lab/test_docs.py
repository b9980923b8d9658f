# SPDX-License-Identifier: GPL-2.0
"""The documents: their lists are complete, their links lead somewhere, their commands are understood."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import clidoc
from lab.boot import BootSpec, boot
from lab.paths import REPO

COUNTERS = REPO / "docs" / "reference" / "counters.md"
PAGES = sorted([*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md"), *REPO.glob("vhost-user-balloon/**/*.md")])


def sources(series: str) -> dict[str, str]:
    """What a series adds, by file: its new files, and the lines its patches add."""
    found: dict[str, str] = {}
    root = REPO / series
    for path in sorted(p for p in (root / "new").rglob("*") if p.is_file()):
        found[str(path.relative_to(root / "new"))] = path.read_text(errors="replace")
    for patch in sorted((root / "patches").glob("*.patch")):
        name = ""
        for line in patch.read_text(errors="replace").splitlines():
            if line.startswith("+++ b/"):
                name = line.removeprefix("+++ b/")
            elif line.startswith("+") and name:
                found[name] = found.get(name, "") + line[1:] + "\n"
    return found


def section(title: str) -> list[str]:
    """The names in the first column of the tables under a title of counters.md."""
    text = COUNTERS.read_text(encoding="utf-8")
    part = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE)


def found(pattern: str, series: str = "linux", files: str = "") -> list[str]:
    """What a pattern's group matches in a series."""
    return [
        match
        for name, text in sources(series).items()
        if re.search(files, name)
        for match in re.findall(pattern, text)
    ]


def parameters() -> set[str]:
    """MODULE.NAME of each module parameter of the series."""
    names = set()
    for name, text in sources("linux").items():
        if name.endswith(".c"):
            for parameter in re.findall(r"\bmodule_param(?:_named|_cb)?\(\s*(\w+)", text):
                names.add(f"{Path(name).stem}.{parameter}")
    return names


def attributes() -> set[str]:
    """The files that prezero.c makes in sysfs."""
    text = sources("linux")["mm/prezero.c"]
    return set(re.findall(r"^PREZERO_ATTR_R[OW]\(([a-z]\w+)", text, re.MULTILINE)) | set(
        re.findall(r"\b__ATTR\(([a-z]\w+), 0", text)
    )


NAMES: dict[str, Callable[[], set[str]]] = {
    "/proc/vmstat": lambda: set(found(r'"(pgzeroed_\w+|nr_free_zeroed)"', files=r"^mm/vmstat\.c$")),
    "/sys/kernel/mm/zero_page": attributes,
    "Module parameters": parameters,
    "Boot parameters": lambda: set(
        found(r'\b(?:__setup|early_param|__setup_param)\("([^"]+)"', files=r"\.c$")
    ),
    "Kernel options": lambda: {
        f"CONFIG_{name}" for name in found(r"(?m)^config (\w+)$", files=r"Kconfig[.\w]*$")
    },
    "Tracepoints": lambda: set(
        found(
            r"(?:DEFINE_EVENT\(page_zeroed_block|TRACE_EVENT\()[,\s]*(page_zeroed_\w+)", files="trace/events"
        )
    ),
    "QEMU properties": lambda: set(found(r'DEFINE_PROP_\w+\("([^"]+)"', series="qemu")),
}


@pytest.mark.parametrize("title", NAMES)
def test_the_reference_has_what_the_series_adds(title: str) -> None:
    names = section(title)
    assert sorted(names) == sorted(set(names)), "listed twice"
    assert set(names) == NAMES[title]()
    assert names


def test_the_reference_of_kz_is_current() -> None:
    wanted = clidoc.page()
    assert clidoc.PAGE.read_text(encoding="utf-8") == wanted, "run: PYTHONPATH=. python -m lab.clidoc"
    for words, _ in clidoc.verbs(clidoc.root()):
        assert f"## {' '.join(words)}\n" in wanted
    assert "## kz top\n" in wanted


def anchors(page: Path) -> set[str]:
    """The anchors of a page's titles."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        where = (page.parent / name).resolve() if name else page
        assert where.exists(), target
        if anchor:
            assert anchor in anchors(where), target


def test_every_document_can_be_found_from_the_readme() -> None:
    seen: set[Path] = set()
    todo = [REPO / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or not page.is_file():
            continue
        seen.add(page)
        if page.suffix == ".md":
            todo += [
                (page.parent / target.partition("#")[0]).resolve()
                for target in re.findall(r"\]\(([^)\s:]+)\)", page.read_text(encoding="utf-8"))
            ]
    lost = [p for p in PAGES if p not in seen and p.is_relative_to(REPO / "docs")]
    assert lost == []


def commands(page: Path) -> list[str]:
    """The kz commands in the indented blocks of a page, without what follows a # or a pipe."""
    lines = re.findall(r"^ {4}(\./kz .+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.split(r"\s+#", line)[0].strip() for line in lines]


def understood(line: str) -> None:
    """Take a command apart as kz would; raises when it would not take it."""
    words = shlex.split(line)[1:]
    for sign in ("|", ">", "&", ";"):
        if sign in words:
            words = words[: words.index(sign)]
    command = clidoc.root()
    name = "kz"
    while getattr(command, "commands", None):
        assert words, line
        name, command = words[0], command.commands[words[0]]
        words = words[1:]
    command.make_context(name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_kz_understands_the_commands_in_the_documents(page: Path) -> None:
    for line in commands(page):
        understood(line)


@pytest.mark.parametrize("line", ["./kz nonsense", "./kz boot --nonsense", "./kz compare one"])
def test_what_kz_would_refuse_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"."):
        understood(line)


@pytest.mark.boots
def test_the_debug_kernel_has_all_that_is_listed() -> None:
    files = [f"/sys/kernel/mm/zero_page/{name}" for name in attributes() - {"wakeups", "free_zeroed_bytes"}]
    files += [f"/sys/kernel/mm/zero_page/node0/{name}" for name in ("wakeups", "free_zeroed_bytes")]
    files += [f"/sys/module/{name.replace('.', '/parameters/')}" for name in parameters()]
    files += [f"/sys/kernel/tracing/events/page_zeroed/{name}" for name in section("Tracepoints")]
    script = "".join(f"[ -e {file} ] || echo no {file}\n" for file in files)
    script += "".join(
        f"grep -q '^{name} ' /proc/vmstat || echo no {name}\n" for name in section("/proc/vmstat")
    )
    done = boot(BootSpec(kernel="debug", memory="1G", command=["sh", "-c", script]))
    assert done.exit_code == 0
    assert done.stdout == ""
