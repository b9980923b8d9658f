# SPDX-License-Identifier: GPL-2.0
"""Write Debian packages without root: files, a control file, checksums."""

import hashlib
import shutil
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lab.core import lock, paths, run
from lab.core.errors import LabError
from lab.machine import tools

MAINTAINER = "The Knownzero maintainers <maintainers@localhost>"


@dataclass(frozen=True)
class Item:
    """A file of a package.

    Its source, its place (no leading slash), its mode, whether to strip it.
    """

    source: Path
    place: str
    mode: int = 0o644
    strip: bool = False


@dataclass(frozen=True)
class Deb:
    """The content of a package. ``description`` is a line, and ``about`` the text under it."""

    name: str
    version: str
    description: str
    about: str
    items: list[Item]
    section: str = "otherosfs"
    depends: tuple[str, ...] = ()
    recommends: tuple[str, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)  # place -> what it points to
    scripts: Mapping[str, str] = field(default_factory=dict)  # postinst, …

    @property
    def file(self) -> str:
        return f"{self.name}_{self.version}_{architecture()}.deb"

    def control(self, size_kib: int) -> str:
        about = textwrap.indent(textwrap.fill(self.about, 75, break_on_hyphens=False), " ")
        fields = {"Package": self.name, "Version": self.version, "Architecture": architecture()}
        fields |= {
            "Maintainer": MAINTAINER,
            "Installed-Size": str(size_kib),
            "Section": self.section,
        }
        fields |= {"Depends": ", ".join(self.depends), "Recommends": ", ".join(self.recommends)}
        fields |= {"Priority": "optional", "Description": f"{self.description}\n{about}"}
        return "".join(f"{name}: {value}\n" for name, value in fields.items() if value)


def architecture() -> str:
    argv = ["dpkg", "--print-architecture"]
    return run.output(argv, "cannot find the architecture", "run on Debian").strip()


def shared_libraries(binaries: list[Path]) -> tuple[str, ...]:
    """The packages with the libraries of programs, by the machine's own libraries."""
    tools.need("package")
    with tempfile.TemporaryDirectory(prefix=".shlibs-", dir=paths.sub("work")) as folder:
        control = Path(folder) / "debian" / "control"
        control.parent.mkdir()
        control.write_text("Source: x\n\nPackage: x\nArchitecture: any\n", encoding="utf-8")
        argv = ["dpkg-shlibdeps", "-O", *(f"-e{binary}" for binary in binaries)]
        fix = "install dpkg-dev, or the missing library it names"
        text = run.output(argv, "cannot find the libraries of the programs", fix, cwd=Path(folder))
    found = text.partition("shlibs:Depends=")[2].splitlines()
    return tuple(part.strip() for part in found[0].split(",")) if found else ()


def write(deb: Deb, folder: Path) -> Path:
    """Make the package in a folder, replacing one of that name.

    LabError when something is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = paths.log_file(f"deb-{deb.name}")
    what = f"cannot make the package {deb.name}"
    with tempfile.TemporaryDirectory(prefix=".deb-", dir=paths.sub("work")) as work:
        root = Path(work) / "root"
        root.mkdir(mode=0o755)
        sums, size = [], 0
        for item in deb.items:
            target = root / item.place
            if not item.source.is_file():
                raise LabError(what, f"there is no {item.source}", "build it again")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(item.source, target)
            if item.strip:
                run.logged(["strip", target], log, what, "read the log")
            target.chmod(item.mode)
            content = target.read_bytes()
            sums.append(
                f"{hashlib.md5(content, usedforsecurity=False).hexdigest()}  {item.place}\n"
            )
            size += len(content)
        for place, points_to in deb.links.items():
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            (root / place).symlink_to(points_to)
        about = root / "DEBIAN"
        about.mkdir(mode=0o755)
        (about / "control").write_text(deb.control(-(-size // 1024)), encoding="utf-8")
        (about / "md5sums").write_text("".join(sums), encoding="utf-8")
        for name, text in deb.scripts.items():
            (about / name).write_text(text, encoding="utf-8")
            (about / name).chmod(0o755)
        for directory in [root, *(p for p in root.rglob("*") if p.is_dir() and not p.is_symlink())]:
            directory.chmod(0o755)
        with lock.new_file(folder / deb.file) as part:
            argv: run.Argv = ["dpkg-deb", "--root-owner-group", "-Zzstd", "--build", root, part]
            run.logged(argv, log, what, "read the log")
            part.chmod(0o644)  # for apt's own user
    return folder / deb.file
