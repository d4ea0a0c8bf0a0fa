"""`rlhfsim demo`: design, run and compare on this machine, with a tiny model made on the spot."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import mkdtemp

import click

from rlhfsim.api import design
from rlhfsim.cli.launch import CORE, STACK, make_tiny, run, tiny_folder
from rlhfsim.cli.params import FOLDER, Whole, json_option, option
from rlhfsim.errors import RlhfsimError
from rlhfsim.extras import need
from rlhfsim.plan import Plan
from rlhfsim.present.terminal.console import console
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Rules, Workload

MAX_CORES = 4
"""Slots of the demo: more would only start more processes."""
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 4, 8, 8

DIGITS_S = 5e-6
"""Seconds of the demo's reward for one sample: the share of digits in thirty characters (timed: 2 us)."""
LEARNING_RATE = 3e-3
"""Large, so that a random model visibly learns to answer in digits within a few iterations."""
EPILOG = """\b
Examples:
  rlhfsim demo
  rlhfsim demo --out runs/first --iterations 10
"""


@click.command(epilog=EPILOG)
@option("--out", FOLDER, "Folder of the run; default: a new temporary one.")
@option("--iterations", Whole(1, 1000), "Iterations of the run.", default=6)
@json_option
def demo(out: Path | None, iterations: int, as_json: bool) -> None:
    """See it all on this machine: design, run, compare.

    Designs for the cores of this machine, builds a tiny model with its tokenizer, runs GRPO for real
    (Ray, DeepSpeed, vLLM; the reward is the share of digits in a response), and prints predicted against
    measured.
    """
    need(*STACK, purpose="a real run")
    from executor.launch import LaunchOptions
    from executor.settings import Optimizer, RewardRule, Settings

    folder = out or Path(mkdtemp(prefix="rlhfsim-demo-")) / "run"
    screen = console(stderr=as_json)
    screen.print(f"a tiny model is built in {tiny_folder(folder)}", highlight=False)
    make_tiny(folder)
    plan = designed(str(tiny_folder(folder) / "config.json"))
    settings = Settings(
        model=str(tiny_folder(folder)),
        iterations=iterations,
        rewards=(RewardRule(kind="digits"),),
        optimizer=Optimizer(learning_rate=LEARNING_RATE),
    )
    run(plan, settings, LaunchOptions(out=folder), as_json=as_json)


def designed(model: str) -> Plan:
    """The best plan for the cores of this machine, as slots of the shipped profile of one core."""
    cores = min(MAX_CORES, len(os.sched_getaffinity(0)))
    workload = Workload(
        algorithm="grpo",
        model=model,
        prompts=PROMPTS,
        samples=SAMPLES,
        packing=False,
        prompt_len=Fixed(value=PROMPT_TOKENS),
        response_len=Fixed(value=RESPONSE_TOKENS),
        reward=Reward(rules=Rules(seconds_per_sample=DIGITS_S, workers=cores)),
    )
    cluster = Cluster(node_groups=(node_group(CORE, cores, gpus_per_node=cores),))
    answer = design(Request(workload=workload, cluster=cluster), explain=False)
    if answer.chosen is None:
        raise RlhfsimError(
            "nothing-fits",
            "no plan fits this machine",
            help="rlhfsim design --gpu cpu-core --gpus N --model 8b shows why",
        )
    return answer.chosen
