# SPDX-License-Identifier: GPL-2.0
"""Images in the cache, named by everything that goes into them, and the environment they are built
in.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lab.core import lock, paths, progress, run
from lab.machine import fetch, tools
from lab.patches import apply, parts

KEEP_IMAGES = 40


def jobs() -> int:
    """The number of compilers to run at once: one per CPU of this process."""
    return max(1, len(os.sched_getaffinity(0)))


@functools.cache
def compiler(prefix: str = "") -> str:
    """The versions of compiler and linker; ``prefix``: of a cross compiler."""
    lines = []
    for tool in (f"{prefix}gcc" if prefix else "cc", f"{prefix}ld"):
        fix = "run `kz doctor`: it names the packages to install"
        lines.append(run.output([tool, "--version"], "cannot compile", fix).splitlines()[0])
    return "; ".join(lines)


def cached_environment() -> dict[str, str]:
    """The environment with ccache, which serves all folders.

    It takes the list of headers from the compiler: a file that it does not know is not
    preprocessed twice, which would take half as long again as compiling it.
    """
    settings = {
        "PATH": f"{tools.CCACHE}:{os.environ.get('PATH', os.defpath)}",
        "CCACHE_DIR": str(paths.sub("ccache")),
        "CCACHE_MAXSIZE": "5G",
        "CCACHE_DEPEND": "1",
    }
    return dict(os.environ) | settings


def digest(parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@contextlib.contextmanager
def tree_of(
    what: str, variant: str, source: fetch.Source, chosen: tuple[str, ...] = ()
) -> Iterator[Path]:
    """The tree that a variant (with the ``chosen`` parts of the series) is built from.

    Hold it while building.
    """
    base = variant == "base" and not chosen
    if base and what != "linux":
        yield fetch.pristine(source)
        return
    # The floor kernel differs from base in few files.
    series = parts.get(what, ("floor",) if base else chosen)
    with apply.working_copy(series, source, bare=base) as tree:
        yield tree


@dataclass(frozen=True)
class Recipe:
    """The recipe of an image. ``make`` fills an object folder, ``publish`` copies files from it."""

    what: str
    variant: str
    name: str  # of folders, logs and locks
    file: str  # of the image, relative to its folder
    key: Callable[[fetch.Source], str]
    make: Callable[[Path, Path, Path], None]  # tree, object folder, log
    publish: Callable[[Path, Path], dict[str, object]]  # object folder, new folder; more metadata
    chosen: tuple[str, ...] = ()  # parts of the series; all by default

    def place(self, source: fetch.Source) -> Path:
        return paths.sub("images") / f"{self.what}-{self.name}-{self.key(source)[:16]}"

    def find(self) -> Path | None:
        """The image if the cache has it; never builds."""
        image = self.place(fetch.identify(self.what)) / self.file
        return image if image.is_file() else None

    def object_dir(self, source: fetch.Source) -> Path:
        return paths.sub("obj") / f"{self.what}-{source.key[:8]}-{self.name}"

    def build(self) -> Path:
        """The image, built when the cache lacks it; metadata.json stands beside it."""
        if found := self.find():
            with contextlib.suppress(OSError):
                os.utime(self.place(fetch.identify(self.what)))
            return found
        # A download needs none of the tools.
        with ThreadPoolExecutor() as beside:
            downloaded = beside.submit(fetch.obtain, self.what)
            tools.need(self.what)
            source = downloaded.result()
        with lock.locked(f"build-{self.what}-{self.name}"):
            place, obj = self.place(source), self.object_dir(source)
            if (place / self.file).is_file():
                return place / self.file
            log, began = paths.log_file(f"{self.what}-{self.name}"), time.monotonic()
            with tree_of(self.what, self.variant, source, self.chosen) as tree:
                named = () if parts.get(self.what, self.chosen).whole else self.chosen
                what = " ".join(
                    ["building", self.what, source.version, *self.name.split("-"), *named]
                )
                with progress.step(what, log):
                    self.make(tree, obj, log)
                with lock.new_directory(place) as work:
                    patched = self.variant != "base" or self.chosen
                    series = parts.get(self.what, self.chosen).key() if patched else ""
                    about = {
                        **{"what": self.what, "variant": self.variant, "version": source.version},
                        **{"source": source.key, "series": series, "key": self.key(source)},
                        "seconds": round(time.monotonic() - began, 1),
                        **self.publish(obj, work),
                    }
                    (work / "metadata.json").write_text(
                        json.dumps(about, indent=1) + "\n", encoding="utf-8"
                    )
            prune_images()
        return place / self.file


def metadata(image: Path) -> dict[str, object]:
    """The metadata of an image in the cache; empty for others."""
    for folder in image.parents[:4]:
        file = folder / "metadata.json"
        if file.is_file():
            data: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
            return data
    return {}


def prune_images() -> None:
    """Remove the images that were unused longest, left-over work, and old logs."""
    folder = paths.sub("images")
    with contextlib.suppress(FileNotFoundError):  # another kz removes the same
        images = [path for path in folder.iterdir() if not path.name.startswith(".")]
        old = sorted(images, key=lambda path: path.stat().st_mtime, reverse=True)[KEEP_IMAGES:]
        for unused in (*old, *folder.glob(".*.part")):
            if time.time() - unused.stat().st_mtime > 86400:
                shutil.rmtree(unused, ignore_errors=True)
        for log in paths.sub("logs").iterdir():
            if time.time() - log.stat().st_mtime > 14 * 86400:
                log.unlink(missing_ok=True)
