# SPDX-License-Identifier: GPL-2.0
"""The documents.

Their lists are complete, their links lead somewhere, their commands are understood.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import cli, clidoc
from lab.boot.guest import boot
from lab.boot.spec import BootSpec
from lab.core.paths import REPO
from lab.machine import fetch, stock
from lab.patches import parts

COUNTERS = REPO / "docs" / "reference" / "counters.md"
ABI = REPO / "docs" / "reference" / "abi.md"
PAGES = sorted(
    [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md"), *REPO.glob("vhost-user-balloon/**/*.md")]
)


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


def section(title: str, page: Path = COUNTERS) -> list[str]:
    """The names in the first column of the tables under a title of a page."""
    text = page.read_text(encoding="utf-8")
    part = re.split(r"\n#+ ", re.split(rf"\n#+ {re.escape(title)}\n", text)[1])[0]
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
    """The files that prezero_sysfs.c makes in sysfs."""
    return set(
        re.findall(r"^\t&(\w+)_attr\.attr,$", sources("linux")["mm/prezero_sysfs.c"], re.MULTILINE)
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
            r"(?:DEFINE_EVENT\(page_zeroed_class|TRACE_EVENT\()[,\s]*(page_zeroed_\w+)",
            files="trace/events",
        )
    ),
    "QEMU properties": lambda: set(found(r'DEFINE_PROP_\w+\("([^"]+)"', series="qemu")),
}


DAEMON = REPO / "vhost-user-balloon" / "daemon" / "src"
DISCARD = REPO / "vhost-user-balloon" / "discard" / "src"


def metrics() -> set[str]:
    """The names of the daemon's metrics, as Prometheus shows them."""
    text = (DAEMON / "metrics.rs").read_text(encoding="utf-8")
    names = {
        f"{name}_total" if name == "requests" else f"{name}_bytes_total"
        for name in re.findall(r'\bby\(\s*"\w+",\s*&\w+,\s*"(\w+)"', text)
    }
    for call, name, rest in re.findall(r'registry\.(register\w*)\(\s*"(\w+)",([^;]+);', text):
        unit = re.search(r"Unit::(\w+)", rest)
        counter = f"{name}: Counter" in text
        assert call == ("register_with_unit" if unit else "register")
        names.add(name + (f"_{unit[1].lower()}" if unit else "") + ("_total" if counter else ""))
    return names


def commands_of_the_daemon() -> set[str]:
    """What its control socket understands."""
    text = (DAEMON / "control" / "request.rs").read_text(encoding="utf-8")
    body = text.split("pub enum Request {")[1].split("\n}")[0]
    return {name.lower() for name in re.findall(r"^    ([A-Z]\w+)", body, re.MULTILINE)}


def reasons_of_the_daemon() -> set[str]:
    """Why it says of no memory that it is zero."""
    text = (
        (DISCARD / "claim.rs").read_text(encoding="utf-8").split("    Reason\n")[1].split("\n}")[0]
    )
    return set(re.findall(r'^    \w+ "(\w+)";', text, re.M))


def reasons_of_report() -> set[str]:
    """Why the command report has no result."""
    text = (DAEMON / "device" / "report_now.rs").read_text(encoding="utf-8")
    return set(re.findall(r'^ +Self::\w+(?:\(_\))? => "([a-z-]+)",', text, re.M))


ABI_NAMES: dict[str, Callable[[], set[str]]] = {
    "Properties of QEMU": lambda: set(
        found(r"'\*(\w+)': 'BalloonCounters'", series="qemu", files=r"machine\.json$")
    ),
    "Reasons of QEMU": lambda: set(
        found(
            r"(?m)^(?: {12}|  'data': \[ )'([a-z-]+)'(?:,| \] \})$",
            series="qemu",
            files=r"machine\.json$",
        )
    ),
    "Trace events of QEMU": lambda: (
        set(
            found(
                r"(?m)^(virtio_balloon_(?:report|inflate)_\w+)\(",
                series="qemu",
                files="trace-events$",
            )
        )
        | set(found(r'\[RAM_DISCARD_(?!ZERO)\w+\] = "([a-z-]+)"', series="qemu"))
    ),
    "Reasons of the daemon": reasons_of_the_daemon,
    "Metrics of the daemon": metrics,
    "Control socket of the daemon": commands_of_the_daemon,
    "Reasons of report": reasons_of_report,
}


@pytest.mark.parametrize("title", ABI_NAMES)
def test_the_interface_is_the_one_that_is_there(title: str) -> None:
    names = section(title, ABI)
    assert sorted(names) == sorted(set(names)), "listed twice"
    assert set(names) == ABI_NAMES[title]()
    assert names


def test_the_feature_bits_are_those_of_the_headers() -> None:
    text = ABI.read_text(encoding="utf-8")
    listed = {
        name: int(bit)
        for bit, name in re.findall(r"^\| (\d+) \| `(VIRTIO_\w+)` \|", text, re.MULTILINE)
    }
    for series in ("linux", "qemu"):
        lines = found(
            r"#define (VIRTIO_BALLOON_F_(?:DEVICE_INIT_\w+|REPORT_NOW)\s+\d+)",
            series,
            r"virtio_balloon\.h$",
        )
        defined = {line.split()[0]: int(line.split()[1]) for line in lines}
        assert defined == listed
    assert len(listed) == 3


def test_numbers_in_the_interface() -> None:
    text = ABI.read_text(encoding="utf-8")
    lost = re.search(
        r"MEMORY_LOST: \w+ = (\d+);", (DAEMON / "signals.rs").read_text(encoding="utf-8")
    )
    assert lost and f"| {lost[1]} | with `--fd`: guest memory could not be touched |" in text
    numbers = {int(n) for n in re.findall(r"Number (\d+), (?:\d+) on Alpha", text)}
    assert numbers == {
        int(n) for n in found(r"__NR_refpage_create (\d+)", files="asm-generic/unistd.h$")
    }


@functools.cache
def corpus() -> str:
    """All that says something to users: both series, the daemon, the lab, the guest programs.

    Strings are joined.
    """
    texts = [*sources("linux").values(), *sources("qemu").values()]
    files = [*DAEMON.rglob("*.rs"), *DISCARD.glob("*.rs"), *(REPO / "lab").rglob("*.py")]
    files += [
        *(REPO / "guest").glob("*.c"),
        *(REPO / "tools").rglob("*.c"),
        REPO / "kz",
        REPO / "tests" / "conftest.py",
    ]
    texts += [file.read_text(encoding="utf-8") for file in files]
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))
    return re.sub(r"\\\n\s*", "", joined).replace('\\"', '"')


def messages(page: Path, title: str) -> list[str]:
    """What stands in the first column of tables whose first title that is.

    Code, or else the whole cell.
    """
    told: list[str] = []
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        rows = [row.strip("|").split(" | ")[0].strip(" |") for row in table.splitlines()]
        if rows[0] == title:
            for cell in rows[2:]:
                told += re.findall(r"`([^`]+)`", cell) or [cell]
    return told


def pieces(message: str) -> list[str]:
    """Parts of a message that do not differ from case to case."""
    parts = re.split(r"…|: |\d+", re.sub(r"^(Yes|No|Not yet|Ready): ", "", message))
    return [part.strip() for part in parts if len(part.strip()) > 3]


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if messages(p, "it says")],
    ids=lambda page: str(page.relative_to(REPO)),
)
def test_quoted_messages_are_in_the_sources(page: Path) -> None:
    said = corpus()
    quoted = messages(page, "it says")
    assert all(map(pieces, quoted))
    assert [
        message for message in quoted if not all(piece in said for piece in pieces(message))
    ] == []


def test_a_quote_without_a_source_is_found() -> None:
    assert "the guest's cat is not a shared file" not in corpus()
    assert pieces("No: Debian 13 … no longer has: bread") == ["Debian", "no longer has", "bread"]
    assert len([p for p in PAGES if messages(p, "it says")]) >= 3


def missing_tests(text: str) -> list[str]:
    """The tests, test files and mutants that a page names and that are not there."""
    tops = (REPO / "tests", REPO / "vhost-user-balloon")
    files = [p for top in tops for p in top.rglob("*.[pr][ys]") if p != Path(__file__)]
    there = "\n".join(
        [*sources("linux").values(), *sources("qemu").values(), *map(Path.read_text, files)]
    )
    names = re.findall(r"`(test_\w+|[a-z]+_[a-z_]+)`", text)
    mutants = [found[1:-1] for found in re.findall(r'"[a-z_()]+: [^"|]+"', text)]
    stems = {file.stem for file in files}
    return [
        n
        for n in [*names, *mutants]
        if n not in stems and not re.search(rf"\b{re.escape(n)}\b", there)
    ]


def test_the_tests_that_are_named_exist() -> None:
    for page in (REPO / "docs" / "README.md", REPO / "docs" / "explanation" / "hazards.md"):
        assert missing_tests(page.read_text(encoding="utf-8")) == []
    assert missing_tests('`test_of_a_cat`, `test_nothing_is_found`, "merge: by a cat"') == [
        "test_of_a_cat",
        "merge: by a cat",
    ]


MEMORY_ORDER = REPO / "docs" / "explanation" / "memory-order.md"
# A marked access, to the end of its first argument.
ACCESS = re.compile(
    r"\b((?:READ_ONCE|WRITE_ONCE|smp_\w+|static_branch_\w+|atomic\w*|\w*xchg\w*|data_race)"
    r"\((?:[^(),]|\([^()]*\))*)[,)]"
)


def marked_accesses() -> Counter[str]:
    """The marked accesses that the series adds outside its tests, and how often."""
    found: Counter[str] = Counter()
    for name, text in sources("linux").items():
        if re.match(r"(?!mm/tests/|tools/).*\.[ch]$", name):
            code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
            found.update(f"{access})" for access in ACCESS.findall(code))
    return found


def argued_accesses(text: str) -> dict[str, int]:
    """The marked accesses that a table of the page names, and in how many places they are."""
    table = re.split(r"\n## ", text.split("\n## Marked accesses\n")[1])[0]
    named = re.findall(r"`([^`]+)`(?: ×(\d+))?", table)
    return {access: int(places or 1) for access, places in named if ACCESS.fullmatch(access)}


def test_each_marked_access_has_an_argument() -> None:
    text = MEMORY_ORDER.read_text(encoding="utf-8")
    assert argued_accesses(text) == marked_accesses()
    without = text.replace("`READ_ONCE(pn->held)`", "the read")
    assert set(marked_accesses()) - set(argued_accesses(without)) == {"READ_ONCE(pn->held)"}
    once = text.replace("`READ_ONCE(p->folio)` ×2", "`READ_ONCE(p->folio)`")
    assert argued_accesses(once) != marked_accesses()


def test_the_functions_with_accesses_exist() -> None:
    rows = re.findall(r"^\| (.+?) \|", MEMORY_ORDER.read_text(encoding="utf-8"), re.MULTILINE)
    there = "\n".join(p.read_text(errors="replace") for p in parts.get("linux").patches())
    names = set(re.findall(r"`(\w+)\(\)`", "\n".join(rows)))
    assert len(names) > 40
    assert [name for name in names if not re.search(rf"\b{name}\(", there)] == []


@pytest.mark.slow
def test_messages_of_qemu_itself_are_in_its_sources() -> None:
    quoted = [message for page in PAGES for message in messages(page, "QEMU itself says")]
    tree = fetch.pristine(fetch.obtain("qemu"))
    files = [*(tree / "hw" / "virtio").glob("*.c"), *(tree / "migration").glob("*.c")]
    said = re.sub(r'"\s*\n\s*"', "", "\n".join(file.read_text(errors="replace") for file in files))
    said = said.replace('0x%" PRIx64', "0x")
    assert quoted
    assert [
        message for message in quoted if not all(piece in said for piece in pieces(message))
    ] == []


@pytest.mark.parametrize("title", NAMES)
def test_the_reference_has_what_the_series_adds(title: str) -> None:
    names = section(title)
    assert sorted(names) == sorted(set(names)), "listed twice"
    assert set(names) == NAMES[title]()
    assert names


def test_the_reference_of_kz_is_current() -> None:
    wanted = clidoc.page(cli.root())
    assert clidoc.PAGE.read_text(encoding="utf-8") == wanted, "run: ./kz reference"
    for words, _ in clidoc.verbs(cli.root()):
        assert f"## `{' '.join(words)}`\n" in wanted
    assert "## `kz top`\n" in wanted


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


def test_the_results_of_conform_have_a_row_for_every_check() -> None:
    source = (REPO / "guest" / "conform.c").read_text(encoding="utf-8")
    checks = re.findall(r'(?:^\t\{ |\bcheck_round\(|\brow\(PASS, )"([^"]+)"', source, re.MULTILINE)
    page = (REPO / "docs" / "results" / "conform.md").read_text(encoding="utf-8")
    assert len(checks) > 20
    assert [check for check in checks if f"| {check} |" not in page] == []


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


def in_passing(page: Path) -> list[str]:
    """What a page names of kz in its sentences: often without all the arguments."""
    text = re.sub(r"\n *", " ", page.read_text(encoding="utf-8"))
    return re.findall(r"(?<!`)`(?:\w+=\S+ )*(?:\./)?(kz [^`]+)`", text)


@functools.cache
def verbs() -> Any:
    """What kz can do, with all options."""
    return cli.root()


def understood(line: str) -> None:
    """Take a command apart as kz would; raises when it would not take it."""
    words = shlex.split(line)[1:]
    for sign in ("|", ">", "&", ";"):
        if sign in words:
            words = words[: words.index(sign)]
    command = verbs()
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_kz_knows_what_the_documents_name_of_it(page: Path) -> None:
    assert {line: lost for line in in_passing(page) if (lost := unknown(line))} == {}


def test_what_kz_does_not_know_is_found() -> None:
    assert unknown("kz boot --kernel=base --nonsense -- true --help") == ["--nonsense"]
    assert unknown("kz series nonsense") == ["nonsense"]
    assert unknown("kz series") == []


@pytest.mark.parametrize(
    "line", ["./kz nonsense", "./kz boot --nonsense", "./kz compare one two three"]
)
def test_what_kz_would_refuse_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"."):
        understood(line)


@pytest.mark.boots
def test_the_debug_kernel_has_all_that_is_listed() -> None:
    files = [f"/sys/kernel/mm/zero_page/{name}" for name in attributes()]
    files += [f"/sys/module/{name.replace('.', '/parameters/')}" for name in parameters()]
    files += [f"/sys/kernel/tracing/events/page_zeroed/{name}" for name in section("Tracepoints")]
    script = "".join(f"[ -e {file} ] || echo no {file}\n" for file in files)
    script += "".join(
        f"grep -q '^{name} ' /proc/vmstat || echo no {name}\n" for name in section("/proc/vmstat")
    )
    done = boot(BootSpec(kernel="debug", memory="1G", command=["sh", "-c", script]))
    assert done.exit_code == 0
    assert done.stdout == ""


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
        assert {row[0]: values.get(row[0], "n") for row in rows} == {
            row[0]: row[number] for row in rows
        }


def test_the_functions_that_contributing_names_are_where_it_says() -> None:
    text = " ".join((REPO / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    found = re.findall(r"`([\w.]+)\(\)` (?:in|of) `(lab/[\w/.]+)`", text)
    assert len(found) > 8
    for name, file in found:
        assert f"def {name}(" in (REPO / file).read_text(encoding="utf-8"), f"{name}() in {file}"
    named = re.findall(r"`((?:lab|guest)/[\w/.]+)`", text)
    assert [name for name in named if not (REPO / name).exists()] == []
