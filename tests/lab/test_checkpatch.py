# SPDX-License-Identifier: GPL-2.0
"""checkpatch is shown what it has not seen, and what it had something to say of."""

from __future__ import annotations

from pathlib import Path

from lab.post import check
from lab.series import series

# Complains of "bad", and notes what it was asked.
SCRIPT = r"""
my $file = pop @ARGV;
open(my $asked, '>>', "%s");
print $asked "$file\n";
open(my $in, '<', $file) or die "$file: $!\n";
print "$file:1: WARNING: it is bad\n" if grep { /bad/ } <$in>;
"""


def test_what_is_in_order_is_not_shown_again(cache: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    pristine = tmp_path / "linux-7.3.4"
    (pristine / "scripts").mkdir(parents=True)
    (pristine / "scripts" / "checkpatch.pl").write_text(SCRIPT % asked, encoding="utf-8")
    root = tmp_path / "series"
    for name, text in {
        "patches/0001-one.patch": "fine\n",
        "patches/0002-two.patch": "bad\n",
        "new/mm/new.c": "fine\n",
        "patches/series": "0001-one.patch\n0002-two.patch\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    what = series.Series("linux", root)

    def told() -> tuple[list[str], list[str]]:
        asked.write_text("", encoding="utf-8")
        found = [problem.where for problem in check.checkpatch(what, pristine)]
        return found, sorted(Path(line).name for line in asked.read_text(encoding="utf-8").splitlines())

    assert told() == (["0002-two.patch"], ["0001-one.patch", "0002-two.patch", "new.c"])
    assert told() == (["0002-two.patch"], ["0002-two.patch"])
    (root / "patches/0002-two.patch").write_text("mended\n", encoding="utf-8")
    (root / "new/mm/new.c").write_text("bad\n", encoding="utf-8")
    assert told() == (["mm/new.c"], ["0002-two.patch", "new.c"])
    (root / "new/mm/new.c").write_text("fine again\n", encoding="utf-8")
    assert told() == ([], ["new.c"])
    assert told() == ([], [])
