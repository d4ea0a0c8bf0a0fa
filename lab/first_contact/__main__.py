"""`python -m lab.first_contact`: run the checks and write the page; needs Python alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from lab.first_contact.checks import CHECKS, ROOT, Answer, as_json, run
from lab.first_contact.report import page


def _gpu() -> bool:
    return Path("/proc/driver/nvidia/gpus").is_dir() or Path("/dev/nvidia0").exists()


def main() -> None:
    """Parse, run, write after every check."""
    parser = argparse.ArgumentParser(prog="python -m lab.first_contact", description=__doc__)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for all checks together")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "first_contact")
    parser.add_argument("--only", nargs="+", choices=[check.name for check in CHECKS])
    chosen = parser.parse_args()
    small = not _gpu()

    def write(answers: list[Answer]) -> None:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.with_suffix(".md").write_text(page(answers))
        chosen.out.with_suffix(".json").write_text(as_json(answers))
        last = answers[-1]
        print(f"{last.title}: {last.outcome} {last.seconds:.0f} s {last.reason}", flush=True)

    checks = [check for check in CHECKS if not chosen.only or check.name in chosen.only]
    print(page(run(checks, budget_s=chosen.budget, small=small, heard=write)))


if __name__ == "__main__":
    main()
