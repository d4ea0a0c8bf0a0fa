"""The files that recommended commands name: written by the commands themselves, or with the fuzzer's seeds."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from lab.fuzz.seeds import HERE, subjects
from tests.frameworks.test_findings import NEMO

TRL = ("launch.sh", "grpo.yaml", "accelerate.yaml", "server.sh")
SEEDS = {
    "settings": {"run.yaml": "run.yaml"},
    "own-profile": {"gpu.yaml": "my_gpu.yaml"},
    "model": {"config.json": "config.json"},
    "prices": {"prices.yaml": "my_prices.yaml"},
    "whatif": {"whatif.yaml": "my-scenario.yaml", "curve.csv": "curve.csv"},
    "rows-memory": {"memory.csv": "my_runs.csv"},
    "log-verl": {"job.log": "job.log", "launch.sh": "run.sh"},
    "log-openrlhf": {"job.log": "openrlhf/job.log", "launch.sh": "openrlhf/launch.sh"},
    "1-verl": {"run/events.out.tfevents.1": "events/events.out.tfevents.1", "launch.sh": "launch.sh"},
    "json-trl": {
        "run/trainer_state.json": "trl_run/trainer_state.json",
        **{name: f"trl/{name}" for name in TRL},
    },
}
"""Seed -> its file -> its name in commands."""
COPIES = {
    "model/config.json": "config.json",
    "path/to/config.json": "config.json",
    "qwen2.5-7b/config.json": "config.json",
    "logs/job.log": "job.log",
    "outputs/2026-08-20/job.log": "job.log",
    "hardware_profiles/local.yaml": "my_gpu.yaml",
}
MACHINE = b"NVIDIA H100 80GB HBM3\n"
"""What a log says of its machine."""
OVERLAYS = (
    (r"^launch plan", {"plan.json": "before.json"}),
    (r"(compare|diff) plan.json runs/a|--compare runs/a", {"plan.json": "runs/a/plan.json"}),
    (r"--framework openrlhf", {"job.log": "openrlhf/job.log", "launch.sh": "openrlhf/launch.sh"}),
    (r"--framework trl", {name: f"trl/{name}" for name in TRL}),
    (r"^design .*--run run.yaml", {"run.yaml": "long_run.yaml"}),
)
"""Commands -> files that they read in place of those above."""
MADE = (
    "design --gpus 2 --model 0.5b --algorithm grpo --framework verl --out plan.json",
    "design --gpus 2 --model 0.5b --algorithm grpo --out before.json",
    "design --gpus 4 --model 0.5b --algorithm grpo --out after.json",
    "import-run job.log --framework verl --gpu h100 --out runs/a",
    "calibrate runs/a --out calibrated.yaml",
    "whatif my-scenario.yaml --out whatif.json --csv points.csv",
)
"""Commands whose files others read; they are judged too."""


LONG_RUN = """
title: from 256 to 512 tokens
steps: 40
lengths: [{step: 0, mean: 100}, {step: 40, mean: 200}]
stages: [{start: 0, max: 256}, {start: 20, max: 512}]
"""
PORTFOLIO = """
title: a small portfolio
years: 1
jobs:
  - name: chat
    workload: {model: 0.5b, algorithm: grpo, prompts: 32, samples: 4, reward: {rules: {}}}
    steps: 100
    runs_per_year: 100
    deadline: 14 d
gpus: [h100]
sizes: [1]
supply: [bought, on-demand]
engineers: 1
maintenance: 5 %
storage: 1000 USD
on_demand_available: 0.9
"""
LEARNING = """
target: 0.5
curve: learnt.csv
batch: 128
"""
JOB = """
workload: {model: 0.5b, algorithm: grpo, prompts: 32, samples: 4, reward: {rules: {}}}
steps: 100
deadline: 2 d
"""
WRITTEN = {
    "long_run.yaml": LONG_RUN,
    "portfolio.yaml": PORTFOLIO,
    "learning.yaml": LEARNING,
    "learnt.csv": "samples,reward\n0,0.2\n10000,0.6\n",
    **{f"jobs/{name}.yaml": JOB for name in "abc"},
}
"""Small documents of runs, purchases and pools."""


def prepare(folder: Path, scratch: Path, run: Callable[[str, Path], object]) -> None:
    """Fill `folder`; `run` runs a command there."""
    _write_seeds(folder, scratch)
    log = folder / "job.log"
    log.write_bytes(MACHINE + log.read_bytes())
    (folder / "config.yaml").write_text(NEMO)
    (folder / "jobs").mkdir()
    for name, text in WRITTEN.items():
        (folder / name).write_text(text)
    for copy, file in COPIES.items():
        (folder / copy).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / file, folder / copy)
    for command in MADE:
        run(command, folder)
    for name in ("b", "c", "verl"):
        shutil.copytree(folder / "runs/a", folder / f"runs/{name}")


def overlaid(command: str, folder: Path) -> None:
    """Give a command the files that it reads, and nothing where it writes."""
    for pattern, files in OVERLAYS:
        for name, other in files.items() if re.search(pattern, command) else ():
            shutil.copy(folder / other, folder / name)
    words = shlex.split(command)
    for option, name in pairwise(words):
        if option == "--out" and (folder / name).is_dir():
            shutil.rmtree(folder / name)
        elif option == "--out":
            (folder / name).unlink(missing_ok=True)


def _write_seeds(folder: Path, scratch: Path) -> None:
    for subject in subjects(scratch):
        for file, name in SEEDS.get(subject.name, {}).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(subject.files[file].replace(HERE.encode(), b"."))
