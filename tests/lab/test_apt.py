# SPDX-License-Identifier: GPL-2.0
"""Finding the machine's mirror in either form of apt's sources."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.core.errors import MACHINE, LabError
from lab.machine import apt

ONE_LINE = """
# a comment
deb cdrom:[Debian]/ bookworm main
deb [arch=amd64 signed-by=/k/a.gpg] https://mirror.invalid/debian bookworm main contrib
deb-src http://mirror.invalid/debian bookworm main
deb http://other.invalid/ stable-vendor extra
"""
DEB822 = """
Types: deb
URIs: https://vendor.invalid/apt
Suites: nodistro
Components: main

# the archive
Types: deb deb-src
URIs: mirror+file:/etc/apt/mirrors/debian.list
Suites: bookworm bookworm-updates
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc

Enabled: no
Types: deb
URIs: https://disabled.invalid/debian
Suites: bookworm
Components: main
"""


def test_one_line() -> None:
    found = apt.debian_entry(apt.parse_one_line(ONE_LINE), "bookworm")
    assert found.uris == ("https://mirror.invalid/debian",)
    assert found.signed_by == "/k/a.gpg"


def test_deb822() -> None:
    entries = apt.parse_deb822(DEB822)
    assert len(entries) == 2  # the disabled one is gone
    found = apt.debian_entry(entries, "bookworm")
    assert found.uris == ("mirror+file:/etc/apt/mirrors/debian.list",)
    assert "BEGIN PGP" in found.signed_by


def test_both_forms_are_read_from_disk(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("deb http://a.invalid/debian bookworm main\n")
    (tmp_path / "sources.list.d" / "debian.sources").write_text(DEB822)
    (tmp_path / "sources.list.d" / "old.list.save").write_text("deb http://no.invalid/debian bookworm main\n")
    uris = [uri for entry in apt.machine_entries(tmp_path) for uri in entry.uris]
    assert uris[0] == "http://a.invalid/debian"
    assert "http://no.invalid/debian" not in uris


def test_no_mirror_is_a_broken_machine() -> None:
    with pytest.raises(LabError) as caught:
        apt.debian_entry(apt.parse_one_line("deb http://x.invalid/ nodistro main"), "bookworm")
    assert caught.value.code == MACHINE
    assert "KNOWNZERO_LINUX_SOURCE" in caught.value.fix


def test_security_is_not_the_archive() -> None:
    entries = apt.parse_one_line(
        "deb http://s.invalid/debian-security bookworm-security main\ndeb http://a.invalid/debian bookworm main"
    )
    assert apt.debian_entry(entries, "bookworm").uris == ("http://a.invalid/debian",)


WORD = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=8)


@given(
    uri=WORD, suites=st.lists(WORD, min_size=1, max_size=3), components=st.lists(WORD, min_size=1, max_size=3)
)
def test_both_forms_mean_the_same(uri: str, suites: list[str], components: list[str]) -> None:
    lines = "\n".join(f"deb http://{uri}.invalid/d {suite} {' '.join(components)}" for suite in suites)
    stanza = f"Types: deb\nURIs: http://{uri}.invalid/d\nSuites: {' '.join(suites)}\nComponents: {' '.join(components)}\n"
    one = apt.parse_one_line(lines)
    (other,) = apt.parse_deb822(stanza)
    assert [entry.suites[0] for entry in one] == list(other.suites)
    assert all((entry.uris, entry.components) == (other.uris, other.components) for entry in one)


@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    apt.parse_one_line(text)
    apt.parse_deb822(text)
