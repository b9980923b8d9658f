# SPDX-License-Identifier: GPL-2.0
"""Errors a user sees: what failed, why, and what to do next."""

import errno

OK = 0
FAILED = 1
USAGE = 2
MACHINE = 3
INTERRUPTED = 130


class LabError(Exception):
    """An error in three parts; ``code`` is the exit code (2 bad usage, 3 broken machine)."""

    code = MACHINE

    def __init__(self, what: str, why: str, fix: str, code: int | None = None) -> None:
        super().__init__(what, why, fix, code)
        self.what, self.why, self.fix = what, why, fix
        self.code = self.code if code is None else code

    def __str__(self) -> str:
        why = self.why.strip().replace("\n", "\n       ")
        return f"{self.what}\n  why: {why}\n  fix: {self.fix}"


class TestFailure(LabError):
    """The product under test misbehaved; exit code 1."""

    __test__ = False  # pytest takes the name for a test class
    code = FAILED


class UsageError(LabError):
    """The command line names something that does not exist; exit code 2."""

    code = USAGE


def from_oserror(error: OSError, doing: str) -> LabError:
    """Turn an OSError into a three-part error; a full disk gets its own advice."""
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return full_disk(doing, f"{error.strerror}{where}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = "correct the permissions, or set KNOWNZERO_CACHE to a folder you may write"
        return LabError(doing, f"{error.strerror}{where}", fix)
    return LabError(
        doing, f"{error.strerror or error}{where}", "run `kz doctor`: it checks the machine"
    )


def full_disk(doing: str, why: str) -> LabError:
    fix = (
        "free some space (the cache needs about 12 GB), or set KNOWNZERO_CACHE to a folder on a "
        "larger disk"
    )
    return LabError(doing, why, fix)
