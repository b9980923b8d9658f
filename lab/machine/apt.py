# SPDX-License-Identifier: GPL-2.0
"""A private apt root: the machine's mirror and keyring, lists and cache folders of our own.

apt checks the signatures, the machine's own sources stay as they are, and no host is
named here: the mirror is whatever the machine's apt already uses for Debian.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lab.core import lock, paths, progress, run
from lab.core.errors import LabError

ETC = Path("/etc/apt")
KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)
ALIASES = {"stable", "oldstable", "oldoldstable", "testing", "unstable", "sid"}


@dataclass(frozen=True)
class Entry:
    """One line or stanza of apt's sources: where, which suites, which components."""

    types: tuple[str, ...]
    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""


def parse_one_line(text: str) -> list[Entry]:
    """Read sources in the one-line form (``deb [options] uri suite component…``)."""
    found = []
    for line in text.splitlines():
        words = line.split("#", 1)[0].strip()
        match = re.match(r"(deb|deb-src)\s+(?:\[([^]]*)\]\s*)?(\S+)\s+(\S+)\s*(.*)$", words)
        if not match:
            continue
        kind, options, uri, suite, components = match.groups()
        signed = re.search(r"signed-by=(\S+)", options or "", re.IGNORECASE)
        found.append(Entry((kind,), (uri,), (suite,), tuple(components.split()), signed[1] if signed else ""))
    return found


def parse_deb822(text: str) -> list[Entry]:
    """Read sources in the deb822 form (``*.sources``); disabled stanzas are left out."""
    found = []
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):
                if name:
                    fields[name] += "\n" + line.strip()
            elif ":" in line:
                name, value = line.split(":", 1)
                name = name.strip().lower()
                fields[name] = value.strip()
        if not fields.get("uris") or fields.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        found.append(
            Entry(
                tuple(fields.get("types", "deb").split()),
                tuple(fields["uris"].split()),
                tuple(fields.get("suites", "").split()),
                tuple(fields.get("components", "").split()),
                fields.get("signed-by", "").strip(),
            )
        )
    return found


def machine_entries(etc: Path = ETC) -> list[Entry]:
    """All sources the machine's apt uses."""
    found: list[Entry] = []
    files = [etc / "sources.list"]
    parts = etc / "sources.list.d"
    if parts.is_dir():
        files += sorted(parts.iterdir())
    for file in files:
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.suffix == ".sources":
            found += parse_deb822(text)
        elif file.suffix == ".list":
            found += parse_one_line(text)
    return found


def codename(os_release: Path = Path("/etc/os-release")) -> str:
    """The machine's Debian release name, such as ``bookworm``; empty when there is none."""
    try:
        text = os_release.read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r'^VERSION_CODENAME="?([a-z]+)"?$', text, re.MULTILINE)
    return match[1] if match else ""


def debian_entry(entries: Iterable[Entry], release: str) -> Entry:
    """The entry that is the Debian archive itself (not security, not a third party)."""
    wanted = ALIASES | ({release} if release else set())
    for entry in entries:
        if "deb" in entry.types and "main" in entry.components and wanted & set(entry.suites):
            uris = tuple(u for u in entry.uris if not u.startswith("cdrom:"))
            if uris:
                return Entry(entry.types, uris, entry.suites, entry.components, entry.signed_by)
    raise LabError(
        "cannot find a Debian mirror",
        f"no source in {ETC} serves the Debian release {release or '(unknown)'} with component main",
        "add one to apt's sources, or set KNOWNZERO_LINUX_SOURCE and KNOWNZERO_QEMU_SOURCE to source trees or tarballs",
    )


def keyring(entry: Entry) -> str:
    """The keyring that signs the archive: the machine's Debian keyring, else the entry's own."""
    for path in KEYRINGS:
        if path.is_file():
            return str(path)
    return entry.signed_by


class PrivateApt:
    """apt with its own lists and cache for one suite; ``kind`` is ``deb`` or ``deb-src``.

    ``arch``: packages of another architecture than the machine's, by Debian's name of it.
    """

    def __init__(self, suite: str, kind: str = "deb", etc: Path = ETC, arch: str = "") -> None:
        """Make the private root; raises LabError when the machine has no Debian mirror."""
        self.suite = suite
        self.kind = kind
        self.arch = arch
        self.entry = debian_entry(machine_entries(etc), codename())
        self.root = paths.sub("apt", "-".join([suite, kind, *([arch] if arch else [])]))
        self._updated = False
        self._configure()

    def _configure(self) -> None:
        for part in ("lists/partial", "cache/archives/partial", "state"):
            (self.root / part).mkdir(parents=True, exist_ok=True)
        stanza = [
            f"Types: {self.kind}",
            "URIs: " + " ".join(self.entry.uris),
            f"Suites: {self.suite}",
            "Components: main",
        ]
        ring = keyring(self.entry)
        if ring:
            stanza.append("Signed-By: " + ring.replace("\n", "\n "))
        lock.write_if_changed(self.root / "mirror.sources", ("\n".join(stanza) + "\n").encode())
        # Read after the machine's own configuration, whose proxies and certificates we keep.
        status = Path("/var/lib/dpkg/status")
        options = {
            "Dir::Etc::SourceList": self.root / "mirror.sources",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::Etc::Preferences": "/dev/null",
            "Dir::Etc::PreferencesParts": "/dev/null",
            "Dir::State": self.root / "state",
            "Dir::State::Lists": self.root / "lists",
            "Dir::State::status": status if status.is_file() else "/dev/null",
            "Dir::Cache": self.root / "cache",
            "Dir::Cache::Archives": self.root / "cache" / "archives",
            "APT::Sandbox::User": "",
            "APT::Get::List-Cleanup": "true",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
        }
        if self.arch:
            options["APT::Architecture"] = self.arch
            # Nothing of that architecture is installed.
            options["Dir::State::status"] = "/dev/null"
        lines = [f'{name} "{value}";' for name, value in options.items()]
        if self.arch:
            lines += ["#clear APT::Architectures;", f'APT::Architectures {{ "{self.arch}"; }};']
        lines += [
            f"#clear {name};"
            for name in (
                "APT::Update::Post-Invoke",
                "APT::Update::Post-Invoke-Success",
                "Acquire::IndexTargets::deb::DEP-11",
                "Acquire::IndexTargets::deb::Contents-deb",
            )
        ]
        lock.write_if_changed(self.root / "apt.conf", ("\n".join(lines) + "\n").encode())

    def _argv(self, tool: str, *arguments: str) -> list[str]:
        return [tool, "-c", str(self.root / "apt.conf"), *arguments]

    def update(self) -> None:
        """Fetch the suite's lists; apt checks their signature."""
        if self._updated:
            return
        run.logged(
            self._argv("apt-get", "update", "-q", "-o", "APT::Update::Error-Mode=any"),
            paths.log_file(f"apt-update-{self.suite}"),
            f"cannot fetch the package lists of Debian {self.suite}",
            "check the network and the mirror in the machine's apt sources, then run it again; or set KNOWNZERO_LINUX_SOURCE / KNOWNZERO_QEMU_SOURCE to a local tree or tarball",
        )
        self._updated = True

    def has_lists(self) -> bool:
        """Whether the suite's lists were fetched once, however old they are."""
        return any(file.is_file() for file in (self.root / "lists").glob("*_Packages*"))

    def closure(self, packages: list[str]) -> dict[str, str]:
        """What a system of nothing but the essential packages and these consists of: package -> version."""
        text = run.output(
            self._argv(
                "apt-get", "install", "--simulate", "-q", "-o", "Dir::State::status=/dev/null",
                "--no-install-recommends", "?essential", *packages,
            ),
            f"Debian {self.suite} cannot install {', '.join(packages)}",
            "check these names; they come from the packages that are to be installed",
        )  # fmt: skip
        return dict(re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+) ", text, re.MULTILINE))

    def show(self, package: str) -> list[dict[str, str]]:
        """The records of a package (newest first), field names in lower case."""
        tool = "showsrc" if self.kind == "deb-src" else "show"
        argv = self._argv("apt-cache", tool, package)
        text = run.output(
            argv,
            f"Debian {self.suite} has no package {package}",
            "check the suite in base.toml against the mirror",
        )
        records = []
        for stanza in text.strip().split("\n\n"):
            fields: dict[str, str] = {}
            name = ""
            for line in stanza.splitlines():
                if line[:1] == " " and name:
                    fields[name] += "\n" + line.strip()
                elif ":" in line:
                    name, value = line.split(":", 1)
                    name = name.lower()
                    fields[name] = value.strip()
            if fields:
                records.append(fields)
        return records

    def download(self, package: str, version: str, folder: Path) -> list[Path]:
        """Download a binary package, or the tarball of a source package, into ``folder``."""
        wanted = f"{package}={version}"
        if self.kind == "deb-src":
            argv = self._argv("apt-get", "source", "-q", "--download-only", "--tar-only", wanted)
        else:
            argv = self._argv("apt-get", "download", "-q", wanted)
        before = set(folder.iterdir())
        run.logged(
            argv,
            paths.log_file(f"apt-download-{package}"),
            f"cannot download {package} {version} from Debian {self.suite}",
            "check the network, then run it again; a partial download is not kept",
            cwd=folder,
        )
        return sorted(set(folder.iterdir()) - before)

    def download_with_dependencies(self, package: str, folder: Path) -> list[Path]:
        """Download a package and what it needs beyond what the machine has installed."""
        argv = self._argv(
            "apt-get", "install", "-q", "-y", "--download-only", "--no-install-recommends", "--reinstall",
            "-o", "Debug::NoLocking=1", "-o", f"Dir::Cache::Archives={folder}", package,
        )  # fmt: skip
        (folder / "partial").mkdir(exist_ok=True)
        run.logged(
            argv,
            paths.log_file(f"apt-download-{package}"),
            f"cannot download {package} and its dependencies",
            "check the network, then run it again",
        )
        return sorted(folder.glob("*.deb"))


def may_install() -> list[str] | None:
    """The command prefix with which apt-get may install packages here, or None."""
    if not shutil.which("apt-get"):
        return None
    if os.geteuid() == 0:
        return []
    if (
        shutil.which("sudo")
        and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
    ):
        return ["sudo", "-n"]
    return None


def update() -> None:
    """Fetch the lists of the machine's apt when this user may; nothing happens otherwise, or when it fails."""
    prefix = may_install()
    if prefix is None:
        return
    log = paths.log_file("apt-update")
    with progress.step("fetching the lists of packages", log), contextlib.suppress(LabError):
        run.logged([*prefix, "apt-get", "update"], log, "cannot fetch the lists of packages", "see the log")


def install(packages: list[str], what: str) -> None:
    """Install Debian packages when this user may; otherwise name the one command to run.

    Nothing is removed for them: that is left to whoever runs the command.
    """
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    prefix = may_install()
    if prefix is None:
        raise LabError(what, "the machine lacks " + ", ".join(packages), "run: sudo " + " ".join(command))
    log = paths.log_file("apt-install")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    fix = "see the log, then run: sudo " + " ".join(command)
    with progress.step("installing " + " ".join(packages), log):
        careful = [*prefix, *command, "--no-remove"]
        try:
            run.logged(careful, log, what, fix, env=environment)
        except LabError:
            # Lists that are old or absent: refresh them and try once more.
            run.logged([*prefix, "apt-get", "update"], log, what, fix, env=environment)
            run.logged(careful, log, what, fix, env=environment)
