"""`python -m lab.first_contact`: run the checks and write the page; needs Python alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from lab.first_contact.checks import CHECKS, ROOT, Answer, answers, run
from lab.first_contact.report import page


def _gpu() -> bool:
    return Path("/proc/driver/nvidia/gpus").is_dir() or Path("/dev/nvidia0").exists()


def main() -> None:
    """Parse, run, write after every check."""
    parser = argparse.ArgumentParser(prog="python -m lab.first_contact", description=__doc__)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for all checks together")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "first_contact")
    parser.add_argument("--only", nargs="+", choices=[check.name for check in CHECKS])
    parser.add_argument("--pack", type=Path, metavar="ARCHIVE", help="write what to carry to such a machine")
    parser.add_argument("--python", default="3.12", help="of that machine, for --pack")
    parser.add_argument("--settle", type=Path, metavar="STREAM", help="a profile and scoreboard rows from it")
    chosen = parser.parse_args()
    if chosen.pack:
        from lab.first_contact.pack import pack  # needs packages that the machine itself may lack

        print(*pack(chosen.pack, chosen.python), sep="\n")
        return
    if chosen.settle:
        from lab.first_contact.settle import settle

        print(*settle(chosen.settle), sep="\n")
        return
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    stream = chosen.out.with_suffix(".jsonl")

    def write(last: Answer) -> None:
        chosen.out.with_suffix(".md").write_text(page(answers(stream)))
        print(f"{last.title}: {last.outcome} {last.seconds:.0f} s {last.reason}", flush=True)

    checks = [check for check in CHECKS if not chosen.only or check.name in chosen.only]
    run(checks, budget_s=chosen.budget, small=not _gpu(), stream=stream, heard=write)
    print(page(answers(stream)))


if __name__ == "__main__":
    main()
