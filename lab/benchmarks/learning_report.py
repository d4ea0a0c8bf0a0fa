"""learning.json, learning.md and learning.svg of the runs of learning.py, trl_learning.py and lab/game.py.

python lab/benchmarks/learning_report.py [--out reports]      both texts again, from learning.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from learning import (
    HELD_OUT,
    LIMIT_S,
    OURS,
    PROBES,
    RECIPES,
    ROOT,
    ROUND,
    TASKS,
    WANTED_RISE,
    WARM_UP_BATCH,
    WARM_UP_OF_RATE,
    WARM_UP_RATE,
)
from scipy import stats

CONFIDENCE = 0.95
GAME, SEEDS = "guess", (0, 1, 2)
ENOUGH, EQUAL = 10, 0.02
"""Seeds of a comparison with the power that is wanted; the difference that its interval should lie within."""
PEER, MINE = "trl-grpo", "grpo-64"
TEXT = Path(__file__).with_name("learning_report.md").read_text(encoding="utf-8")
Run = Mapping[str, Any]


def main() -> None:
    """Text and picture of the runs that are there."""
    parser = argparse.ArgumentParser(description="The report of learning.json")
    parser.add_argument("--out", type=Path, default=ROOT / "reports")
    options = parser.parse_args()
    runs = json.loads((options.out / "learning.json").read_text())["runs"]
    render(options.out, runs)
    print(f"{options.out / 'learning.md'}: {len(runs)} runs. {_last_three(runs)}")


def write(folder: Path, run: Run) -> None:
    """Add the run to learning.json, and make the other two files of it."""
    path = folder / "learning.json"
    known = json.loads(path.read_text())["runs"] if path.is_file() else []
    runs = [r for r in known if _key(r) != _key(run)]
    runs = sorted([*runs, run], key=_key)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": "rlhfsim.learning/1", "runs": runs}, indent=1) + "\n")
    render(folder, runs)


def render(folder: Path, runs: Sequence[Run]) -> None:
    """learning.md and learning.svg."""
    (folder / "learning.md").write_text(report(runs))
    picture(runs, folder / "learning.svg")


def _key(run: Run) -> tuple[str, str, int]:
    return run["task"], run["algorithm"], run["seed"]


# --- text -------------------------------------------------------------------------------------------


def report(runs: Sequence[Run]) -> str:
    """The tables, with what was run."""
    on_task = [r for r in runs if r["task"] != GAME]
    first = (on_task or runs)[0]
    ours = [r for r in on_task if r["algorithm"] in OURS]
    recipes = [f"* {name}: {_recipe(asdict(RECIPES[name]))}" for name in OURS if _of(ours, name)]
    passed = sum(r["end"] - r["start"] >= WANTED_RISE and r["seconds"] <= LIMIT_S for r in ours)
    return TEXT.format(
        summary="\n".join(_summary(runs)),
        rows="\n".join(_row(r) for r in [*on_task, *(r for r in runs if r["task"] == GAME)]),
        recipes="\n".join(recipes),
        band="\n".join(_band(on_task)),
        last_three=_last_three(on_task),
        missing=f"{_missing(runs)} {_unsure(runs)}",
        passed=passed,
        runs=len(ours),
        rise=WANTED_RISE,
        limit=LIMIT_S / 60,
        rise_steps=WARM_UP_OF_RATE,
        held_out=HELD_OUT,
        **asdict(TASKS[first["task"]]),
        round=ROUND,
        probes=PROBES,
        batch=WARM_UP_BATCH,
        rate=WARM_UP_RATE,
        cores=first["cores"],
    )


def _of(runs: Sequence[Run], algorithm: str) -> list[Run]:
    return [r for r in runs if r["algorithm"] == algorithm]


def _row(run: Run) -> str:
    name = f"{run['algorithm']}, game" if run["task"] == GAME else run["algorithm"]
    return (
        f"| {name} | {run['seed']} | {run['start']:.3f} | {run['end']:.3f} "
        f"| {run['end'] - run['start']:+.3f} | {_last(run):.3f} | {run['seconds']:.0f} s | {run['warm_up_s']:.0f} s "
        f"| {run['warm_up_steps']} | {run['iteration_s']:.2f} s | {run['load']:.1f} |"
    )


def _summary(runs: Sequence[Run]) -> Iterable[str]:
    """Mean rise and its interval (Student's t) of every algorithm."""
    on_task = [r for r in runs if r["task"] != GAME]
    game = [r for r in runs if r["task"] == GAME]
    for name, mine in [*((n, _of(on_task, n)) for n in RECIPES), ("grpo, game", game)]:
        if mine:
            rises = [r["end"] - r["start"] for r in mine]
            iterations = max(map(int, mine[0]["accuracy"]))
            each = ", ".join(f"{rise:+.3f}" for rise in rises)
            yield f"| {name} | {iterations} | {statistics.mean(rises):+.3f} | {_interval(rises)} | {each} |"


def _unsure(runs: Sequence[Run]) -> str:
    """The algorithms of which the runs do not show that they learn."""
    named = {(r["task"] == GAME, r["algorithm"]): "" for r in runs}
    unsure = [
        f"{algorithm}{', game' if game else ''}"
        for game, algorithm in named
        if not _shown([r for r in runs if (r["task"] == GAME, r["algorithm"]) == (game, algorithm)])
    ]
    return (
        f"The interval of {', '.join(unsure)} includes 0: its seeds do not show a rise."
        if unsure
        else "Every interval excludes 0."
    )


def _shown(runs: Sequence[Run]) -> bool:
    rises = [r["end"] - r["start"] for r in runs]
    return len(rises) > 1 and _ends(rises)[0] > 0


def _missing(runs: Sequence[Run]) -> str:
    """Seeds without a run, of whatever has one."""
    known = {(r["task"], r["algorithm"]) for r in runs}
    absent = sorted(
        f"{algorithm}{', game' if task == GAME else ''} seed {seed}"
        for task, algorithm in known
        for seed in SEEDS
        if (task, algorithm, seed) not in {_key(r) for r in runs}
    )
    return f"Not run to the end: {'; '.join(absent)}." if absent else "No seed is missing."


def _interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "one seed"
    if max(values) == min(values):
        return "-"
    low, high = _ends(values)
    return f"{low:+.3f} to {high:+.3f}"


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Ends of the interval of a mean."""
    low, high = stats.t.interval(
        CONFIDENCE, len(values) - 1, loc=statistics.mean(values), scale=stats.sem(values)
    )
    return float(low), float(high)


def _band(runs: Sequence[Run]) -> Iterable[str]:
    """By iteration: TRL's smallest, mean and largest, our mean, and the difference of equal seeds."""
    ours, theirs = _curves(runs, MINE), _curves(runs, PEER)
    equal = [seed for seed in ours.columns if seed in theirs.columns]
    ours, theirs = ours[equal], theirs[equal]
    for step, row in theirs.loc[theirs.index.intersection(ours.index)].iterrows():
        mine, difference = ours.loc[step], (ours.loc[step] - row).dropna()
        inside = "yes" if row.min() <= mine.mean() <= row.max() else "no"
        each = ", ".join(f"{v:.3f}" for v in mine.dropna())
        yield (
            f"| {step} | {row.min():.3f} to {row.max():.3f} | {row.mean():.3f} | {mine.mean():.3f} | {each} | {inside} "
            f"| {difference.mean():+.3f} | {_interval(list(difference))} |"
        )


def _last_three(runs: Sequence[Run]) -> str:
    """Our accuracy less TRL's, the mean of the last three evaluations of each seed, and what ten seeds would tell."""
    values = list((_curves(runs, MINE) - _curves(runs, PEER)).dropna(axis=1).tail(3).mean())
    if len(values) < 2:
        return f"Ours against TRL's has {len(values)} equal seeds: no interval."
    each = ", ".join(f"{value:+.3f}" for value in values)
    within = max(map(abs, _ends(values))) <= EQUAL
    ten = stats.t.ppf((1 + CONFIDENCE) / 2, ENOUGH - 1) * statistics.stdev(values) / ENOUGH**0.5
    return (
        f"Over the last three evaluations ours less TRL's is {statistics.mean(values):+.3f}, 95% interval "
        f"{_interval(values)} of {len(values)} seeds ({each}): {'within' if within else 'not within'} {EQUAL} to "
        f"either side."
        + (f" By this spread {ENOUGH} seeds would have {ten:.3f}." if len(values) < ENOUGH else "")
    )


def _curves(runs: Sequence[Run], algorithm: str) -> pd.DataFrame:
    """Accuracy, a column a seed, a row an iteration."""
    return pd.DataFrame({r["seed"]: _points(r, "accuracy") for r in _of(runs, algorithm)})


def _recipe(recipe: Mapping[str, Any]) -> str:
    critic = f", {recipe['critic_learning_rate']:g} of the critic" if recipe["critic_learning_rate"] else ""
    return (
        f"{recipe['prompts']} prompts x {recipe['samples']} samples in "
        f"{recipe['mini_batches']} mini-batches, learning rate {recipe['learning_rate']:g}{critic}, "
        f"{recipe['iterations']} iterations"
    )


def _last(run: Run) -> float:
    last: float = statistics.mean(list(run["accuracy"].values())[-3:])
    return last


# --- picture ----------------------------------------------------------------------------------------

COLOURS = {
    "grpo": "#2166ac",
    "grpo-64": "#2166ac",
    "rloo": "#1b7837",
    "dapo": "#762a83",
    "gspo": "#8c510a",
    "cispo": "#4d4d4d",
    "ppo": "#b2500c",
    "game": "#4d4d4d",
    PEER: "#000000",
}
TITLES = {"accuracy": "greedy accuracy, held out", "reward": "mean reward, training"}


def picture(runs: Sequence[Run], path: Path) -> None:
    """SVG: accuracy above, reward below, one column an algorithm; mean, range and each seed."""
    import matplotlib.pyplot as plt

    on_task, game = [r for r in runs if r["task"] != GAME], [r for r in runs if r["task"] == GAME]
    columns = {name: _of(on_task, name) for name in OURS} | {"game": game}
    columns = {name: mine for name, mine in columns.items() if mine} or {PEER: _of(on_task, PEER)}
    plt.rcParams["svg.hashsalt"] = "learning"  # equal runs, equal file
    size = (3.2 * len(columns), 6.0)
    figure, axes = plt.subplots(
        2, len(columns), figsize=size, sharex="col", sharey=True, squeeze=False, layout="constrained"
    )
    for column, (name, mine) in enumerate(columns.items()):
        for row, (kind, title) in enumerate(TITLES.items()):
            axis = axes[row][column]
            if name == MINE and _of(on_task, PEER):
                panel(axis, _of(on_task, PEER), kind, COLOURS[PEER], "TRL")
            panel(axis, mine, kind, COLOURS[name], "ours")
            axis.set(title=f"{name.upper()}: {title}", ylim=(0, 1))
            axis.title.set_fontsize(9)
        axes[1][column].set_xlabel("iteration")
        if name == MINE:
            axes[0][column].legend(loc="lower right", fontsize=8)
    figure.suptitle(
        "Real runs on 2 CPU cores (line: mean of the seeds; band: smallest to largest; thin: each seed)",
        fontsize=9,
    )
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def panel(axis: Any, runs: Sequence[Run], kind: str, colour: str, label: str) -> None:
    """Every seed, their range and their mean."""
    curves = pd.DataFrame({r["seed"]: _points(r, kind) for r in runs}).dropna()
    axis.plot(curves, color=colour, linewidth=0.7, alpha=0.5)
    axis.fill_between(
        curves.index, curves.min(axis=1), curves.max(axis=1), color=colour, alpha=0.15, linewidth=0
    )
    axis.plot(curves.mean(axis=1), color=colour, linewidth=2.2, label=label)
    axis.grid(axis="y", color="#ddd")


def _points(run: Run, kind: str) -> dict[int, float]:
    if kind == "accuracy":
        return {int(step): value for step, value in run["accuracy"].items()}
    return dict(enumerate(run["reward"], start=1))


if __name__ == "__main__":
    main()
