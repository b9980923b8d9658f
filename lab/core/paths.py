# SPDX-License-Identifier: GPL-2.0
"""The places: the repository, the cache outside it, and the results inside it."""

import contextlib
import itertools
import os
import re
import shutil
import time
from pathlib import Path

KEEP_RUNS = 200
_numbers = itertools.count()
REPO = Path(__file__).resolve().parents[2]


def cache() -> Path:
    """The cache folder (made when missing): $KNOWNZERO_CACHE or ~/.cache/knownzero."""
    named = os.environ.get("KNOWNZERO_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(named) if named else base / "knownzero"
    path = path.absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


def sub(*parts: str) -> Path:
    """A folder inside the cache, made when missing."""
    path = cache().joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


def out() -> Path:
    """Results of runs: out/ in the repository (ignored by git), made when missing."""
    path = REPO / "out"
    path.mkdir(exist_ok=True)
    return path


def log_file(name: str) -> Path:
    """A fresh log file in the cache; its name carries the time and the process."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return sub("logs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{safe}.log"


def run_folder(kind: str) -> Path:
    """A new folder under out/KIND for the logs of one run; the oldest ones are removed."""
    root = out() / kind
    root.mkdir(exist_ok=True)
    folder = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    for old in sorted(root.iterdir())[:-KEEP_RUNS]:
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > 3600:
                shutil.rmtree(old)
    return folder
