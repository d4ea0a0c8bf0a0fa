"""Fragments of changelog.d become the entries of a release in CHANGELOG.md.

    python -m lab.changelog 0.3.0 2027-01-15

The section of the release is made at the top, or added to where it is there; entries of one subject follow one another.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from rlhfsim.errors import RlhfsimError

ROOT = Path(__file__).parents[1]
LONGEST = 100
"""Characters of an entry."""
ENTRY = re.compile(r"- \[(NEW|CHANGE|FIX|BREAKING)\] (?P<subject>[^:]{1,40}): \S.*")
SECTION = re.compile(r"^## .*\n(?:(?!## ).*\n)*", re.MULTILINE)


def fragments(root: Path = ROOT) -> tuple[Path, ...]:
    """Files of changelog.d that hold entries of the next release, by name."""
    return tuple(sorted(f for f in (root / "changelog.d").glob("*.md") if f.name != "README.md"))


def entries(text: str, source: str) -> list[str]:
    """The entries of a fragment or of the sections of CHANGELOG.md: lines `- [KIND] subject: text`.

    Raises:
        RlhfsimError: a line of another form, or a longer one.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("## ")]
    for line in lines:
        if len(line) > LONGEST or not ENTRY.fullmatch(line):
            raise RlhfsimError(
                "not-a-changelog-entry",
                f"{source}: no entry of a changelog, or a long one ({len(line)} characters): {line}",
                help=f"write `- [NEW|CHANGE|FIX|BREAKING] subject: text`, at most {LONGEST} characters",
            )
    return lines


def sections(changelog: str) -> dict[str, str]:
    """Title line of each version in CHANGELOG.md -> its text, the title included."""
    return {text.partition("\n")[0]: text for text in SECTION.findall(changelog)}


def folded(changelog: str, added: Iterable[str], version: str, day: str) -> str:
    """CHANGELOG.md with the added entries in the section of a version, grouped by subject."""
    title = f"## {version} ({day})"
    older = sections(changelog)
    there = entries(older.pop(title, ""), title)
    newest = "\n".join([title, "", *_by_subject([*there, *added]), "", ""])
    return changelog.partition("## ")[0] + newest + "".join(older.values())


def _by_subject(lines: Iterable[str]) -> list[str]:
    """Entries of one subject together, in the order in which subjects first occur."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        subject = line.partition("] ")[2].partition(":")[0].partition(",")[0]
        groups.setdefault(subject, []).append(line)
    return [line for group in groups.values() for line in group]


def main() -> None:
    """Write CHANGELOG.md, then remove the fragments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version")
    parser.add_argument("day", help="day of the release, as 2027-01-15")
    asked = parser.parse_args()
    file, files = ROOT / "CHANGELOG.md", fragments()
    try:
        added = [line for f in files for line in entries(f.read_text(), f.name)]
    except RlhfsimError as error:
        sys.exit(str(error))
    file.write_text(folded(file.read_text(), added, asked.version, asked.day))
    for fragment in files:
        fragment.unlink()
    print(f"{len(added)} entries of {len(files)} fragments are in {file.name} under {asked.version}")


if __name__ == "__main__":
    main()
