# SPDX-License-Identifier: GPL-2.0
"""What the documents link, quote and name exists: pages, commands, names of the interface."""

from __future__ import annotations

import functools
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lab import cli, clidoc
from lab.core.paths import REPO
from lab.patches import parts
from tests.documents import PAGES, commands

COUNTERS, ABI = "docs/reference/counters.md", "docs/reference/abi.md"
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))


@functools.cache
def sources(series: str) -> dict[str, str]:
    """The lines that a series adds, by file; a later patch may take some of them out again."""
    found: dict[str, list[str]] = {}
    for patch in parts.get(series).patches():
        name = ""
        for line in patch.read_text(errors="replace").splitlines():
            lines = found.setdefault(name, [])
            if line.startswith("+++ "):
                name = line.removeprefix("+++ b/")
            elif line.startswith("+") and name:
                lines.append(line[1:])
            elif line.startswith("-") and line[1:] in lines:
                lines.remove(line[1:])
    return {name: "\n".join(lines) + "\n" for name, lines in found.items()}


def anchors(page: Path) -> set[str]:
    """The anchors of a page's titles."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# A link whose target stands at the end of the page: the target, and a test in it.
REFERENCE = re.compile(r'^\[[\w-]+\]: (\S+)(?: "([\w-]+)")?$', re.MULTILINE)


def links(page: Path) -> list[tuple[Path, str]]:
    """The files that a page links, with the anchors in them."""
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    targets += [target for target, _ in REFERENCE.findall(text)]
    found = []
    for name, _, anchor in (target.partition("#") for target in targets if "://" not in target):
        found.append(((page.parent / name).resolve() if name else page, anchor))
    return found


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in links(page):
        assert file.exists(), file
        assert not anchor or anchor in anchors(file), f"{file}#{anchor}"


def test_the_tests_that_are_named_exist() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    files = [*(REPO / "tests").rglob("*.py")]
    tests = "\n".join([*(file.name for file in files), *(file.read_text() for file in files)])
    named = re.findall(r"`(test_\w+)`", "\n".join(texts.values()))
    missing = [name for name in named if not re.search(rf"\b{name}\b", tests)]
    for page, text in texts.items():
        for target, test in REFERENCE.findall(text):
            place = page.parent / target
            sources = place.glob("*.patch") if place.is_dir() else [place]
            if not any(test in file.read_text(errors="replace") for file in sources):
                missing.append(test)
    assert missing == []


def test_every_document_can_be_found_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [REPO / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            waiting += [file for file, _ in links(page)]
    assert [p for p in PAGES if p not in seen and p.is_relative_to(REPO / "docs")] == []


@functools.cache
def verbs() -> Any:
    """The verbs of kz with all options."""
    return cli.root()


def understood(line: str) -> None:
    """Parse a command as kz would; raises when kz would refuse it."""
    words = shlex.split(line)[1:]
    for sign in ("|", ">", "&", ";"):
        if sign in words:
            words = words[: words.index(sign)]
    command, name = verbs(), "kz"
    while getattr(command, "commands", None):
        name, command, words = words[0], command.commands[words[0]], words[1:]
    command.make_context(name, words)


def unknown(line: str) -> list[str]:
    """The words of a command that kz does not know: a verb, or options."""
    command, _, words = verbs(), *line.partition(" ")[1:]
    rest = words.split()
    while getattr(command, "commands", None) and rest:
        if rest[0] not in command.commands:
            return rest[:1]
        command, rest = command.commands[rest[0]], rest[1:]
    known = {name for parameter in command.params for name in parameter.opts} | {"--help", "--"}
    ours = rest[: rest.index("--")] if "--" in rest else rest
    return [word for word in ours if word.startswith("--") and word.partition("=")[0] not in known]


@by_page
def test_kz_understands_the_commands_in_the_documents(page: Path) -> None:
    if page != clidoc.PAGE:
        for line in commands(page):
            if line.startswith("./kz "):
                understood(line)
    # Sentences often leave arguments out.
    text = re.sub(r"\n *", " ", page.read_text(encoding="utf-8"))
    named = re.findall(r"(?<!`)`(?:\w+=\S+ )*(?:\./)?(kz [^`]+)`", text)
    assert {line: lost for line in named if (lost := unknown(line))} == {}


def test_a_wrong_command_is_found() -> None:
    assert unknown("kz boot --kernel=base --nonsense -- true --help") == ["--nonsense"]
    assert unknown("kz series nonsense") == ["nonsense"]
    for line in ("./kz nonsense", "./kz boot --nonsense", "./kz compare one two three"):
        with pytest.raises(Exception, match=r"."):
            understood(line)


def test_the_reference_of_kz_is_current() -> None:
    assert clidoc.PAGE.read_text(encoding="utf-8") == clidoc.page(cli.root()), "run: ./kz reference"


# The names that a table of the reference lists: its page, and the files that define them. The
# names are what the group matches; of module parameters, with the file's name before them.
LISTED = {
    "/proc/vmstat": (COUNTERS, r"^mm/vmstat\.c$", r'"(pgzeroed_\w+|pgprezero_\w+)"'),
    "/sys/kernel/mm/zero_page": (COUNTERS, r"^mm/prezero\.c$", r"(?m)^\t&(\w+)_attr\.attr,$"),
    "Module parameters": (COUNTERS, r"\.c$", r"\bmodule_param(?:_named|_cb)?\(\s*(\w+)"),
    "Boot parameters": (COUNTERS, r"\.c$", r'\b(?:__setup|early_param|__setup_param)\("([^"]+)"'),
    "Kernel options": (COUNTERS, r"Kconfig[.\w]*$", r"(?m)^config (\w+)$"),
    "Tracepoints": (
        COUNTERS,
        "trace/events",
        r"(?:DEFINE_EVENT\(page_zeroed_class|TRACE_EVENT\()[,\s]*(page_zeroed_\w+)",
    ),
    "QEMU properties": (COUNTERS, r"qemu:", r'DEFINE_PROP_\w+\("([^"]+)"'),
    "Properties of QEMU": (ABI, r"qemu:.*machine\.json$", r"'\*(\w+)': 'BalloonCounters'"),
    "Reasons of QEMU": (
        ABI,
        r"qemu:.*machine\.json$",
        r"(?m)^(?: {12}|  'data': \[ )'([a-z-]+)'(?:,| \] \})$",
    ),
}


def defined(title: str) -> set[str]:
    """The names that the sources define for a table."""
    _, files, pattern = LISTED[title]
    series = "qemu" if files.startswith("qemu:") else "linux"
    found = set()
    for name, text in sources(series).items():
        if re.search(files.removeprefix("qemu:"), name):
            stem = f"{Path(name).stem}." if title == "Module parameters" else ""
            found |= {f"{stem}{match}" for match in re.findall(pattern, text)}
    return {f"CONFIG_{name}" for name in found} if title == "Kernel options" else found


@pytest.mark.parametrize("title", LISTED)
def test_the_reference_has_what_the_series_adds(title: str) -> None:
    text = (REPO / LISTED[title][0]).read_text(encoding="utf-8")
    under = re.split(r"\n#+ ", re.split(rf"\n#+ {re.escape(title)}\n", text)[1])[0]
    names = re.findall(r"^\| `([^`]+)` \|", under, re.MULTILINE)
    assert names and Counter(names) == Counter(defined(title))


def test_numbers_in_the_interface() -> None:
    text = (REPO / ABI).read_text(encoding="utf-8")
    bits = {name: bit for bit, name in re.findall(r"(?m)^\| (\d+) \| `(VIRTIO_\w+)` \|", text)}
    assert len(bits) == 3
    header = re.compile(r"#define (VIRTIO_BALLOON_F_(?:DEVICE_INIT_\w+|REPORT_NOW))\s+(\d+)")
    for series in ("linux", "qemu"):
        headers = (t for n, t in sources(series).items() if n.endswith("virtio_balloon.h"))
        assert dict(header.findall("\n".join(headers))) == bits
    (calls,) = (t for n, t in sources("linux").items() if n.endswith("asm-generic/unistd.h"))
    assert re.findall(r"Number (\d+), (?:\d+) on Alpha", text) == re.findall(
        r"__NR_refpage_create (\d+)", calls
    )


def test_the_front_page_has_the_sizes_of_the_parts() -> None:
    """Rounded; linux/README.md has them to the line."""
    exact = (REPO / "linux" / "README.md").read_text(encoding="utf-8")
    lines = dict(re.findall(r"(?m)^\| `([\w-]+)` \| \d+ \| \+(\d+) ", exact))
    rows = re.findall(
        r"(?m)^\| (`[\w-]+`(?:, `[\w-]+`)*) \| ([\d,]+) \|",
        (REPO / "README.md").read_text(encoding="utf-8"),
    )
    named = {names: re.findall(r"[\w-]+", names) for names, _ in rows}
    assert sorted(name for names in named.values() for name in names) == sorted(lines)
    for names, shown in rows:
        added = sum(int(lines[name]) for name in named[names])
        assert abs(int(shown.replace(",", "")) - added) <= max(60, added // 10), names


def test_what_contributing_names_is_where_it_says() -> None:
    text = " ".join((REPO / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    for name, file in re.findall(r"`([\w.]+)\(\)` (?:in|of) `(lab/[\w/.]+)`", text):
        assert f"def {name}(" in (REPO / file).read_text(encoding="utf-8"), f"{name}() in {file}"
    named = re.findall(r"`((?:lab|guest|tests)/[\w/.]+)`", text)
    assert [name for name in named if not (REPO / name).exists()] == []


# A marked access, to the end of its first argument.
ACCESS = re.compile(
    r"\b((?:READ_ONCE|WRITE_ONCE|smp_\w+|static_branch_\w+|atomic\w*|\w*xchg\w*|data_race)"
    r"\((?:[^(),]|\([^()]*\))*)[,)]"
)


def test_each_marked_access_has_an_argument() -> None:
    """The table of memory-order.md has the marked accesses of the series, and how often."""
    page = (REPO / "docs" / "explanation" / "memory-order.md").read_text(encoding="utf-8")
    table = re.split(r"\n## ", page.split("\n## Marked accesses\n")[1])[0]
    named = re.findall(r"`([^`]+)`(?: ×(\d+))?", table)
    argued = {access: int(places or 1) for access, places in named if ACCESS.fullmatch(access)}
    there: Counter[str] = Counter()
    for name, text in sources("linux").items():
        if re.match(r"(?!mm/tests/|tools/).*\.[ch]$", name):
            code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
            there.update(f"{access})" for access in ACCESS.findall(code))
    assert argued == there
