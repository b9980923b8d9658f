# SPDX-License-Identifier: GPL-2.0
"""The verbs of ``kz``. ``kz`` itself reads them too, with Python's standard library alone."""

from typing import NamedTuple

HELP = "Fetch, build, boot, test and measure the Knownzero kernel and QEMU series."
VERSION = "Print the versions and exit; verbs have no --version."
VERBOSE = "Print each command that is run, on stderr."
EPILOG = (
    "Exit codes: 0 fine, 1 a test failed, 2 bad usage, 3 broken machine. $KNOWNZERO_CACHE moves "
    "the cache; $KNOWNZERO_LINUX_SOURCE and $KNOWNZERO_QEMU_SOURCE name other sources."
)


class Verb(NamedTuple):
    """A verb. ``measures``: it needs the second group of packages in requirements.lock."""

    package: str  # its module commands defines the verb
    line: str  # of its help, the first
    measures: bool = False


VERBS = {
    "demo": Verb("bench", "Do the main job end to end.", True),
    "doctor": Verb(
        "boot",
        "Report tools, sources, space, whether KVM runs a kernel, and which bits QEMU offers.",
    ),
    "boot": Verb(
        "boot",
        "Run a command in a fresh guest; its stdout, stderr and exit code are passed through.",
    ),
    "shell": Verb("boot", "Open a shell in a fresh guest; leave it with exit or Ctrl-D."),
    "conform": Verb(
        "boot",
        "Check the balloon of any VMM: whether its answers are true, and what the host gets back.",
    ),
    "build": Verb("build", "Build a kernel, QEMU or the daemon; its path is the last line."),
    "package": Verb(
        "build", "Make Debian packages (the kernel: image, headers); the path of each is a line."
    ),
    "tree": Verb(
        "series",
        "Make or update a git tree with the series as commits; its path is the last line.",
        True,
    ),
    "series": Verb("series", "Save, check and export the parts of linux or qemu.", True),
    "bench": Verb(
        "bench",
        "Measure base and ours side by side; writes out/NAME/TIME/result.json and report.html.",
        True,
    ),
    "report": Verb("report", "Write report.html for one run, or for several.", True),
    "compare": Verb("report", "Compare two runs metric by metric; refuses unlike ones.", True),
    "publish": Verb(
        "bench",
        "Copy a run's results, reduced, and main charts to docs/results/; rewrite the page there.",
        True,
    ),
    "evidence": Verb(
        "bench",
        "Measure your own machine, and write the results into one archive to send.",
        True,
    ),
    "test": Verb(
        "testing", "Build what the tests need, and run all except the nightly ones.", True
    ),
}


def text() -> str:
    """The help of ``kz``."""
    width = max(map(len, VERBS))
    return "\n".join(
        [
            "Usage: kz [--verbose] VERB ...",
            "",
            HELP,
            "",
            *(f"  {name:{width}}  {verb.line}" for name, verb in VERBS.items()),
            "",
            f"  {'help VERB':{width}}  Print the arguments and options of a verb.",
            f"  {'--version':{width}}  {VERSION}",
            f"  {'--verbose':{width}}  {VERBOSE}",
            "",
            "kz --install-completion completes words in bash, zsh and fish.",
            EPILOG,
        ]
    )
