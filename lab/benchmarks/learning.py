"""Real runs that learn: held-out greedy accuracy before and after, several seeds of every algorithm.

    python lab/benchmarks/learning.py [--seeds 0 1 2] [--algorithms grpo ppo] [--out reports]

A random model of 0.6 M parameters is warmed up by a few supervised steps, then runs on the real stack (vLLM,
DeepSpeed, Ray) with the disaggregated architecture: one rollout slot, one training slot. Accuracy is that of
greedy responses to 200 problems whose keys are held out of warm-up and training. Writes learning.json,
learning.md and learning.svg (learning_report.py); other runs that learning.json already has stay in it.
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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
    algorithm: str | None = None
    """None: the name of the recipe."""


_GROUPS = Recipe(prompts=128, samples=4, mini_batches=4, learning_rate=5e-4)
RECIPES = {
    "grpo": _GROUPS,
    "grpo-64": replace(_GROUPS, iterations=64, algorithm="grpo"),
    "trl-grpo": replace(_GROUPS, iterations=64),
    **{name: replace(_GROUPS, iterations=64) for name in ("rloo", "dapo", "gspo", "cispo")},
    "ppo": Recipe(prompts=256, samples=1, mini_batches=4, learning_rate=5e-4, critic_learning_rate=1e-3),
}

OURS = [name for name in RECIPES if name != "trl-grpo"]


def main() -> None:
    """Run what was asked, then write the three files from all runs there are."""
    from learning_report import write

    parser = argparse.ArgumentParser(description="Learning curves of real runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", choices=OURS, default=["grpo", "ppo"])
    parser.add_argument("--task", choices=list(TASKS), default="comparison")
    parser.add_argument("--out", type=Path, default=ROOT / "reports")
    parser.add_argument("--warm", type=Path, help="folder that keeps the warm models for further runs")
    parser.add_argument("--quick", action="store_true", help="8 small iterations, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        shrink()
    cores = bind()
    for seed in options.seeds:
        for algorithm in options.algorithms:
            result = measure(options.task, algorithm, seed, options.warm) | {"cores": cores}
            print(
                f"{algorithm} seed {seed}: {result['start']:.3f} -> {result['end']:.3f} "
                f"in {result['seconds']:.0f} s",
                flush=True,
            )
            write(options.out, result)


def shrink() -> None:
    """Few small iterations after one round of warm-up: all of it runs, nothing is learnt."""
    TASKS.update({name: replace(task, warm_up_until=0.0) for name, task in TASKS.items()})
    RECIPES.update({name: replace(r, prompts=16, samples=4, iterations=8) for name, r in RECIPES.items()})


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


def measure(name: str, algorithm: str, seed: int, kept: Path | None) -> dict[str, Any]:
    """Warm-up and run of one seed."""
    from executor.launch import LaunchOptions, launch

    heard = Heard()
    with tempfile.TemporaryDirectory() as folder:
        model, warm = start_of(name, seed, kept or Path(folder))
        begin = time.perf_counter()
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
        "seconds": time.perf_counter() - begin + warm["warm_up_s"],
        **warm,
        "iteration_s": statistics.median(b - a for a, b in itertools.pairwise(heard.ends)),
        "load": os.getloadavg()[1],
        "accuracy": accuracy,
        "reward": [row["reward/mean"] for row in ended.rows],
    }


def problems_of(name: str, seed: int) -> Any:
    """The problems of a seed."""
    from executor.tasks.prompts import Generated

    return Generated(task=TASKS[name].generator, difficulty=TASKS[name].difficulty, seed=seed)  # type: ignore[arg-type]


def start_of(name: str, seed: int, folder: Path) -> tuple[Path, dict[str, float]]:
    """The warm model of a seed, made where it is not there yet, and what its warm-up took."""
    from executor.tasks import tiny

    model, begin = folder / f"{name}-{seed}", time.perf_counter()
    took = model / "warm_up.json"
    if not took.is_file():
        base = tiny.build(folder / f"{name}-{seed}-base", seed=seed)
        steps = warm_up(base, model, problems_of(name, seed), TASKS[name].warm_up_until)
        took.write_text(json.dumps({"warm_up_s": time.perf_counter() - begin, "warm_up_steps": steps}))
    return model, json.loads(took.read_text())


def warm_up(base: Path, model: Path, task: Any, until: float) -> int:
    """Supervised steps in rounds, until so many of some training problems are answered right; how many."""
    from lab import warm_up as sft

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
        algorithm=recipe.algorithm or algorithm,  # type: ignore[arg-type]
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


if __name__ == "__main__":
    main()
