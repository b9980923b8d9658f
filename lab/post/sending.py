# SPDX-License-Identifier: GPL-2.0
"""Whether exported mails can be sent as they are, and to whom: nothing is sent."""

from __future__ import annotations

import email
import email.policy
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.message import EmailMessage
from pathlib import Path

from lab.build.images import jobs
from lab.core import lock, paths, progress, run
from lab.series import series
from lab.series.checkpatch import KERNEL_ONLY, Problem, complaints

# What SMTP carries (RFC 5322), without the line's end.
LONGEST = 998
# The mails of new files and of MAINTAINERS are different ones; and some list files by folders.
UNASKED = "FILE_PATH_CHANGES"
# What differs between two exports of the same series.
VARIES = re.compile(
    rb"^From [0-9a-f]{40} .*\n|^(?:Message-I[dD]|In-Reply-To|References): .*\n|\[PATCH \d+/\d+\]",
    re.MULTILINE,
)


def parsed(mail: Path) -> EmailMessage:
    """A mail's headers and text."""
    return email.message_from_bytes(mail.read_bytes(), policy=email.policy.default)


def threading(mails: list[Path]) -> list[Problem]:
    """The letter answers nothing, every other mail answers the letter, and no two are called the same."""
    found = []
    messages = {mail: parsed(mail) for mail in mails}
    letter = str(messages[mails[0]]["Message-Id"] or "").strip()
    seen: set[str] = set()
    for mail, message in messages.items():
        name = str(message["Message-Id"] or "").strip()
        answers = str(message["In-Reply-To"] or "").strip()
        if not name or name in seen:
            found.append(Problem("threading", mail.name, f"its Message-Id is {name or 'missing'}"))
        seen.add(name)
        wanted = "" if mail == mails[0] else letter
        if answers != wanted:
            found.append(
                Problem(
                    "threading", mail.name, f"it answers {answers or 'nothing'}, not {wanted or 'nothing'}"
                )
            )
    return found


def forms(mails: list[Path]) -> list[Problem]:
    """Who signs, how long lines are, and whether the letter still has a placeholder."""
    found = []
    for mail in mails:
        message = parsed(mail)
        text = mail.read_bytes()
        author = str(message["From"])
        address = re.search(r"[^\s<]+@[^\s>]+", author)
        if not address or address[0].endswith("@localhost"):
            found.append(
                Problem("sender", mail.name, f"it is from {author}: set git's user.name and user.email")
            )
        if mail != mails[0]:
            body = text.partition(b"\n---\n")[0].decode(errors="replace")
            signed = re.findall(r"^Signed-off-by: .*<(.+)>$", body, re.MULTILINE)
            if not address or address[0] not in signed:
                found.append(Problem("sign-off", mail.name, f"no Signed-off-by of its author, {author}"))
        longest = max(map(len, text.split(b"\n")))
        if longest > LONGEST:
            found.append(
                Problem("length", mail.name, f"a line has {longest} characters; mail carries {LONGEST}")
            )
    for mark in ("*** SUBJECT HERE ***", "*** BLURB HERE ***"):
        if mark in mails[0].read_text(encoding="utf-8"):
            found.append(Problem("letter", mails[0].name, f"it still says {mark}"))
    return found


def checkpatch(name: str, mails: list[Path], pristine: Path) -> list[Problem]:
    """What the source's checkpatch.pl says of each mail as it is sent; what it had nothing to say of is remembered."""
    script = pristine / "scripts" / "checkpatch.pl"
    always = ["--no-summary", "--terse", "--color=never", *(["--show-types"] if name == "linux" else [])]

    def one(mail: Path) -> list[Problem]:
        whole = mail.read_bytes()
        content = VARIES.sub(b"", whole)
        program = all(name.startswith("tools/") or name == "MAINTAINERS" for name in series.touched(whole))
        options = [*always, f"--ignore={UNASKED},{KERNEL_ONLY}" if program else f"--ignore={UNASKED}"]
        key = hashlib.sha256(json.dumps([pristine.name, options]).encode() + content).hexdigest()
        stamp = paths.sub("passed") / f"mail-{name}-{key[:24]}"
        used.add(stamp.name)
        if stamp.is_file():
            return []
        found = [
            replace(problem, text=problem.text.removeprefix(f"{mail}:"))
            for problem in complaints(["perl", str(script), *options, str(mail)], pristine, mail.name)
        ]
        if not found:
            lock.write_atomically(stamp, "")
        return found

    used: set[str] = set()
    with progress.step(f"checkpatch on {len(mails)} mails"), ThreadPoolExecutor(jobs()) as pool:
        found = [problem for problems in pool.map(one, mails) for problem in problems]
    for stamp in paths.sub("passed").glob(f"mail-{name}-*"):
        if stamp.name not in used:
            stamp.unlink(missing_ok=True)
    return found


def rehearsal(mails: list[Path]) -> list[Problem]:
    """``git send-email --dry-run`` on the mails; a note, and nothing found, where git cannot send mail."""
    if not _can_send():
        progress.note("git has no send-email here (Debian: package git-email): sending was not rehearsed")
        return []
    argv = [
        "git", "send-email", "--dry-run", "--quiet", "--confirm=never", "--suppress-cc=all", "--no-thread",
        "--no-chain-reply-to", "--from=rehearsal@localhost", "--to=rehearsal@localhost",
        "--smtp-server=/bin/false", "--8bit-encoding=UTF-8", "--transfer-encoding=auto", *map(str, mails),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            argv,
            cwd=folder,
            env=series.git_environment(Path(folder).parent),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode == 0:
        return []
    said = (done.stderr or done.stdout).strip().splitlines()
    return [
        Problem("send-email", mails[0].parent.name, " / ".join(said[-3:]) or f"exit code {done.returncode}")
    ]


def _can_send() -> bool:
    if shutil.which("git-send-email"):
        return True
    where = run.output(["git", "--exec-path"], "cannot ask git where it is", "install git").strip()
    return (Path(where) / "git-send-email").is_file()


def recipients(mails: list[Path], pristine: Path) -> list[str]:
    """Who the source's MAINTAINERS names for these mails, as get_maintainer.pl prints it; no history is asked."""
    script = pristine / "scripts" / "get_maintainer.pl"
    patches = [str(mail) for mail in mails if b"\ndiff --git " in mail.read_bytes()]
    if not script.is_file() or not patches:
        return []
    with progress.step(f"asking MAINTAINERS about {len(patches)} mails"):
        text = run.output(
            ["perl", script, "--no-git", "--no-git-fallback", "--no-rolestats", "--roles", *patches],
            "cannot ask MAINTAINERS",
            "run scripts/get_maintainer.pl of the source on the mails and see what it says",
            cwd=pristine,
        )
    return [line for line in text.splitlines() if "@" in line]
