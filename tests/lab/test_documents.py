# SPDX-License-Identifier: GPL-2.0
"""What the documents link, quote and name exists: pages, commands, messages, names, tests."""

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
from lab.machine import stock
from lab.patches import parts
from tests.documents import PAGES, commands

COUNTERS, ABI = "docs/reference/counters.md", "docs/reference/abi.md"
CRATES = REPO / "vhost-user-balloon"
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


# A link whose target stands at the end of the page: its name, and the target.
REFERENCE = re.compile(r"^\[([\w-]+)\]: (\S+)", re.MULTILINE)


def links(page: Path) -> list[tuple[Path, str]]:
    """The files that a page links, with the anchors in them."""
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    targets += [target for _, target in REFERENCE.findall(text)]
    found = []
    for name, _, anchor in (target.partition("#") for target in targets if "://" not in target):
        found.append(((page.parent / name).resolve() if name else page, anchor))
    return found


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in links(page):
        assert file.exists(), file
        assert not anchor or anchor in anchors(file), f"{file}#{anchor}"


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


@functools.cache
def corpus() -> str:
    """All that prints something for users: both series, the crates, the lab, the guest programs.

    Strings are joined.
    """
    texts = [*sources("linux").values(), *sources("qemu").values()]
    files = [*CRATES.glob("*/src/**/*.rs"), *(REPO / "lab").rglob("*.py"), REPO / "kz"]
    files += [*(REPO / "guest").glob("*.c"), *(REPO / "tools").rglob("*.c")]
    files.append(REPO / "tests" / "conftest.py")
    texts += [file.read_text(encoding="utf-8") for file in files]
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))
    return re.sub(r"\\\n\s*", "", joined).replace('\\"', '"')


def messages(page: Path) -> list[str]:
    """The first column of tables that begin with "it says": code, or else the whole cell."""
    found: list[str] = []
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        rows = [row.strip("|").split(" | ")[0].strip(" |") for row in table.splitlines()]
        if rows[0] == "it says":
            for cell in rows[2:]:
                found += re.findall(r"`([^`]+)`", cell) or [cell]
    return found


def pieces(message: str) -> list[str]:
    """Parts of a message that do not differ from case to case."""
    found = re.split(r"…|: |\d+", re.sub(r"^(Yes|No|Not yet|Ready): ", "", message))
    return [part.strip() for part in found if len(part.strip()) > 3]


def test_quoted_messages_are_in_the_sources() -> None:
    quoted = [message for page in PAGES for message in messages(page)]
    assert len(quoted) > 20 and all(map(pieces, quoted))
    assert [text for text in quoted if not all(part in corpus() for part in pieces(text))] == []
    assert "the guest's cat is not a shared file" not in corpus()
    assert pieces("No: Debian 13 … no longer has: bread") == ["Debian", "no longer has", "bread"]


def missing_tests(text: str) -> list[str]:
    """The tests, test files and mutants that a page names and that are not there."""
    files = [p for top in (REPO / "tests", CRATES) for p in top.rglob("*.[pr][ys]")]
    files.remove(Path(__file__))
    there = "\n".join(
        [*sources("linux").values(), *sources("qemu").values(), *map(Path.read_text, files)]
    )
    words = set(re.findall(r"\w+", there)) | {file.stem for file in files}
    names = re.findall(r"`(test_\w+|[a-z]+_[a-z_]+)`", text)
    mutants = [found[1:-1] for found in re.findall(r'"[a-z_()]+: [^"|]+"', text)]
    return [n for n in names if n not in words] + [n for n in mutants if n not in there]


def test_the_tests_that_are_named_exist() -> None:
    pages = (REPO / "docs" / "README.md", REPO / "docs" / "explanation" / "hazards.md")
    assert missing_tests("\n".join(page.read_text(encoding="utf-8") for page in pages)) == []
    assert missing_tests('`test_of_a_cat`, "merge: by a cat"') == [
        "test_of_a_cat",
        "merge: by a cat",
    ]


def unproven(text: str) -> list[str]:
    """Of docs/README.md: answers without a link, and links that lead to no test."""
    found = re.findall(r"\| (yes(?: ◐)?) (?=\|)", text)
    names = {name for name, _ in REFERENCE.findall(text)}
    found += sorted(names ^ set(re.findall(r"\]\[([\w-]+)\]", text)))
    for target, test in re.findall(r'(?m)^\[[\w-]+\]: (\S+) "([\w-]+)"$', text):
        place = REPO / "docs" / target
        files = place.glob("*.patch") if place.is_dir() else [place]
        # The last two: a case of a qtest, and one with data.
        test_there = re.compile(rf'(?:def|fn) {test}\(|\badd\("{test}"|reporting/{test}"')
        if not any(test_there.search(file.read_text(errors="replace")) for file in files):
            found.append(test)
    return found


def test_each_answer_links_its_test() -> None:
    text = (REPO / "docs" / "README.md").read_text(encoding="utf-8")
    assert "[yes][" in text and unproven(text) == []
    cat = '| a | yes | [no][dog] |\n\n[cat]: ../qemu/parts/reporting "of-a-cat"\n'
    assert unproven(cat) == ["yes", "cat", "dog", "of-a-cat"]


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


def test_the_results_of_conform_have_a_row_for_every_check() -> None:
    source = (REPO / "guest" / "conform.c").read_text(encoding="utf-8")
    checks = re.findall(r'(?:^\t\{ |\bcheck_round\(|\brow\(PASS, )"([^"]+)"', source, re.MULTILINE)
    page = (REPO / "docs" / "results" / "conform.md").read_text(encoding="utf-8")
    assert len(checks) > 20
    assert [check for check in checks if f"| {check} |" not in page] == []


@pytest.mark.images
def test_the_options_of_debian_are_those_that_are_listed() -> None:
    """The table of distribution defaults, against Debian's cloud configuration and the lab's."""
    text = (REPO / "docs" / "how-to" / "measure.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(CONFIG_\w+)` \| (\w) \| (\w) \|", text, re.MULTILINE)
    assert len(rows) > 10
    ours = REPO / "linux" / "configs" / "x86_64.config"
    for number, file in ((1, stock.cloud_config()), (2, ours)):
        lines = file.read_text(encoding="utf-8").splitlines()
        values = dict(line.split("=", 1) for line in lines if line.startswith("CONFIG_"))
        for row in rows:
            assert values.get(row[0], "n") == row[number], row
