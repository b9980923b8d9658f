# SPDX-License-Identifier: GPL-2.0
"""`kz evidence` and `kz publish` as on a fresh machine, in guests: KERNEL QEMU FOLDER SIZE_MB.

Python has the packages that `kz` installs for the verb, and no others. The evidence is one small
bench, emulated, with the kernel on both sides: figures of both have counters.
"""

import functools
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

VERB = "evidence"
REPO = Path(__file__).resolve().parents[2]


def installed() -> set[str]:
    """The names of the packages that `kz` installs for the verb."""
    spec = spec_from_loader("kz", SourceFileLoader("kz", str(REPO / "kz")))
    assert spec and spec.loader
    kz = module_from_spec(spec)
    spec.loader.exec_module(kz)
    first, second = kz.packages()
    text = first + (second if kz.wanted_marker([VERB]) == kz.READY_ALL else "")
    return set(re.findall(r"(?m)^([\w.-]+)==", text))


class Fresh(MetaPathFinder):
    """Finds no module of a package that is not installed for the verb."""

    def __init__(self) -> None:
        self.packages = metadata.packages_distributions()
        self.installed = installed()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        of = self.packages.get(name.partition(".")[0])
        if of and self.installed.isdisjoint(one.lower().replace("_", "-") for one in of):
            raise ModuleNotFoundError(f"kz installs no {name} for {VERB}")
        return None


def main(kernel: Path, qemu: Path, folder: Path, size_mb: int) -> None:
    """Measure, pack, and publish into a folder."""
    from lab.bench import commands, native
    from lab.bench.plan import BenchOptions, Images
    from lab.report import archive, publish

    images = Images(qemu, {"base": kernel, "ours": kernel})
    small: dict[str, Any] = {
        "BenchOptions": functools.partial(BenchOptions, size_mb=size_mb, memory="768M"),
        "NOT_EMULATED": ("tcg",),
        "build": lambda plan: images,
        "output_folder": lambda given, name: folder / "run",
    }
    file = str(folder / "evidence.tar.gz")
    with (
        mock.patch.multiple(commands, **small),
        mock.patch.object(archive, "BENCHES", ("order0",)),
        mock.patch.object(native, "need_quiet"),
        mock.patch.object(publish, "FOLDER", folder / "results"),
    ):
        asked = [VERB, "--accel", "tcg", "--pairs", "1", "--output", file]
        commands.app(asked, standalone_mode=False)
        commands.app(["publish", file], standalone_mode=False)


if __name__ == "__main__":
    sys.meta_path.insert(0, Fresh())
    given_kernel, given_qemu, given_folder = map(Path, sys.argv[1:4])
    main(given_kernel, given_qemu, given_folder, int(sys.argv[4]))
