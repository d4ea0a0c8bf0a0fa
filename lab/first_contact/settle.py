"""What a stream of first contact leaves behind: a page, a hardware profile, rows of the scoreboard.

    python -m lab.first_contact --settle reports/first_contact.jsonl

The profile is that of `rlhfsim profile measure`, of the micro-benchmarks that ended; the rows are peaks of
whole training steps, which `python -m lab.scoreboard` then predicts as it does published ones. What a CPU said
in small goes to the page alone.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.first_contact.checks import ROOT, Answer, answers
from lab.first_contact.report import page
from rlhfsim.calibration.micro_benchmarks.profile import measured_profile
from rlhfsim.calibration.profile_writer import check_new, write_text
from rlhfsim.specs.hardware.measured import Machine, Measured, Session

DATA = ROOT / "lab" / "scoreboard" / "data"
PROFILES = ROOT / "hardware_profiles"
TABLE = "memory_first_contact.csv"


def settle(stream: Path, profiles: Path = PROFILES, data: Path = DATA) -> Iterator[str]:
    """Write what there is and say what was written, or why not."""
    found = answers(stream)
    stream.with_suffix(".md").write_text(page(found))
    yield f"page: {stream.with_suffix('.md')}"
    whole = [answer for answer in found if not answer.small]
    session = _session(whole)
    if session is None:
        yield "no profile: no micro-benchmark ended on a GPU"
    else:
        name = re.sub(r"[^a-z0-9]+", "_", f"local {session.machine.title}".lower()).strip("_")
        profiles.mkdir(exist_ok=True)
        check_new(profiles / f"{name}.yaml")
        write_text(profiles / f"{name}.yaml", measured_profile(session, name).text)
        yield f"profile: {profiles / name}.yaml, of {len(session.measured)} numbers; try --gpu {name}"
    rows = [row["memory"] for answer in whole for row in answer.rows if "memory" in row]
    if rows:
        _add(data / TABLE, rows, data / "memory.csv")
    where = f"{data / TABLE}; next: python -m lab.scoreboard" if rows else "no peak was measured on a GPU"
    yield f"scoreboard: {len(rows)} rows: {where}"


def _session(found: Sequence[Answer]) -> Session | None:
    rows = [row for answer in found for row in answer.rows]
    machine = next((row["machine"] for row in rows if "machine" in row), None)
    measured = [row["measured"] for row in rows if "measured" in row]
    if machine is None or not measured:
        return None
    return Session(
        machine=Machine(**machine | {"versions": tuple(map(tuple, machine["versions"]))}),
        measured=tuple(Measured(**m | {"at": tuple(m["at"])}) for m in measured),
        missing=(),
    )


def _add(table: Path, rows: Sequence[dict[str, Any]], like: Path) -> None:
    """The table with these rows in place of those of the same source, in the columns of another."""
    columns = next(csv.reader(like.open(encoding="utf-8")))
    sources = {row["source"] for row in rows}
    kept = csv.DictReader(table.open(encoding="utf-8")) if table.exists() else ()
    lines = [*(row for row in kept if row["source"] not in sources), *rows]
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
