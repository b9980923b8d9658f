# SPDX-License-Identifier: GPL-2.0
"""Mails that cannot be sent as they are are found before anybody sends them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab.post import sending

LETTER = """From {zero} Mon Sep 17 00:00:00 2001
Message-Id: <cover@example.org>
From: A Person <a@example.org>
Date: Sun, 22 Nov 2026 20:00:00 +0000
Subject: [PATCH 0/1] mm: the thing

Why.
"""
PATCH = """From {zero} Mon Sep 17 00:00:00 2001
Message-Id: <one@example.org>
In-Reply-To: <cover@example.org>
References: <cover@example.org>
From: A Person <a@example.org>
Date: Sun, 22 Nov 2026 20:00:00 +0000
Subject: [PATCH 1/1] mm: add the thing

Because.

Signed-off-by: A Person <a@example.org>
---
 mm/thing.c | 1 +

diff --git a/mm/thing.c b/mm/thing.c
--- a/mm/thing.c
+++ b/mm/thing.c
@@ -0,0 +1 @@
+int thing;
"""


def mails(folder: Path, letter: str = LETTER, patch: str = PATCH, zero: str = "0" * 40) -> list[Path]:
    folder.mkdir()
    for name, text in (("0000-cover-letter.patch", letter), ("0001-mm-add-the-thing.patch", patch)):
        (folder / name).write_text(text.replace("{zero}", zero))
    return sorted(folder.iterdir())


def test_mails_that_are_in_order(tmp_path: Path) -> None:
    made = mails(tmp_path / "mails")
    assert sending.threading(made) == []
    assert sending.forms(made) == []


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("In-Reply-To: <cover@example.org>\n", "", "0001"),
        ("In-Reply-To: <cover@example.org>", "In-Reply-To: <other@example.org>", "0001"),
        ("Message-Id: <one@example.org>", "Message-Id: <cover@example.org>", "0001"),
        (
            "Message-Id: <cover@example.org>\n",
            "Message-Id: <cover@example.org>\nIn-Reply-To: <v1@x>\n",
            "0000",
        ),
    ],
    ids=["no answer", "answers another", "twice the same name", "the letter answers"],
)
def test_threads_that_would_break(old: str, new: str, where: str, tmp_path: Path) -> None:
    letter, patch = LETTER.replace(old, new), PATCH.replace(old, new)
    assert (letter, patch) != (LETTER, PATCH)
    found = sending.threading(mails(tmp_path / "mails", letter, patch))
    assert {(one.check, one.where[:4]) for one in found} == {("threading", where)}


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("Signed-off-by: A Person <a@example.org>\n", "", "sign-off"),
        ("Signed-off-by: A Person <a@example.org>", "Signed-off-by: B Person <b@example.org>", "sign-off"),
        ("From: A Person <a@example.org>", "From: knownzero <knownzero@localhost>", "sender"),
        ("Why.", "*** BLURB HERE ***", "letter"),
        ("+int thing;", "+" + "x" * 1000, "length"),
    ],
)
def test_forms_that_would_be_refused(old: str, new: str, check: str, tmp_path: Path) -> None:
    found = sending.forms(mails(tmp_path / "mails", LETTER.replace(old, new), PATCH.replace(old, new)))
    assert check in {one.check for one in found}


def test_checkpatch_reads_the_mails_and_remembers_those_in_order(cache: Path, tmp_path: Path) -> None:
    del cache
    pristine = tmp_path / "linux-7.3.4"
    (pristine / "scripts").mkdir(parents=True)
    asked = tmp_path / "asked"
    (pristine / "scripts/checkpatch.pl").write_text(
        "my $file = pop @ARGV;\n"
        f'open(my $rules, ">>", "{tmp_path}/rules"); print $rules "@ARGV\\n";\n'
        f'open(my $asked, ">>", "{asked}"); print $asked "$file\\n";\n'
        'open(my $in, "<", $file); print "$file:1: WARNING: it is bad\\n" if grep { /bad/ } <$in>;\n'
    )

    def told(folder: str, patch: str, zero: str) -> tuple[list[str], int]:
        asked.write_text("")
        made = mails(tmp_path / folder, LETTER, patch, zero)
        found = sending.checkpatch("linux", made[1:], pristine)
        return [one.where for one in found], len(asked.read_text().splitlines())

    assert told("one", PATCH, "0" * 40) == ([], 1)
    # The same once more, as another export has it: other names, other places in the series.
    again = PATCH.replace("<one@", "<two@").replace("[PATCH 1/1]", "[PATCH 01/99]").replace("<cover@", "<c2@")
    assert told("two", again, "1" * 40) == ([], 0)
    bad = PATCH.replace("Because.", "It was bad.")
    assert told("three", bad, "0" * 40) == (["0001-mm-add-the-thing.patch"], 1)
    assert told("four", bad, "0" * 40) == (["0001-mm-add-the-thing.patch"], 1)
    # A program of its own need not use what only the kernel has.
    assert "COMPLEX_MACRO" not in (tmp_path / "rules").read_text()
    told("five", PATCH.replace("mm/thing.c", "tools/thing.c"), "0" * 40)
    assert "COMPLEX_MACRO" in (tmp_path / "rules").read_text()


def test_sending_is_rehearsed_and_nothing_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = mails(tmp_path / "mails")
    programs = tmp_path / "bin"
    programs.mkdir()
    fake = programs / "git-send-email"
    said = tmp_path / "said"
    fake.write_text(
        f'#!/bin/sh\necho "$@" > {said}\nfor f; do :; done\ngrep -q refused "$f" || exit 0\necho no >&2\nexit 1\n'
    )
    fake.chmod(0o755)
    monkeypatch.setattr(sending, "_can_send", lambda: False)
    assert sending.rehearsal(made) == []
    assert "was not rehearsed" in capsys.readouterr().err
    monkeypatch.setattr(sending, "_can_send", lambda: True)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    assert sending.rehearsal(made) == []
    words = said.read_text().split()
    assert "--dry-run" in words
    assert words[-2:] == [str(one) for one in made]
    assert not [word for word in words if word.startswith(("--to", "--from")) and "localhost" not in word]
    made[1].write_text(PATCH + "refused\n")
    assert [(one.check, one.text) for one in sending.rehearsal(made)] == [("send-email", "no")]


def test_maintainers_come_from_the_source_only(tmp_path: Path) -> None:
    made = mails(tmp_path / "mails")
    pristine = tmp_path / "linux"
    pristine.mkdir()
    assert sending.recipients(made, pristine) == []
    (pristine / "scripts").mkdir()
    (pristine / "scripts/get_maintainer.pl").write_text(
        'print "A Person <a\\@example.org> (maintainer:MM)\\n", "\\n", join(" ", map { s|.*/||r } @ARGV), "\\n";\n'
        'print "linux-mm\\@example.org (open list:MM)\\n";\n'
        'die "no history is asked" unless grep { $_ eq "--no-git" } @ARGV;\n'
    )
    assert sending.recipients(made, pristine) == [
        "A Person <a@example.org> (maintainer:MM)",
        "linux-mm@example.org (open list:MM)",
    ]
