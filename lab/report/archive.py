# SPDX-License-Identifier: GPL-2.0
"""An archive of results for somebody else: what `kz evidence` writes and `kz publish` reads."""

import contextlib
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.core.errors import UsageError
from lab.report.results import FILE_NAME

# The benches that say most in the least time.
BENCHES = ("thp", "order0", "hugetlb", "init-on-alloc")
LIMIT = 16 << 20  # bytes of a file in an archive


def pack(folder: Path, names: Sequence[str], archive: Path) -> None:
    """Write the results NAME/result.json of a folder into ``archive``, and nothing else.

    A result names the machine's CPU and kernel; owners and times of the files are left out.
    """

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        for name in names:
            file = folder / name / FILE_NAME
            tar.add(file, arcname=f"{name}/{FILE_NAME}", filter=anonymous)


@contextlib.contextmanager
def opened(run: Path) -> Iterator[Path]:
    """The folder of a run, or that of an archive, unpacked until the end of the block.

    UsageError for an archive that has something else in it.
    """
    if not run.is_file() or not run.name.endswith(".tar.gz"):
        yield run
        return
    wanted = {f"{name}/{FILE_NAME}" for name in BENCHES}
    what, fix = f"Cannot read the archive {run}", "name one that `kz evidence` has written"
    with tempfile.TemporaryDirectory(prefix="kz-evidence-") as name:
        try:
            with tarfile.open(run, "r:gz") as tar:
                for member in tar:
                    if not member.isfile() or member.name not in wanted:
                        raise UsageError(what, f"{member.name} is no result", fix)
                    if member.size > LIMIT:
                        raise UsageError(what, f"{member.name} has {member.size:,} bytes", fix)
                    tar.extract(member, name, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise UsageError(what, str(error), fix) from None
        yield Path(name)
