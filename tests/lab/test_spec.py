# SPDX-License-Identifier: GPL-2.0
"""The virtio text in spec/: numbered statements, tables with the test of each, and patches."""

from __future__ import annotations

import difflib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.core.paths import REPO

SPEC = REPO / "spec"
TEXTS = {
    "6": SPEC / "device-init-reported.tex",
    "7": SPEC / "device-init-on-inflate.tex",
    "16": SPEC / "report-now.tex",
}
TABLE = SPEC / "implementations.md"
OURS, PUBLISHED = r"(?:DRV|DEV)\d+\.\d+", r"5\.5\.[\d.]+-\d.*"
KEYWORD = re.compile(r"\b(?:MUST|SHOULD|MAY)\b")


def uncommented(text: str) -> str:
    return re.sub(r"(?<!\\)%.*", "", text)


def sections(text: str) -> list[tuple[str, str]]:
    """Whose normative section each part of a text is: DRV, DEV, or nobody's.

    A part without a heading belongs to the section of the specification that its place names.
    """
    marks = {"driver": "DRV", "device": "DEV"}
    normative = r"^(?:% Goes into .*)?\\(driver|device)normative\{"
    other = r"^\\(?:sub)*(?:section|paragraph)\{|^% Goes into .*"
    parts = re.split(rf"(?m){normative}|{other}", text)
    return [
        (marks.get(kind or "", ""), uncommented(part))
        for kind, part in zip([None, *parts[1::2]], parts[::2], strict=True)
    ]


def statements(text: str) -> list[str]:
    return re.findall(r"\\req\{([A-Z]+\d+\.\d+)\}", uncommented(text))


def rows(statement: str = OURS) -> dict[str, list[str]]:
    """The other cells of the rows of such statements."""
    found: dict[str, list[str]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(statement, cells[0]):
            assert cells[0] not in found
            found[cells[0]] = cells[1:]
    return found


@pytest.mark.parametrize("bit", TEXTS)
def test_statements_are_numbered_without_a_gap(bit: str) -> None:
    numbers = statements(TEXTS[bit].read_text(encoding="utf-8"))
    for kind in ("DRV", "DEV"):
        mine = [number for number in numbers if number.startswith(kind)]
        assert mine == [f"{kind}{bit}.{n}" for n in range(1, len(mine) + 1)]
        assert mine


@pytest.mark.parametrize("bit", TEXTS)
def test_each_normative_sentence_has_a_number_of_its_section(bit: str) -> None:
    for kind, part in sections(TEXTS[bit].read_text(encoding="utf-8")):
        for piece in re.split(r"(?=\\req\{)|\n\n", part):
            number = re.match(r"\\req\{([A-Z]+)", piece)
            if number:
                # The legacy section is about the driver.
                assert number[1] == (kind or "DRV"), piece
            elif KEYWORD.search(piece):
                # The sentence that introduces a list; each item has a number.
                assert re.search(r"\\begin\{itemize\}\s*\\item\s*$", piece), piece


@pytest.mark.parametrize("bit", TEXTS)
def test_the_conformance_clauses_name_each_section(bit: str) -> None:
    text = uncommented(TEXTS[bit].read_text(encoding="utf-8"))
    for kind in ("driver", "device"):
        labels = re.findall(rf"\\{kind}normative\{{[^}}]*\}}\{{[^}}]*\}}\{{([^}}]*)\}}", text)
        assert labels
        assert re.findall(rf"\\item \\ref\{{{kind}normative:([^}}]*)\}}", text) == labels


def test_the_table_has_each_statement_once() -> None:
    wanted = [
        number for path in TEXTS.values() for number in statements(path.read_text(encoding="utf-8"))
    ]
    assert sorted(rows()) == sorted(wanted)


def defined(name: str, folder: str, pattern: str, files: str) -> bool:
    """Whether a function is defined in a source, or in a patch that brings it."""
    expression = re.compile(rf"^\+?\s*{pattern}\s+{name}\(", re.MULTILINE)
    paths = [
        path
        for path in (REPO / folder).rglob(files)
        if path.is_file() and "target" not in path.parts
    ]
    return any(
        expression.search(path.read_text(encoding="utf-8", errors="replace")) for path in paths
    )


def exists(name: str, column: int) -> bool:
    if "::" in name:
        file, _, function = name.partition("::")
        folder = "tests/guest" if (REPO / "tests/guest" / file).is_file() else "tests/hostile"
        return defined(function, folder, "def", file)
    if column == 1:
        return defined(name, "qemu", r"static void", "*")
    return defined(name, "vhost-user-balloon", "fn", "*.rs")


@pytest.mark.parametrize("number", sorted(rows() | rows(PUBLISHED)))
def test_each_named_test_exists(number: str) -> None:
    cells = (rows() | rows(PUBLISHED))[number]
    assert len(cells) in (
        (2,) if number.startswith("DRV") else (4,) if number.startswith("DEV") else (2, 4)
    )
    for column in range(1, len(cells), 2):
        names = list(re.findall(r"`([\w.:]+)`", cells[column]))
        assert names or re.match(r"no test: \w+", cells[column])
        for name in names:
            assert exists(name, column), f"{number}: {name}"


def test_a_test_that_is_not_there_is_found() -> None:
    assert not exists("test_reuse.py::test_that_nobody_wrote", 1)
    assert not exists("test_that_nobody_wrote", 1)
    assert not exists("that_nobody_wrote", 3)


# The macros of the specification's commands.tex and of its balloon chapter, and those of LaTeX.
# The number of arguments; None for those that are not followed by one.
MACROS = {
    "begin": 1,
    "bmod": None,
    "devicenormative": 3,
    "drivernormative": 3,
    "end": 1,
    "field": 1,
    "item": None,
    "label": 1,
    "lceil": None,
    "lfloor": None,
    "paragraph": 1,
    "rceil": None,
    "ref": 1,
    "req": 1,
    "rfloor": None,
    "subparagraph": 1,
    "subsubsection": 1,
}
ENVIRONMENTS = {"description", "itemize", "lstlisting", "note"}


@pytest.mark.parametrize("bit", TEXTS)
def test_the_macros_are_those_of_the_specification(bit: str) -> None:
    text = uncommented(TEXTS[bit].read_text(encoding="utf-8"))
    # A heading that is an argument of a macro has none of its own.
    text = re.sub(r"(normative\{)\\\w+\}", r"\1}", text)
    for name in re.findall(r"\\([A-Za-z]+)", text):
        assert name in MACROS
    for name, count in MACROS.items():
        used = re.findall(rf"\\{name}(?![A-Za-z])((?:\{{[^{{}}]*\}})*)", text)
        for arguments in used if count else []:
            assert len(re.findall(r"\{", arguments)) == count, name
    assert set(re.findall(r"\\(?:begin|end)\{(\w+)\}", text)) <= ENVIRONMENTS


@pytest.mark.parametrize("bit", TEXTS)
def test_labels_are_paths_that_end_with_the_heading(bit: str) -> None:
    text = uncommented(TEXTS[bit].read_text(encoding="utf-8"))
    headings = re.findall(r"(?m)^\\(?:sub)*(?:section|paragraph)\{.*", text)
    normative = re.findall(r"(?m)^\\(?:driver|device)normative\{.*", text)
    assert headings
    assert normative
    for line in headings:
        assert re.fullmatch(
            r"\\\w+\{(.*)\}\\label\{sec:Device Types / Memory Balloon Device / .* / \1\}", line
        ), line
    for line in normative:
        assert re.fullmatch(
            r"\\\w+\{\\\w+\}\{(.*)\}\{(Device Types / Memory Balloon Device / .* / \1)\}", line
        ), line
        assert rf"\label{{sec:{line.rpartition('{')[2]}" in text


# The specification's structure: its commands and labels, without its sentences.
DESCRIPTION = r"""\section{Traditional Memory Balloon Device}\label{sec:Memory Balloon Device}
TEXT
\subsection{Virtqueues}\label{sec:Memory Balloon Device / Virtqueues}
\begin{description}
\item[0] TEXT
\end{description}

\subsection{Feature bits}\label{sec:Memory Balloon Device / Feature bits}
\begin{description}
\item[VIRTIO_BALLOON_F_MUST_TELL_HOST (0)] TEXT

\item[ VIRTIO_BALLOON_F_PAGE_REPORTING(5) ] TEXT
    TEXT

\end{description}

\drivernormative{\subsubsection}{Feature bits}{Memory Balloon Device / Feature bits}
DRIVER FEATURES

\devicenormative{\subsubsection}{Feature bits}{Memory Balloon Device / Feature bits}
DEVICE FEATURES
\subparagraph{Legacy Interface: Feature bits}\label{sec:Memory
Balloon Device / Feature bits / Legacy Interface}
TEXT

\subsection{Device configuration layout}\label{sec:Memory Balloon Device / Layout}
  LAYOUT

\begin{lstlisting}
struct virtio_balloon_config {
        le32 num_pages;
        le32 poison_val;
};
\end{lstlisting}

\subparagraph{Legacy Interface: Device configuration layout}\label{sec:Legacy Layout}
TEXT

\subsection{Device Operation}\label{sec:Memory Balloon Device / Device Operation}
\begin{enumerate}
\item TEXT
\end{enumerate}

\drivernormative{\subsubsection}{Device Operation}{Memory Balloon Device / Device Operation}
TEXT

\devicenormative{\subsubsection}{Device Operation}{Memory Balloon Device / Device Operation}

TEXT

\paragraph{Legacy Interface: Device Operation}\label{sec:Legacy Device Operation}
\begin{note}
LEGACY OPERATION
\end{note}
\subsubsection{Memory Statistics}\label{sec:Memory Balloon Device / Memory Statistics}

\begin{lstlisting}
struct virtio_balloon_stat {
};
\end{lstlisting}

\drivernormative{\paragraph}{Memory Statistics}{Memory Balloon Device / Memory Statistics}
TEXT

\subsubsection{Memory Statistics Tags}\label{sec:Memory Balloon Device / Tags}

\begin{description}
\item[VIRTIO_BALLOON_S_SWAP_IN (0)] TEXT
\end{description}

\subsubsection{Free Page Reporting}\label{sec:Memory Balloon Device / Free Page Reporting}

TEXT

\drivernormative{\paragraph}{Free Page Reporting}{Memory Balloon Device / Free Page Reporting}

TEXT

\devicenormative{\paragraph}{Free Page Reporting}{Memory Balloon Device / Free Page Reporting}

REPORTING
"""
CONFORMANCE = r"""\conformance{\subsection}{Conformance}\label{sec:KIND Conformance}

TEXT

\begin{itemize}
\item \ref{KINDnormative:Memory Balloon Device / Feature bits}
\end{itemize}
"""
SKELETON = {
    "description.tex": DESCRIPTION,
    "driver-conformance.tex": CONFORMANCE.replace("KIND", "driver"),
    "device-conformance.tex": CONFORMANCE.replace("KIND", "device"),
}
# The order of lines with all texts: the bit that brings a line, and how the line begins.
ORDER = {
    "description.tex": r"""
   \subsection{Feature bits}
   \item[ VIRTIO_BALLOON_F_PAGE_REPORTING(5) ]
 6 \item[ VIRTIO_BALLOON_F_DEVICE_INIT_REPORTED(6) ]
 7 \item[ VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE(7) ]
16 \item[ VIRTIO_BALLOON_F_REPORT_NOW(16) ]
   \end{description}
   \drivernormative{\subsubsection}{Feature bits}
   DRIVER FEATURES
 6 The driver MUST NOT accept VIRTIO_BALLOON_F_DEVICE_INIT_REPORTED if
 7 The driver SHOULD NOT accept VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE if
16 The driver MUST NOT accept VIRTIO_BALLOON_F_REPORT_NOW if
   \devicenormative{\subsubsection}{Feature bits}
   DEVICE FEATURES
 6 The device MUST NOT offer VIRTIO_BALLOON_F_DEVICE_INIT_REPORTED if
16 The device MUST NOT offer VIRTIO_BALLOON_F_REPORT_NOW if
   \subparagraph{Legacy Interface: Feature bits}
   \subsection{Device configuration layout}
     LAYOUT
16 \field{report_now_cmd} and \field{report_now_done} are available if
   \begin{lstlisting}
           le32 poison_val;
16         le32 report_now_cmd;
16         le32 report_now_done;
   };
   \paragraph{Legacy Interface: Device Operation}
   LEGACY OPERATION
   \end{note}
 7 \subsubsection{Initialization of Inflated Pages}
 7 \drivernormative{\paragraph}{Initialization of Inflated Pages}
 7 \devicenormative{\paragraph}{Initialization of Inflated Pages}
 7 \paragraph{Legacy Interface: Initialization of Inflated Pages}
   \subsubsection{Memory Statistics}
   \subsubsection{Free Page Reporting}
   \devicenormative{\paragraph}{Free Page Reporting}
   REPORTING
 6 \paragraph{Initialization of Reported Memory}
 6 \drivernormative{\subparagraph}{Initialization of Reported Memory}
 6 \devicenormative{\subparagraph}{Initialization of Reported Memory}
 6 \subparagraph{Legacy Interface: Initialization of Reported Memory}
16 \subsubsection{Reports on Request}
16 \drivernormative{\paragraph}{Reports on Request}
16 \devicenormative{\paragraph}{Reports on Request}
""",
    "driver-conformance.tex": r"""
   \begin{itemize}
   \item \ref{drivernormative:Memory Balloon Device / Feature bits}
 6 \item \ref{drivernormative:Device Types / Memory Balloon Device / Device Operation / Free
 7 \item \ref{drivernormative:Device Types / Memory Balloon Device / Device Operation / Init
16 \item \ref{drivernormative:Device Types / Memory Balloon Device / Device Operation / Reports
   \end{itemize}
""",
    "device-conformance.tex": r"""
   \begin{itemize}
   \item \ref{devicenormative:Memory Balloon Device / Feature bits}
 6 \item \ref{devicenormative:Device Types / Memory Balloon Device / Device Operation / Free
 7 \item \ref{devicenormative:Device Types / Memory Balloon Device / Device Operation / Init
16 \item \ref{devicenormative:Device Types / Memory Balloon Device / Device Operation / Reports
   \end{itemize}
""",
}


def load() -> Any:
    found = importlib.util.spec_from_file_location("insert", SPEC / "insert.py")
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    sys.modules["insert"] = module
    found.loader.exec_module(module)
    return module


INSERT = load()


def checkout(folder: Path, files: dict[str, str]) -> Path:
    balloon = folder / INSERT.BALLOON
    balloon.mkdir(parents=True)
    for name, text in files.items():
        (balloon / name).write_text(text, encoding="utf-8")
    return folder


def content(folder: Path) -> dict[str, str]:
    return {
        path.name: path.read_text(encoding="utf-8") for path in (folder / INSERT.BALLOON).iterdir()
    }


def run(folder: Path, bits: list[str]) -> int:
    return int(INSERT.main([str(folder), *(str(TEXTS[bit]) for bit in bits)]))


def check_order(files: dict[str, str], bits: list[str]) -> None:
    for name, order in ORDER.items():
        lines = files[name].splitlines()
        at = -1
        for entry in order.strip("\n").splitlines():
            bit, wanted = entry[:2].strip(), entry[3:]
            having = [n for n, line in enumerate(lines) if line.startswith(wanted)]
            if bit and bit not in bits:
                assert not having, wanted
                continue
            assert not bit or len(having) == 1, wanted
            later = [n for n in having if n > at]
            assert later, f"not in its place in {name}: {wanted}"
            at = later[0]


@pytest.mark.parametrize("bits", [["6"], ["7"], ["16"], ["6", "7", "16"]], ids=" ".join)
def test_each_piece_lands_in_its_place(bits: list[str], tmp_path: Path) -> None:
    assert run(checkout(tmp_path, SKELETON), bits) == 0
    files = content(tmp_path)
    check_order(files, bits)
    for name, before in SKELETON.items():
        after = files[name]
        changes = list(difflib.ndiff(before.splitlines(), after.splitlines()))
        assert not [line for line in changes if line.startswith(("- ", "? "))]
        assert "\n\n\n" not in after
        assert after.endswith("\n")
        assert not after.endswith("\n\n")
        assert "\\req" not in after
        assert "%" not in after
        # The lists and the listings that are there, and no others.
        for environment in ("description", "lstlisting"):
            begin = rf"\begin{{{environment}}}"
            assert after.count(begin) == before.count(begin)
        for heading in re.findall(
            r"(?m)^\\(?:(?:sub)*(?:section|paragraph)\{|\w+normative).*", after
        ):
            if heading in before:
                continue
            assert f"\n\n{heading}" in after
    # This list of the specification ends with a blank line.
    end = "\n\n\\end{description}\n\n\\drivernormative{\\subsubsection}{Feature bits}"
    assert end in files["description.tex"]
    for name in ("driver", "device"):
        assert files[f"{name}-conformance.tex"].count(r"\begin{itemize}") == 1
    keywords = sum(
        len(KEYWORD.findall(uncommented(TEXTS[bit].read_text(encoding="utf-8")))) for bit in bits
    )
    assert keywords > 0
    assert sum(len(KEYWORD.findall(text)) for text in files.values()) == keywords


def test_the_default_is_all_texts_in_order(tmp_path: Path) -> None:
    together = checkout(tmp_path / "together", SKELETON)
    done = subprocess.run(
        [SPEC / "insert.py", together], capture_output=True, text=True, check=True
    )
    assert "git -C" in done.stdout
    one_by_one = checkout(tmp_path / "one by one", SKELETON)
    for bit in TEXTS:
        assert run(one_by_one, [bit]) == 0
        check_order(content(one_by_one), list(TEXTS)[: list(TEXTS).index(bit) + 1])
    assert content(together) == content(one_by_one)


def test_a_section_does_not_take_in_the_one_of_another_text(tmp_path: Path) -> None:
    assert run(checkout(tmp_path, SKELETON), ["16", "6"]) == 0
    text = content(tmp_path)["description.tex"]
    order = [
        r"\devicenormative{\paragraph}{Free Page Reporting}",
        r"\paragraph{Initialization of Reported Memory}",
        r"\subparagraph{Legacy Interface: Initialization of Reported Memory}",
        r"\subsubsection{Reports on Request}",
        r"\devicenormative{\paragraph}{Reports on Request}",
    ]
    places = [text.index(heading) for heading in order]
    assert places == sorted(places)


def refused(folder: Path, texts: list[Path], capsys: pytest.CaptureFixture[str]) -> str:
    """The error, after a check that it has three parts and that nothing was written."""
    before = content(folder)
    assert INSERT.main([str(folder), *map(str, texts)]) == 1
    assert content(folder) == before
    error = capsys.readouterr().err
    assert re.fullmatch(r"\S.*\n  why: \S.*\n  fix: \S.*\n", error), error
    return error


PLACES = sorted(
    {
        (piece.file, piece.command, piece.section or "", wanted)
        for path in TEXTS.values()
        for piece in INSERT.pieces(path)
        for wanted in filter(None, (piece.command, piece.section))
    }
)


@pytest.mark.parametrize("twice", [False, True], ids=["missing", "twice"])
@pytest.mark.parametrize(("name", "command", "section", "wanted"), PLACES)
def test_a_place_that_is_not_there_once_is_refused(
    name: str,
    command: str,
    section: str,
    wanted: str,
    twice: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = []
    for line in SKELETON[name].splitlines(keepends=True):
        if twice or not line.lstrip().startswith(wanted):
            lines.append(line)
        if twice and line.startswith(section if wanted == command and section else wanted):
            lines.append(f"{wanted}\n")
    if twice and not section:
        lines.append(f"{wanted}\n")
    checkout(tmp_path, SKELETON | {name: "".join(lines)})
    # Other files and pieces have been worked on when the last text is refused.
    error = refused(tmp_path, list(TEXTS.values()), capsys)
    assert wanted in error
    assert ("0 lines" in error) != twice


def test_a_second_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(checkout(tmp_path, SKELETON), ["7"]) == 0
    capsys.readouterr()
    for bits in (["7"], ["6", "7", "16"], ["16", "16"]):
        assert "already there" in refused(tmp_path, [TEXTS[bit] for bit in bits], capsys)
    assert run(tmp_path, ["6", "16"]) == 0


@pytest.mark.parametrize("name", SKELETON)
def test_a_part_of_a_text_that_is_there_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    piece = [piece for piece in INSERT.pieces(TEXTS["16"]) if piece.file == name][-1]
    checkout(tmp_path, SKELETON | {name: SKELETON[name] + piece.lines[0] + "\n"})
    assert "already there" in refused(tmp_path, [TEXTS["16"]], capsys)


@pytest.mark.parametrize(
    "text",
    [
        "% Goes into description.tex, somewhere\nX\n",
        "% Goes into description.tex, before\nX\n",
        "X\n",
        "",
        "% Goes into device-conformance.tex, before \\end{itemize}, content only\n\\item X\n",
        "% Goes into device-conformance.tex, before \\end{itemize}, content only\n"
        "\\begin{itemize}\n\\end{itemize}\n",
        "% Goes into device-conformance.tex, before \\end{itemize}, content only\n"
        "\\begin{itemize}\n\\item X\n\\end{enumerate}\n",
        "% Goes into description.tex, before \\subsection{Feature bits}\n\n",
        "% Goes into description.tex, before \\subsection{Feature bits}\nX\n"
        "% Goes into other.tex, before \\end{itemize}\nX\n",
    ],
)
def test_a_bad_text_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout(tmp_path / "spec", SKELETON)
    (tmp_path / "text.tex").write_text(text, encoding="utf-8")
    refused(tmp_path / "spec", [TEXTS["6"], tmp_path / "text.tex"], capsys)


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert INSERT.main([str(tmp_path)]) == 1
    assert "device-types/balloon/" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]],
    ids=lambda words: " ".join(words[:2]),
)
def test_the_program_is_clean(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments, "spec/insert.py"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
