# SPDX-License-Identifier: GPL-2.0
"""The verbs of ``kz``."""

from __future__ import annotations

import importlib
import json
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from lab import errors
from lab import nightly as nights

app = typer.Typer(
    name="kz",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Fetch, build, boot, test and measure the Knownzero kernel and QEMU series.",
    epilog="Exit codes: 0 fine, 1 a test failed, 2 bad usage, 3 broken machine. $KNOWNZERO_CACHE moves the cache; "
    "$KNOWNZERO_LINUX_SOURCE and $KNOWNZERO_QEMU_SOURCE name other sources.",
)
build_app = typer.Typer(
    no_args_is_help=True, help="Build a kernel or QEMU; the last line of stdout is its path."
)
app.add_typer(build_app, name="build")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@build_app.command("linux")
def build_linux(
    variant: Annotated[str, typer.Option(help="base, knownzero, off or debug.")] = "knownzero",
    arch: Annotated[
        str, typer.Option(help="x86_64, um, i386, arm64, or riscv (which nothing here boots).")
    ] = "x86_64",
    config: Annotated[
        str,
        typer.Option(help="More configuration, merged last: a name in linux/configs/matrix, or a file."),
    ] = "",
    as_json: Json = False,
) -> None:
    """Build a kernel (nothing is done when the cache has it)."""
    from lab import build

    _print_image(build.build_linux(variant, arch, config), as_json)


@build_app.command("qemu")
def build_qemu(
    variant: Annotated[str, typer.Option(help="base or knownzero.")] = "knownzero",
    as_json: Json = False,
) -> None:
    """Build qemu-system-x86_64 (nothing is done when the cache has it)."""
    from lab import build

    _print_image(build.build_qemu(variant), as_json)


@build_app.command("daemon")
def build_daemon(
    profile: Annotated[str, typer.Option(help="dev (quick) or release (to be measured).")] = "dev",
    as_json: Json = False,
) -> None:
    """Build the vhost-user daemon with cargo; the last line of stdout is its path."""
    from lab import daemon

    if profile not in daemon.PROFILES:
        raise errors.UsageError(
            f"no profile is called {profile!r}",
            "there are: " + ", ".join(daemon.PROFILES),
            "choose one of them",
        )
    binary = daemon.build(profile)
    print(json.dumps({"image": str(binary)}) if as_json else binary)


@app.command()
def doctor(as_json: Json = False) -> None:
    """What is there, what is missing, whether KVM really runs a kernel, which bits QEMU offers."""
    from lab import doctor as doctors

    findings = doctors.examine()
    if as_json:
        print(json.dumps([vars(f) for f in findings]))
    else:
        width = max(len(f.name) for f in findings)
        for f in findings:
            print(
                f"{f.state:8}{f.name:{width}}  {f.text}"
                + (f"\n{'':8}{'':{width}}  fix: {f.fix}" if f.fix else "")
            )
    if any(f.state == "missing" for f in findings):
        raise typer.Exit(errors.MACHINE)


@app.command()
def tree(
    name: Annotated[str, typer.Argument(help="linux or qemu.")],
    path: Annotated[Path | None, typer.Option(help="Where (default: in the cache).")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Take the series even if the tree has work that is not saved.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make or update a git tree with the series as commits; the last line of stdout is its path.

    The unpatched source has the tag base. Work there with git (rebase -i base), then
    write it back with kz series save. A commit's patch number is in its note:
    git notes --ref=knownzero add -f -m 0101 COMMIT.
    """
    from lab import tree as trees

    made = trees.make(name, path, force)
    print(json.dumps({"path": str(made)}) if as_json else made)


series_app = typer.Typer(no_args_is_help=True, help="Save, export and check the series of linux or qemu.")
app.add_typer(series_app, name="series")


@series_app.command("save")
def series_save(
    name: Annotated[str, typer.Argument(help="linux or qemu.")],
    path: Annotated[Path | None, typer.Option(help="The git tree (default: the one of kz tree).")] = None,
    as_json: Json = False,
) -> None:
    """Write a tree's commits back into new/ and patches/; a tree as it was made changes nothing."""
    from lab import series, tree

    changed = tree.save(series.get(name), (path or tree.default_path(name)).absolute())
    if as_json:
        print(json.dumps({"changed": changed}))
    else:
        print("\n".join(f"{name}/{item}" for item in changed) if changed else "nothing changed")


@series_app.command("export")
def series_export(
    name: Annotated[str, typer.Argument(help="linux or qemu.")],
    directory: Annotated[Path, typer.Argument(help="Where the mails go (made when missing).")],
    figures: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            help="A run whose figures the cover letter gets: a folder under out/. Repeatable. Default: the newest "
            "`kz bench all`, or else `kz demo`, of this very series.",
        ),
    ] = None,
    ready: Annotated[
        bool,
        typer.Option(
            "--ready",
            help="Also run checkpatch on the mails, rehearse sending them (git send-email --dry-run), and print whom "
            "MAINTAINERS names. Takes a minute or two.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the series as mails for a list: a cover letter, and new files in the patch that first uses them.

    The letter's figures come from runs; what nobody measured is a marked gap. Nothing is sent.
    """
    from lab import export, progress

    made = export.export(name, directory, figures or [], ready)
    if as_json:
        print(
            json.dumps(
                {
                    "files": [str(p) for p in made.mails], "runs": [str(p) for p in made.letter.runs], "gaps": made.letter.gaps,
                    "stale": made.letter.stale, "problems": [vars(p) for p in made.problems], "recipients": made.recipients,
                }
            )
        )  # fmt: skip
        return
    print("\n".join(str(p) for p in made.mails))
    if made.recipients:
        print("\nTo and Cc, as MAINTAINERS has them:\n" + "\n".join(made.recipients))
    for remark in export.remarks(made, name):
        progress.note(remark)
    for problem in made.problems:
        progress.note(f"{problem.check}: {problem.where}: {problem.text}")


@series_app.command("check")
def series_check(
    name: Annotated[str, typer.Argument(help="linux or qemu.")],
    each: Annotated[
        bool,
        typer.Option(
            "--each",
            help="Also build after every patch, with the feature on and off, x86_64 and um: what the series "
            "touches. Takes hours; what has passed is remembered.",
        ),
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="With --each: all of the kernel (takes a night).")
    ] = False,
    first: Annotated[
        int, typer.Option("--from", metavar="NUMBER", min=0, help="With --each: begin with this patch.")
    ] = 0,
    against: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="Instead, report what becomes of each patch on another source: newest (that the machine's Debian mirror "
            "has), 7.3.y, a version such as 7.4-rc1, or a source tree or tarball. The exit code is 0 whatever it finds.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Check that the series applies with no fuzz, is clean to checkpatch, and survives saving."""
    from lab import check

    if against:
        if each or whole or first:
            raise errors.UsageError(
                "Bad --against", "it builds nothing, so it does not go with --each", "run one, then the other"
            )
        from lab import against as others

        report = others.against(name, against)
        print(others.to_json(report) if as_json else "\n".join(others.lines(report)))
        return

    if (whole or first) and not each:
        raise errors.UsageError("Bad --whole or --from", "they say what --each builds", "add --each")
    problems = check.check(name, each, whole, first)
    if as_json:
        print(json.dumps({"name": name, "problems": [vars(p) for p in problems]}))
    else:
        for problem in problems:
            print(f"{problem.check}: {problem.where}: {problem.text}")
        print(f"{name}: {len(problems)} problems" if problems else f"{name}: in order")
    raise typer.Exit(errors.FAILED if problems else errors.OK)


def _print_image(image: Path, as_json: bool) -> None:
    from lab import build

    if as_json:
        print(json.dumps({"path": str(image), **build.metadata(image)}))
    else:
        print(image)


@app.command(context_settings={"allow_interspersed_args": False})
def boot(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD...", help="What to run in the guest.")
    ] = None,
    kernel: Annotated[
        str, typer.Option(help="base, knownzero, off, debug, stock (the distribution's), or an image.")
    ] = "knownzero",
    qemu: Annotated[
        str | None, typer.Option(help="base, knownzero, stock (the distribution's), or a binary.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Guest memory, as QEMU's -m takes it.")] = "2G",
    cpus: Annotated[int, typer.Option(min=1, max=255, help="Virtual CPUs.")] = 1,
    device: Annotated[
        list[str] | None,
        typer.Option(help="A QEMU device, such as virtio-balloon-pci,free-page-reporting=on. Repeatable."),
    ] = None,
    append: Annotated[str, typer.Option(help="More kernel command line.")] = "",
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE[:GUESTPATH]", help="Put a file or folder into the guest. Repeatable."),
    ] = None,
    accel: Annotated[str, typer.Option(help="auto, kvm or tcg.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until the guest is ended.")] = 300,
    arch: Annotated[
        str, typer.Option(help="x86_64, um (the kernel as a program; no QEMU), i386 or arm64 (emulated).")
    ] = "x86_64",
    mte: Annotated[
        bool, typer.Option("--mte", help="With --arch arm64: a machine with memory tags.")
    ] = False,
    qemu_arg: Annotated[list[str] | None, typer.Option(help="A raw QEMU argument. Repeatable.")] = None,
    allow_warnings: Annotated[
        bool, typer.Option("--allow-warnings", help="Do not fail on faults the kernel reports.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a command in a fresh guest; its stdout, stderr and exit code are passed through.

    The kernel's console goes to a log under out/boot. A kernel warning, oops or oracle
    report fails the run with exit code 1, whatever the command said.
    """
    from lab import boot as guests
    from lab import progress

    def write(stream: IO[bytes]) -> Callable[[bytes], None]:
        def put(data: bytes) -> None:
            stream.write(data)
            stream.flush()

        return put

    spec = guests.BootSpec(
        kernel=kernel, qemu=qemu, memory=memory, cpus=cpus, devices=device or [], append=append,
        add=[_added(item) for item in add or []], accel=accel, timeout=timeout, command=command or ["uname", "-a"],
        extra_qemu=qemu_arg or [], allow_warnings=allow_warnings, arch=arch, mte=mte,
        console_lines=None if as_json else write(sys.stdout.buffer), errors=None if as_json else write(sys.stderr.buffer),
    )  # fmt: skip
    result = guests.boot(spec)
    if as_json:
        print(
            json.dumps(
                {
                    "exit_code": result.exit_code, "stdout": result.stdout, "stderr": result.stderr, "accelerator": result.accel,
                    "seconds": round(result.seconds, 3), "console": str(result.console), "violations": result.violations,
                }
            )
        )  # fmt: skip
    elif progress.console.is_terminal:
        progress.note(f"{result.accel}, {result.seconds:.1f} s, console: {result.console}")
    raise typer.Exit(result.exit_code)


def _added(item: str) -> tuple[Path, str]:
    name, _, place = item.partition(":")
    path = Path(name)
    if not path.exists():
        raise errors.UsageError(
            f"cannot add {name} to the guest",
            "there is no such file",
            "give --add FILE or --add FILE:GUESTPATH",
        )
    return path, place


@app.command(context_settings={"allow_interspersed_args": False})
def shell(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD...]", help="What to run instead of a shell.")
    ] = None,
    kernel: Annotated[
        str, typer.Option(help="base, knownzero, off, debug, stock, or an image.")
    ] = "knownzero",
    qemu: Annotated[str | None, typer.Option(help="base, knownzero, stock, or a binary.")] = None,
    memory: Annotated[str, typer.Option(help="Guest memory, as QEMU's -m takes it.")] = "2G",
    cpus: Annotated[int, typer.Option(min=1, max=255, help="Virtual CPUs.")] = 1,
    device: Annotated[list[str] | None, typer.Option(help="A QEMU device. Repeatable.")] = None,
    append: Annotated[str, typer.Option(help="More kernel command line.")] = "",
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE[:GUESTPATH]", help="Put a file or folder into the guest."),
    ] = None,
    accel: Annotated[str, typer.Option(help="auto, kvm or tcg.")] = "auto",
    qemu_arg: Annotated[list[str] | None, typer.Option(help="A raw QEMU argument. Repeatable.")] = None,
) -> None:
    """A shell in a fresh guest, on this terminal; leave it with exit or Ctrl-D."""
    from lab import boot as guests

    spec = guests.BootSpec(
        kernel=kernel, qemu=qemu, memory=memory, cpus=cpus, devices=device or ["virtio-balloon-pci,free-page-reporting=on"], append=append,
        add=[_added(item) for item in add or []], accel=accel, timeout=7 * 86400, command=command or ["sh", "-i"], extra_qemu=qemu_arg or [],
    )  # fmt: skip
    raise typer.Exit(guests.interactive(spec))


@app.command()
def test(
    pytest_options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- PYTEST...]", help="More options for pytest.")
    ] = None,
    select: Annotated[
        str, typer.Option(metavar="EXPR", help="Run only tests whose name matches (pytest -k).")
    ] = "",
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results as JUnit XML.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only tests that need neither guests nor builds.")
    ] = False,
    nightly: Annotated[
        bool,
        typer.Option(
            "--nightly", help="What takes hours, with a page about it: out/nightly/TIME/summary.html."
        ),
    ] = False,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"With --nightly: only this stage. Repeatable. There are: {', '.join(nights.NAMES)}.",
        ),
    ] = None,
) -> None:
    """Run every test but those that take long; builds what they need first. Skipped tests are listed with reasons.

    A night has all tests, with half an hour for each leak hunt, every bench, and both series built after
    each patch. A stage that fails does not stop the others, and the page is written anew after each.
    """
    if nightly:
        if quick or junit:
            raise errors.UsageError(
                "Bad --quick or --junit", "each stage of a night is a run of its own", "leave it out"
            )
        command = shlex.join(["./kz", *sys.argv[1:]])
        raise typer.Exit(nights.main(stage or [], select, pytest_options or [], command))
    if stage:
        raise errors.UsageError("Bad --stage", "it names a part of a night", "add --nightly")
    from lab import testing

    raise typer.Exit(testing.run_tests(select, junit, quick, pytest_options or []))


@app.command(hidden=True)
def reference() -> None:
    """Write docs/reference/cli.md anew, from the definition of the command line."""
    from lab import clidoc

    clidoc.write()
    print(clidoc.PAGE)


LATER = {
    "lab.bench.cli": ("demo", "bench"),
    "lab.report": ("report",),
    "lab.compare": ("compare",),
    "lab.top": ("top",),
    "lab.package": ("package",),
}


def _register_others(asked: str = "") -> None:
    """Verbs that live in modules of their own; one that cannot be loaded says why.

    They load much, so another verb that is ``asked`` for goes without them; help and suggestions want them all.
    """
    here = {group.name for group in app.registered_groups}
    here |= {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }
    known = here.union(*LATER.values())
    for module, verbs in LATER.items():
        if asked in known - set(verbs):
            continue
        try:
            importlib.import_module(module).register(app)
        except ImportError as error:
            for verb in verbs:
                _absent(verb, str(error))


def _absent(verb: str, why: str) -> None:
    @app.command(
        verb,
        help="(not in this checkout)",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def absent() -> None:
        raise errors.LabError(f"`kz {verb}` cannot be loaded", why, "update the checkout")


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    # As an exception, so that guests and builds are ended on the way out.
    raise SystemExit(128 + number)


def main() -> int:
    """Run a verb; the return value is the process's exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGHUP, _terminate)
    try:
        _register_others(*sys.argv[1:2])
        return _run()
    except errors.LabError as error:
        return _report(error)
    except KeyboardInterrupt:
        print("kz: interrupted; nothing half-built is kept", file=sys.stderr)
        return errors.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return errors.MACHINE
    except OSError as error:
        return _report(errors.from_oserror(error, "the machine got in the way"))


def _run() -> int:
    try:
        code = app(prog_name="kz", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except TyperException as error:
        if not error.format_message():
            return errors.USAGE  # nothing was asked for: the help has been printed
        verb = getattr(getattr(error, "ctx", None), "command_path", "kz")
        raise errors.UsageError(
            f"Bad usage of {verb}", error.format_message(), f"see `{verb} --help`"
        ) from None
    except SystemExit as end:  # of a signal
        code = end.code if isinstance(end.code, int) else errors.FAILED
    if code == errors.INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else errors.OK


def _report(error: errors.LabError) -> int:
    print(f"kz: {error}", file=sys.stderr)
    return error.code
