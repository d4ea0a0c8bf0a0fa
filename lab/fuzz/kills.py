"""SIGKILL at random moments over all commands that write, and four processes at once on one output.

    python -m lab.fuzz.kills --kills 100 --seed 7      # exit code 1 where a check fails

Every other kill waits for a temporary file of ours, so that it falls into a write. Then: each output is whole
or absent; the same command runs to its end, leaves nothing hidden behind and writes the bytes of a run that
nobody killed (a what-if goes on from the designs that it kept). Commands are forked from this process, which
has imported everything: the moments of a kill are those of the work.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import yaml

from lab.planted import planted_trace
from rlhfsim import resources
from rlhfsim.api import estimate_file
from rlhfsim.cli.export import predicted, vendors_of
from rlhfsim.cli.main import cli, main
from rlhfsim.interchange.export import export
from rlhfsim.outputs import PREFIX
from rlhfsim.plan import write_plan
from rlhfsim.specs.hardware.profiles import load_profile
from tests.frameworks.log_forms import console_log
from tests.what_if.small_scenarios import small

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "verl-grpo-deepseek-7b.yaml"
SCENARIO = small(grid={"workload.samples": [1, 2, 3, 4]})
CROWD = 4
TOLD = "said.txt"
"""What a command printed, in the folder of its case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command that writes."""

    words: str
    outputs: tuple[str, ...]
    new: bool = False
    """Its output must be new: of several at once, and of a second run, all but one are refused."""

    @property
    def name(self) -> str:
        """The command."""
        return self.words.split()[0]


CASES = (
    Case(
        words="design --gpus 2 --model 0.5b --algorithm grpo --prompts 16 --samples 2 --rules workers=4 "
        "--fastest --out out.json",
        outputs=("out.json",),
    ),
    Case(words="estimate plan.json --out out.json", outputs=("out.json",)),
    Case(words="simulate plan.json --iterations 2 --trace out.json", outputs=("out.json", "out.chrome.json")),
    Case(
        words="whatif scenario.yaml --jobs 2 --cache kept --csv out.csv --out out.json",
        outputs=("out.csv", "out.json"),
    ),
    Case(words="report plan.json --no-sizes --out out.html", outputs=("out.html",)),
    Case(words="export plan.json --to verl --out out", outputs=("out",), new=True),
    Case(words="import-run job.log --gpu h100 --prompt-len 300 --out out", outputs=("out",), new=True),
    Case(words="compare run --trace out.json", outputs=("out.json",)),
    Case(words="calibrate run --out out.yaml", outputs=("out.yaml",), new=True),
    Case(words="validate table.csv --out rows.csv", outputs=("rows.csv",)),
)


class Defect(Exception):
    """A check that failed."""


def inputs(folder: Path) -> None:
    """Everything that the commands read, in a folder."""
    plan = estimate_file(resources.shipped("scenarios") / "recipes" / RECIPE)
    write_plan(folder / "plan.json", plan)
    (folder / "scenario.yaml").write_text(yaml.safe_dump(SCENARIO))
    written = export(plan, "verl", vendors_of(plan), predicted).written.values
    model = plan.workload.model
    settings = {k.lstrip("+-"): model if str(v).startswith("${") else v for k, v in written.items()}
    trace = planted_trace(plan, load_profile("h100"), {}, np.random.default_rng(0), steps=3)
    (folder / "job.log").write_text(console_log("verl", settings, plan, trace))
    rows = (ROOT / "lab/scoreboard/data/training.csv").read_text().splitlines(keepends=True)
    (folder / "table.csv").write_text("".join(rows[:6]))
    code = ended(start("import-run job.log --gpu h100 --prompt-len 300 --out run", folder))
    if code:
        raise Defect(f"import-run ends with {code}: {(folder / TOLD).read_text()}")


# --- processes --------------------------------------------------------------------------------------


def start(words: str, folder: Path) -> int:
    """The command in a forked process of its own group; its number."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)  # here too: it may be killed before it has run a line
        return pid
    code: Any = 70
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        told = os.open(TOLD, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(told, 1)
        os.dup2(told, 2)
        sys.argv = ["rlhfsim", *words.split()]
        main()
    except SystemExit as exit:
        code = exit.code
    finally:
        sys.stdout.flush()
        os._exit(code)


def ended(pid: int) -> int:
    """Its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed(pid: int, folder: Path, at: float, *, writing: bool) -> bool:
    """Kill it and all that it forked `at` seconds from now, or while it writes; False where it ended before."""
    begun = time.monotonic()
    while time.monotonic() < begun + at:
        if writing and _hidden(folder):
            break
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(0.0005)
    os.killpg(pid, signal.SIGKILL)
    ended(pid)
    return True


# --- checks -----------------------------------------------------------------------------------------


def content(folder: Path, case: Case) -> dict[str, Any]:
    """Every output that is there, without what names the moment of its run."""
    found: dict[str, Any] = {}
    for name in case.outputs:
        path = folder / name
        for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
            if file.exists():
                found[str(file.relative_to(folder))] = _timeless(file)
    return found


def _timeless(file: Path) -> Any:
    text = file.read_bytes()
    if b'"schema": "rlhfsim.whatif/' not in text[:100]:
        return text
    return {key: value for key, value in json.loads(text).items() if key != "provenance"}


def _hidden(folder: Path) -> list[str]:
    places = (folder, folder / "kept")
    return [name for place in places if place.is_dir() for name in os.listdir(place) if PREFIX in name]


def check(case: Case, folder: Path, whole: Mapping[str, Any], *, done: bool) -> None:
    """What is there is whole; after a run that ended, everything is, and nothing hidden.

    Raises:
        Defect: otherwise.
    """
    found = content(folder, case)
    wrong = [name for name, text in found.items() if whole.get(name) != text]
    if wrong:
        raise Defect(f"{case.name}: {', '.join(wrong)} is not as of a run that nobody killed")
    folders = [n for n in case.outputs if (folder / n).is_dir()]
    if (done or folders) and found.keys() != whole.keys():
        raise Defect(f"{case.name}: {', '.join(whole.keys() - found.keys())} is missing")
    if done and (left := _hidden(folder)):
        raise Defect(f"{case.name}: {', '.join(left)} is left")


def complete(case: Case, folder: Path) -> None:
    """Run it to its end.

    Raises:
        Defect: with an exit code that says otherwise.
    """
    made = case.new and (folder / case.outputs[0]).exists()
    code = ended(start(case.words, folder))
    if code != (2 if made else 0):
        raise Defect(f"{case.name}: exit code {code}: {(folder / TOLD).read_text()[-300:]}")


def one_kill(case: Case, source: Path, whole: Mapping[str, Any], seconds: float, at: float) -> bool:
    """One kill and the run after it, in a folder of its own; False where the command was faster.

    Raises:
        Defect: a check fails.
    """
    folder = source.parent / "case"
    shutil.copytree(source, folder)
    try:
        writing = at > 0.5
        pid = start(case.words, folder)
        hit = killed(pid, folder, 3 * seconds if writing else 2 * at * seconds, writing=writing)
        check(case, folder, whole, done=False)
        complete(case, folder)
        check(case, folder, whole, done=hit)
        return hit
    finally:
        shutil.rmtree(folder)


def crowd(case: Case, source: Path, whole: Mapping[str, Any]) -> None:
    """Several processes at once on one output end with one whole result.

    Raises:
        Defect: a check fails.
    """
    folder = source.parent / "crowd"
    shutil.copytree(source, folder)
    codes = sorted(ended(pid) for pid in [start(case.words, folder) for _ in range(CROWD)])
    if codes[0] != 0 or set(codes) > ({0, 2} if case.new else {0}):
        raise Defect(f"{case.name}: {CROWD} at once end with {codes}: {(folder / TOLD).read_text()[-300:]}")
    check(case, folder, whole, done=True)
    shutil.rmtree(folder)


@click.command()
@click.option("--kills", default=100)
@click.option("--seed", default=0)
@click.option("--only", default="", help="Commands, separated by commas.")
def run(kills: int, seed: int, only: str) -> None:
    """Kill, run again, check; then crowds."""
    cases = [case for case in CASES if not only or case.name in only.split(",")]
    for case in cases:
        cli.get_command(click.Context(cli), case.name)
    rng = np.random.default_rng(seed)
    hits = defects = 0
    with TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        source.mkdir()
        inputs(source)
        known: dict[str, tuple[dict[str, Any], float]] = {}
        for number in range(kills):
            case = cases[number % len(cases)]
            try:
                if case.name not in known:
                    known[case.name] = reference(case, source)
                    crowd(case, source, known[case.name][0])
                hits += one_kill(case, source, *known[case.name], float(rng.random()))
            except Defect as defect:
                defects += 1
                click.echo(f"kill {number}: {defect}")
    click.echo(f"{hits} of {kills} commands were killed before their end; {defects} defects")
    sys.exit(1 if defects else 0)


def reference(case: Case, source: Path) -> tuple[dict[str, Any], float]:
    """What a run that nobody kills writes, and its seconds."""
    folder = source.parent / "reference"
    shutil.copytree(source, folder)
    begun = time.monotonic()
    complete(case, folder)
    seconds = time.monotonic() - begun
    whole = content(folder, case)
    shutil.rmtree(folder)
    return whole, seconds


if __name__ == "__main__":
    run()
