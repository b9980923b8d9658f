# SPDX-License-Identifier: GPL-2.0
"""A private apt root: the machine's mirror and keyring, with its own lists and cache.

Apt checks the signatures.
"""

import contextlib
import email
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from subprocess import DEVNULL

from lab.core import lock, paths, progress, run
from lab.core.errors import LabError

ETC = Path("/etc/apt")
KEYRINGS = [Path(f"/usr/share/keyrings/debian-archive-keyring.{kind}") for kind in ("gpg", "pgp")]
OTHERWISE = "set KNOWNZERO_LINUX_SOURCE and KNOWNZERO_QEMU_SOURCE to source trees or tarballs"
ALIASES = {"stable", "oldstable", "oldoldstable", "testing", "unstable", "sid"}


def codename() -> str:
    """The machine's Debian release name, such as ``bookworm``; empty when there is none."""
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    return ""


def mirrors(etc: Path = ETC) -> list[str]:
    """The addresses of the Debian archive in the machine's apt sources, as apt reads them."""
    release = codename()
    # With lists, apt-get would leave out the indexes that they have.
    options = [f"Dir::Etc={etc}", f"Dir::State::Lists={paths.sub('apt', 'no-lists')}"]
    argv = [
        "apt-get",
        "update",
        "--print-uris",
        *(word for option in options for word in ("-o", option)),
    ]
    text = run.output(argv, f"cannot read the sources in {etc}", "run: apt-get update --print-uris")
    suites = "|".join(sorted(ALIASES | ({release} if release else set())))
    found = re.findall(rf"^'(.+)/dists/(?:{suites})/main/binary-\w+/Packages", text, re.MULTILINE)
    found = [uri for uri in dict.fromkeys(found) if not uri.startswith("cdrom:")]
    if not found:
        why = (
            f"no source in {etc} serves the Debian release {release or '(unknown)'} with component "
            "main"
        )
        raise LabError(
            "cannot find a Debian mirror", why, f"add one to apt's sources, or {OTHERWISE}"
        )
    return found


class PrivateApt:
    """apt with its own lists and cache for one suite; ``kind`` is ``deb`` or ``deb-src``.

    ``suite``: or several, of which the last is preferred: "trixie trixie-backports". ``arch``:
    packages of another architecture than the machine's, by Debian's name of it.
    """

    def __init__(self, suite: str, kind: str = "deb", etc: Path = ETC, arch: str = "") -> None:
        """Make the private root; raises LabError when the machine has no Debian mirror."""
        self.suite = suite
        self.kind = kind
        self.arch = arch
        self.mirrors = mirrors(etc)
        self.root = paths.sub("apt", "-".join([*suite.split(), kind, *([arch] if arch else [])]))
        self._updated = False
        self._configure()

    def _configure(self) -> None:
        for part in ("lists/partial", "cache/archives/partial", "state"):
            (self.root / part).mkdir(parents=True, exist_ok=True)
        stanza = ["Components: main", f"Types: {self.kind}", f"URIs: {' '.join(self.mirrors)}"]
        stanza.append(f"Suites: {self.suite}")
        # Without one, apt takes the keys that the machine trusts.
        stanza += [f"Signed-By: {ring}" for ring in KEYRINGS if ring.is_file()][:1]
        lock.write_if_changed(self.root / "mirror.sources", ("\n".join(stanza) + "\n").encode())
        # apt reads this after the machine's configuration, and keeps its proxies and certificates.
        dpkg = Path("/var/lib/dpkg/status")
        options = {
            "Dir::Etc::SourceList": self.root / "mirror.sources",
            **{
                f"Dir::Etc::{key}": "/dev/null"
                for key in ("SourceParts", "Preferences", "PreferencesParts")
            },
            "Dir::State": self.root / "state",
            "Dir::State::Lists": self.root / "lists",
            # No package of another architecture is installed.
            "Dir::State::status": dpkg if dpkg.is_file() and not self.arch else "/dev/null",
            "Dir::Cache": self.root / "cache",
            "Dir::Cache::Archives": self.root / "cache" / "archives",
            "APT::Sandbox::User": "",
            "APT::Get::List-Cleanup": "true",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            **({"APT::Architecture": self.arch} if self.arch else {}),
        }
        lines = [f'{name} "{value}";' for name, value in options.items()]
        if " " in self.suite:
            lines.append(f'APT::Default-Release "{self.suite.split()[-1]}";')
        if self.arch:
            lines += ["#clear APT::Architectures;", f'APT::Architectures {{ "{self.arch}"; }};']
        targets = [f"Acquire::IndexTargets::deb::{name}" for name in ("DEP-11", "Contents-deb")]
        hooks = ["APT::Update::Post-Invoke", "APT::Update::Post-Invoke-Success"]
        lines += [f"#clear {name};" for name in (*hooks, *targets)]
        lock.write_if_changed(self.root / "apt.conf", ("\n".join(lines) + "\n").encode())

    def argv(self, tool: str, *arguments: str) -> list[str]:
        return [tool, "-c", str(self.root / "apt.conf"), *arguments]

    def update(self) -> None:
        """Fetch the suite's lists; apt checks their signature."""
        if self._updated:
            return
        argv = self.argv("apt-get", "update", "-q", "-o", "APT::Update::Error-Mode=any")
        what = f"cannot fetch the package lists of Debian {self.suite}"
        fix = f"check the network and the mirror in the machine's apt sources, or {OTHERWISE}"
        with lock.locked(f"apt-{self.root.name}"):
            run.logged(argv, paths.log_file(f"apt-update-{self.suite}"), what, fix)
        self._updated = True

    def show(self, package: str) -> list[dict[str, str]]:
        """The records of a package (newest first), field names in lower case."""
        argv = self.argv("apt-cache", "showsrc" if self.kind == "deb-src" else "show", package)
        fix = "check the suite in base.toml against the mirror"
        text = run.output(argv, f"Debian {self.suite} has no package {package}", fix)
        records = map(email.message_from_string, text.strip().split("\n\n"))
        return [
            {name.lower(): re.sub(r"\n\s+", "\n", line) for name, line in one.items()}
            for one in records
        ]

    def download(self, package: str, folder: Path, version: str = "") -> list[Path]:
        """Download a binary package, or the tarball of a source package, into ``folder``."""
        wanted = f"{package}={version}" if version else package
        if self.kind == "deb-src":
            argv = self.argv("apt-get", "source", "-q", "--download-only", "--tar-only", wanted)
        else:
            argv = self.argv("apt-get", "download", "-q", wanted)
        before = set(folder.iterdir())
        what = f"cannot download {wanted} from Debian {self.suite}"
        fix = "check the network, then run it again; a partial download is not kept"
        run.logged(argv, paths.log_file(f"apt-download-{package}"), what, fix, cwd=folder)
        return sorted(set(folder.iterdir()) - before)

    def download_with_dependencies(self, package: str, folder: Path) -> list[Path]:
        """Download a package and all its dependencies, also those that the machine has."""
        options = [
            "Debug::NoLocking=1",
            f"Dir::Cache::Archives={folder}",
            "Dir::State::status=/dev/null",
        ]
        words = ["install", "-q", "-y", "--download-only", "--no-install-recommends", "--reinstall"]
        argv = self.argv(
            "apt-get", *words, *(word for option in options for word in ("-o", option)), package
        )
        (folder / "partial").mkdir(exist_ok=True)
        log = paths.log_file(f"apt-download-{package}")
        what = f"cannot download {package} and its dependencies"
        run.logged(argv, log, what, "check the network, then run it again")
        return sorted(folder.glob("*.deb"))


def may_install() -> list[str] | None:
    """The command prefix with which apt-get may install packages here, or None."""
    if not shutil.which("apt-get"):
        return None
    if os.geteuid() == 0:
        return []
    sudo = ["sudo", "-n"]
    works = shutil.which("sudo") and not subprocess.call(
        [*sudo, "true"], stdout=DEVNULL, stderr=DEVNULL
    )
    return sudo if works else None


# Another apt or dpkg may work meanwhile: unattended upgrades, or an administrator.
WAIT = ("-o", "DPkg::Lock::Timeout=600")


def update() -> None:
    """Fetch the lists of the machine's apt when this user may; a failure is no error."""
    if (prefix := may_install()) is None:
        return
    log = paths.log_file("apt-update")
    with progress.step("fetching the lists of packages", log), contextlib.suppress(LabError):
        run.logged(
            [*prefix, "apt-get", *WAIT, "update"],
            log,
            "cannot fetch the lists of packages",
            "see the log",
        )


def install(packages: list[str], what: str) -> None:
    """Install Debian packages when this user may; otherwise name the command.

    Removes no package.
    """
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if (prefix := may_install()) is None:
        raise LabError(
            what, "the machine lacks " + ", ".join(packages), "run: sudo " + " ".join(command)
        )
    log = paths.log_file("apt-install")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    fix = "see the log, then run: sudo " + " ".join(command)
    with lock.locked("apt-install"), progress.step("installing " + " ".join(packages), log):
        careful = [*prefix, *command, "--no-remove", *WAIT]
        try:
            run.logged(careful, log, what, fix, env=environment)
        except LabError:
            # Lists that are old or absent: refresh them and try once more.
            run.logged([*prefix, "apt-get", *WAIT, "update"], log, what, fix, env=environment)
            run.logged(careful, log, what, fix, env=environment)
