"""Real runs that learn: held-out greedy accuracy before and after GRPO and PPO, several seeds each.

    python lab/benchmarks/learning.py [--seeds 0 1 2] [--algorithms grpo ppo] [--out reports]

A random model of 0.6 M parameters is warmed up by a few supervised steps, then runs on the real stack (vLLM,
DeepSpeed, Ray) with the disaggregated architecture: one rollout slot, one training slot. Accuracy is that of
greedy responses to 200 problems whose keys are held out of warm-up and training. Writes learning.json,
learning.md and learning.svg; runs of other seeds that learning.json already has stay in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from process import bind

from executor.settings import Algorithm, Data, Evaluation, Optimizer, RewardRule, Settings, Tracking
from rlhfsim.api import estimate
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Reward, Rules, Workload

ROOT = Path(__file__).parents[2]
WANTED_RISE = 0.15
LIMIT_S = 600.0
ROUND, MOST_ROUNDS = 25, 20
"""Supervised steps between two looks at the accuracy, and most of such rounds."""
WARM_UP_BATCH, WARM_UP_RATE = 32, 2e-3
PROBE_FROM, PROBES = 10**6, 200
"""Training problems that the warm-up is judged by: far behind those it learns from."""
WARM_UP_OF_RATE = 40
"""Optimizer steps in which the learning rate rises to its full value."""
HELD_OUT = 200
EVALUATIONS = 8
"""After the first one."""
MOST_PROMPT_TOKENS, MOST_TOKENS = 32, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is learnt."""

    generator: str
    difficulty: int
    """Statements of a puzzle; digits of a number."""
    warm_up_until: float
    """Accuracy on training problems at which the warm-up ends: all seeds start at about the same."""
    text: str


TASKS = {
    "logic": Task(
        generator="logic",
        difficulty=2,
        warm_up_until=0.4,
        text="""Two statements a puzzle, half of each kind: which of three letters is larger \
(`b>c,a>b;a?c=` -> `>`), and who of two people
tells the truth (`a:-a+-b,b:a*b;ab=` -> ...; - lies, + or, * and). Guessing gives half of the first and, \
by the most frequent answer, about
a third of the second. A held-out puzzle is one whose text is not trained on; the same claim with its two \
halves
swapped may be.""",
    ),
    "comparison": Task(
        generator="comparison",
        difficulty=2,
        warm_up_until=0.5,
        text="""`max(37,52)=` -> `52`, `min(37,52)=` -> `37`. A held-out pair is not trained on in either \
order. Copying one of the
two numbers at random would be right half the time.""",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What differs between the algorithms."""

    prompts: int
    samples: int
    mini_batches: int
    learning_rate: float
    critic_learning_rate: float | None = None
    iterations: int = 112
    """The learning rate decays to 0 at the last."""


_GROUPS = Recipe(prompts=128, samples=4, mini_batches=4, learning_rate=5e-4)
RECIPES = {
    "grpo": _GROUPS,
    **{name: replace(_GROUPS, iterations=64) for name in ("rloo", "dapo", "gspo", "cispo")},
    "ppo": Recipe(prompts=256, samples=1, mini_batches=4, learning_rate=5e-4, critic_learning_rate=1e-3),
}


def main() -> None:
    """Run what was asked, then write the three files from all runs there are."""
    parser = argparse.ArgumentParser(description="Learning curves of real runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", choices=list(RECIPES), default=["grpo", "ppo"])
    parser.add_argument("--task", choices=list(TASKS), default="comparison")
    parser.add_argument("--out", type=Path, default=ROOT / "reports")
    options = parser.parse_args()
    cores = bind()
    for seed in options.seeds:
        for algorithm in options.algorithms:
            result = measure(options.task, algorithm, seed) | {"cores": cores}
            print(
                f"{algorithm} seed {seed}: {result['start']:.3f} -> {result['end']:.3f} "
                f"in {result['seconds']:.0f} s",
                flush=True,
            )
            write(options.out, result)


# --- a run ------------------------------------------------------------------------------------------


class Heard:
    """A listener that keeps what is worth a line, and when iterations ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def phase(self, text: str) -> None:
        """To the error stream."""
        print(f"  {text}", file=sys.stderr, flush=True)

    def iteration(self, row: Mapping[str, float], total: int) -> None:
        """Remember when."""
        self.ends.append(time.perf_counter())

    def finding(self, finding: Any) -> None:
        """To the error stream."""
        print(f"  {finding.code}: {finding.what}", file=sys.stderr, flush=True)


def measure(name: str, algorithm: str, seed: int) -> dict[str, Any]:
    """Warm-up and run of one seed."""
    from executor.launch import LaunchOptions, launch
    from executor.tasks import tiny
    from executor.tasks.prompts import Generated

    begin, heard = time.perf_counter(), Heard()
    with tempfile.TemporaryDirectory() as folder:
        base, model = tiny.build(Path(folder) / "base", seed=seed), Path(folder) / "warm"
        chosen = TASKS[name]
        task = Generated(task=chosen.generator, difficulty=chosen.difficulty, seed=seed)
        steps = warm_up(base, model, task, TASKS[name].warm_up_until)
        warm_up_s = time.perf_counter() - begin
        ended = launch(
            plan(algorithm, model),
            settings(name, algorithm, model, seed),
            LaunchOptions(out=Path(folder) / "run"),
            heard,
        ).ended
    accuracy = {str(step): value for step, value in sorted(ended.evaluations.items())}
    return {
        "task": name,
        "algorithm": algorithm,
        "seed": seed,
        "recipe": asdict(RECIPES[algorithm]),
        "start": accuracy["0"],
        "end": accuracy[str(RECIPES[algorithm].iterations)],
        "seconds": time.perf_counter() - begin,
        "warm_up_s": warm_up_s,
        "warm_up_steps": steps,
        "iteration_s": statistics.median(b - a for a, b in itertools.pairwise(heard.ends)),
        "load": os.getloadavg()[1],
        "accuracy": accuracy,
        "reward": [row["reward/mean"] for row in ended.rows],
    }


def warm_up(base: Path, model: Path, task: Any, until: float) -> int:
    """Supervised steps in rounds, until so many of some training problems are answered right; how many."""
    from executor.tasks import sft

    probe = task.batch(PROBE_FROM, PROBES)
    for number in range(MOST_ROUNDS):
        sft.warm_up(model if number else base, model, task, ROUND, WARM_UP_BATCH, WARM_UP_RATE, seed=number)
        if sft.greedy_accuracy(model, probe) >= until:
            break
    return (number + 1) * ROUND


def plan(algorithm: str, model: Path) -> Plan:
    """Disaggregated: every trained role on one slot, the rollout on another."""
    recipe = RECIPES[algorithm]
    work = Workload(
        algorithm=algorithm,
        model=str(model / "config.json"),
        prompts=recipe.prompts,
        samples=recipe.samples,  # type: ignore[arg-type]
        mini_batches=recipe.mini_batches,
        kl=False,
        dynamic_sampling=DynamicSampling(kept=0.5) if algorithm == "dapo" else None,
        packing=False,
        reward=Reward(rules=Rules(seconds_per_sample=0.001, workers=1)),
        prompt_len=Fixed(value=MOST_PROMPT_TOKENS),
        response_len=Fixed(value=MOST_TOKENS),
    )
    layout = {
        "dp": 1,
        "zero": 1,
        "micro_batch": work.num_sequences // recipe.mini_batches,
        "recompute": "none",
    }
    roles = {
        role: {"pool": "train", "layout": layout}
        for role in ("actor", "critic")
        if role == "actor" or work.has_critic
    }
    rollout = {
        "pool": "rollout",
        "layout": {"dp": 1, "memory_utilization": 0.3, "max_num_seqs": work.num_sequences},
    }
    pools = [{"name": "train", "gpus": 1}, {"name": "rollout", "start": 1, "gpus": 1}]
    fields = {"backend": "deepspeed", "pools": pools, "weight_path": "broadcast", "rollout": rollout, **roles}
    placed = convert(Placement, parse_yaml("{}", "learning"), fields)
    return estimate(placed, work, Cluster(node_groups=(node_group("cpu-core", 2, gpus_per_node=2),)))


def settings(name: str, algorithm: str, model: Path, seed: int) -> Settings:
    """The reward is 1 for the right answer, else 0; no KL term."""
    recipe = RECIPES[algorithm]
    optimizer = Optimizer(
        learning_rate=recipe.learning_rate, betas=(0.9, 0.99), schedule="linear", warmup_steps=WARM_UP_OF_RATE
    )
    critic = replace(optimizer, learning_rate=recipe.critic_learning_rate or recipe.learning_rate)
    return Settings(
        model=str(model),
        data=Data(task=TASKS[name].generator, difficulty=TASKS[name].difficulty),
        rewards=(RewardRule(kind="answer"),),  # type: ignore[arg-type]
        algorithm=Algorithm(kl_coefficient=0.0),
        optimizer=optimizer,
        critic_optimizer=critic,
        iterations=recipe.iterations,
        seed=seed,
        evaluation=Evaluation(problems=HELD_OUT, every=recipe.iterations // EVALUATIONS),
        tracking=Tracking(tensorboard=False),
    )


# --- reports ----------------------------------------------------------------------------------------


def write(folder: Path, run: Mapping[str, Any]) -> None:
    """Add the run to learning.json, and make the other two files of it."""
    path = folder / "learning.json"
    known = (
        [r for r in json.loads(path.read_text())["runs"] if r["task"] == run["task"]]
        if path.is_file()
        else []
    )
    runs = [r for r in known if (r["algorithm"], r["seed"]) != (run["algorithm"], run["seed"])]
    runs = sorted([*runs, run], key=lambda r: (r["algorithm"], r["seed"]))
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": "rlhfsim.learning/1", "runs": runs}, indent=1) + "\n")
    (folder / "learning.md").write_text(report(runs))
    picture(runs, folder / "learning.svg")


def report(runs: Sequence[Mapping[str, Any]]) -> str:
    """The table, with what was run."""
    recipes = [
        f"* {name}: {_recipe(next(r['recipe'] for r in runs if r['algorithm'] == name))}"
        for name in RECIPES
        if any(r["algorithm"] == name for r in runs)
    ]
    rows = [
        f"| {r['algorithm']} | {r['seed']} | {r['start']:.3f} | {r['end']:.3f} "
        f"| {r['end'] - r['start']:+.3f} | {_last(r):.3f} | {r['seconds']:.0f} s | {r['warm_up_s']:.0f} s "
        f"| {r['warm_up_steps']} | {r['iteration_s']:.2f} s | {r['load']:.1f} |"
        for r in runs
    ]
    passed = sum(r["end"] - r["start"] >= WANTED_RISE and r["seconds"] <= LIMIT_S for r in runs)
    return TEXT.format(
        rows="\n".join(rows),
        recipes="\n".join(recipes),
        passed=passed,
        runs=len(runs),
        rise=WANTED_RISE,
        limit=LIMIT_S / 60,
        rise_steps=WARM_UP_OF_RATE,
        held_out=HELD_OUT,
        **asdict(TASKS[runs[0]["task"]]),
        round=ROUND,
        probes=PROBES,
        batch=WARM_UP_BATCH,
        rate=WARM_UP_RATE,
        cores=runs[0]["cores"],
    )


TEXT = Path(__file__).with_name("learning_report.md").read_text(encoding="utf-8")


def _recipe(recipe: Mapping[str, Any]) -> str:
    critic = f", {recipe['critic_learning_rate']:g} of the critic" if recipe["critic_learning_rate"] else ""
    return (
        f"{recipe['prompts']} prompts x {recipe['samples']} samples in "
        f"{recipe['mini_batches']} mini-batches, learning rate {recipe['learning_rate']:g}{critic}, "
        f"{recipe['iterations']} iterations"
    )


def _last(run: Mapping[str, Any]) -> float:
    last: float = statistics.mean(list(run["accuracy"].values())[-3:])
    return last


# --- picture ----------------------------------------------------------------------------------------

COLOURS = {
    "grpo": "#2166ac",
    "rloo": "#1b7837",
    "dapo": "#762a83",
    "gspo": "#8c510a",
    "cispo": "#4d4d4d",
    "ppo": "#b2500c",
}
TITLES = {"accuracy": "greedy accuracy, held-out problems", "reward": "mean reward, training samples"}


def picture(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """SVG: accuracy above, reward below, one column an algorithm; mean, range and each seed."""
    import matplotlib.pyplot as plt

    names = [name for name in RECIPES if any(r["algorithm"] == name for r in runs)]
    plt.rcParams["svg.hashsalt"] = "learning"  # equal runs, equal file
    figure, axes = plt.subplots(
        2,
        len(names),
        figsize=(4.6 * len(names), 6.4),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for column, name in enumerate(names):
        for row, (kind, title) in enumerate(TITLES.items()):
            curves = pd.DataFrame(
                {r["seed"]: _points(r, kind) for r in runs if r["algorithm"] == name}
            ).dropna()
            panel(axes[row][column], curves, COLOURS[name])
            axes[row][column].set(title=f"{name.upper()}: {title}", ylim=(0, 1))
        axes[1][column].set_xlabel("iteration")
    figure.suptitle(
        "Real runs on 2 CPU cores (line: mean of the seeds; band: smallest to largest; thin: each seed)",
        fontsize=9,
    )
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def panel(axes: Any, curves: pd.DataFrame, colour: str) -> None:
    """`curves`: a column a seed, a row an iteration."""
    axes.plot(curves, color=colour, linewidth=0.7, alpha=0.5)
    axes.fill_between(
        curves.index, curves.min(axis=1), curves.max(axis=1), color=colour, alpha=0.15, linewidth=0
    )
    axes.plot(curves.mean(axis=1), color=colour, linewidth=2.2)
    axes.grid(axis="y", color="#ddd")


def _points(run: Mapping[str, Any], kind: str) -> dict[int, float]:
    if kind == "accuracy":
        return {int(step): value for step, value in run["accuracy"].items()}
    return dict(enumerate(run["reward"], start=1))


if __name__ == "__main__":
    main()
