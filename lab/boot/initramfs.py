# SPDX-License-Identifier: GPL-2.0
"""Initial RAM file systems, written as newc archives without being root."""

import hashlib
import stat
import subprocess
from pathlib import Path

from lab.build import programs as guest
from lab.core import lock, paths
from lab.core.errors import UsageError
from lab.machine import arches

# Empty ones.
FOLDERS = ("sbin", "usr/bin", "usr/sbin", "dev", "proc", "sys", "tmp", "run", "mnt", "root", "kz")
RECIPE = "2"


Added = tuple[Path, str]  # a file or folder, and its place in the guest


class Archive:
    """A newc archive in the making."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._inode = 0
        self._folders: set[str] = set()

    def _entry(
        self, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)
    ) -> None:
        self._inode += 1
        encoded = name.encode() + b"\0"
        fields = (self._inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(encoded), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        self._parts.append(header + b"\0" * (-len(header) % 4) + data + b"\0" * (-len(data) % 4))

    def folder(self, name: str) -> None:
        """Add a folder and its parents, once."""
        name = name.strip("/")
        if not name or name in self._folders:
            return
        self.folder(str(Path(name).parent) if "/" in name else "")
        self._folders.add(name)
        self._entry(name, stat.S_IFDIR | 0o755)

    def file(self, name: str, data: bytes, mode: int = 0o644) -> None:
        name = name.strip("/")
        if "/" in name:
            self.folder(name.rpartition("/")[0])
        self._entry(name, stat.S_IFREG | mode, data)

    def link(self, name: str, target: str) -> None:
        self._entry(name.strip("/"), stat.S_IFLNK | 0o777, target.encode())

    def device(self, name: str, major: int, minor: int) -> None:
        self._entry(name.strip("/"), stat.S_IFCHR | 0o600, b"", (major, minor))

    def finish(self) -> bytes:
        self._entry("TRAILER!!!", 0)
        data = b"".join(self._parts)
        return data + b"\0" * (-len(data) % 512)


def base_archive(arch: str = "x86_64") -> Path:
    """busybox, its applets, and the guest programs; cached by content."""
    program, names = guest.build_together(arch)
    box = guest.busybox(arches.ARCHES[arch].debian)
    digest = hashlib.sha256(RECIPE.encode() + box.read_bytes() + program.read_bytes())
    target = paths.sub("initramfs") / f"{digest.hexdigest()[:16]}.cpio"
    if target.is_file():
        return target
    archive = Archive()
    for name in FOLDERS:
        archive.folder(name)
    archive.device("dev/console", 5, 1)
    archive.device("dev/null", 1, 3)
    archive.file("bin/busybox", box.read_bytes(), 0o755)
    # A busybox of another architecture does not run here; the machine's is of the same Debian.
    asked = guest.busybox()
    applets = subprocess.run(
        [asked, "--list"], capture_output=True, text=True, check=True
    ).stdout.split()
    for applet in applets:
        if applet not in ("busybox", "init") and applet not in names:
            archive.link(f"bin/{applet}", "busybox")
    archive.file("bin/programs", program.read_bytes(), 0o755)
    for name in names:
        if name == "init":
            archive.link("init", "bin/programs")
        else:
            archive.link(f"bin/{name}", "programs")
    archive.file(
        "etc/passwd", b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"
    )
    archive.file("etc/group", b"root:x:0:\nnogroup:x:65534:\n")
    lock.write_atomically(target, archive.finish())
    return target


def guest_path(file: Path, place: str) -> str:
    """The guest's path for ``--add FILE[:PLACE]``: ``PLACE``, or the root folder."""
    if not place:
        return f"/{file.name}"
    return f"{place}{file.name}" if place.endswith("/") else place


def write(
    target: Path,
    command: list[str],
    mode: str,
    add: list[Added],
    modules: list[Path],
    arch: str = "x86_64",
    base: Path | None = None,
) -> None:
    """Write the archive of one boot: the base, then the files of this boot.

    ``base``: the file of ``base_archive``, if it is known.
    """
    archive = Archive()
    archive.file(
        "kz/argv", b"".join(word.encode(errors="surrogateescape") + b"\0" for word in command)
    )
    archive.file("kz/mode", mode.encode() + b"\n")
    for module in modules:
        archive.file(f"kz/{module.name}", module.read_bytes())
    archive.file("kz/modules", "".join(f"/kz/{module.name}\n" for module in modules).encode())
    for file, place in add:
        root = guest_path(file, place)
        inside = sorted(p for p in file.rglob("*") if p.is_file()) if file.is_dir() else [file]
        try:
            for inner in inside:
                name = root if inner is file else f"{root}/{inner.relative_to(file)}"
                archive.file(name, inner.read_bytes(), inner.stat().st_mode & 0o777)
        except OSError as error:
            why = error.strerror or str(error)
            raise UsageError(f"Bad --add: {file}", why, "name a file that can be read") from None
    with target.open("wb") as out:
        out.write((base or base_archive(arch)).read_bytes())
        out.write(archive.finish())
