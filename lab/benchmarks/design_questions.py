"""CPU seconds and memory of `rlhfsim design` on 60 questions, next to an earlier revision.

    python lab/benchmarks/design_questions.py [--before REV] [--table] [--only WORDS] [--time-limit TIME]
    python lab/benchmarks/design_questions.py --stale    120 others, in which rollouts need not drain
    python lab/benchmarks/design_questions.py --json rows.json && \
        python lab/benchmarks/design_questions.py --from rows.json --figure docs/img/search_growth.svg

One row a question: CPU seconds of the process and its workers, most memory, and the answer with its gap; with
`--before` also those of the revision, which is read into a temporary folder, and the ratio. Both run under
the same interpreter. CPU seconds hardly depend on what else the machine does, wall seconds do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from process import MB, bind, measured, pace

ROOT = Path(__file__).resolve().parents[2]
LARGE = ("70b", "405b", "671b", "qwen3-235b", "kimi-k2")
ALGORITHMS = ("ppo", "grpo")
GPUS = (256, 1024, 4096, 16384)
MOST_S, MOST_STALE_S, MOST_MB = 12.0, 25.0, 400.0
"""CPU seconds and memory that a question may take; where samples may be stale, too."""
SLOWER = 1.2
"""Ratio above which a question counts as slower."""
SMALL = (
    "--gpus 8 --model qwen3-8b",
    "--gpus 8 --model 7b --algorithm grpo --prompts 128 --samples 8",
    "--gpus 16 --model 8b",
    "--gpus 16 --model 32b --algorithm grpo --allow lora",
    "--gpus 32 --model 32b --algorithm grpo --framework verl",
    "--gpus 32 --model qwen3-30b-a3b --algorithm grpo",
    "--gpus 64 --model 70b",
    "--gpus 64 --model 70b --objective memory",
    "--gpus 64 --model 70b --framework any",
    "--gpus 64 --model 32b --algorithm grpo --allow async",
    "--gpus 128 --model 671b --backend megatron --algorithm grpo",
    "--gpus 128 --model 70b --response-len lognormal:mean=1500,sigma=0.8,max=8192",
    "--gpus 256 --gpu h200 --model kimi-k2 --algorithm grpo --framework slime",
    "--gpus 512 --model 405b",
    "--gpus 1024 --model 405b --algorithm dpo",
    "--gpus 1024 --model 671b --framework any",
    "--gpus 4096 --model 405b --framework any",
    "--gpus 16384 --model 671b --framework any",
    "--gpus 16384 --model kimi-k2 --algorithm grpo --framework any",
    "--gpus 4096 --model qwen3-235b --algorithm grpo --framework any",
)
TABLE = (
    "--gpus 1024 --model 671b --backend megatron",
    "--gpus 1024 --model 405b",
    "--gpus 128 --model 671b --backend megatron --algorithm grpo",
    "--gpus 256 --model 671b",
    "--gpus 8 --model 70b --backend fsdp2",
    "--gpus 1024 --model 70b --algorithm grpo",
    "--gpus 4096 --model 405b --backend megatron",
    "--gpus 64 --model 70b",
    "--gpus 1024 --model qwen3-235b",
    "--gpus 1024 --model kimi-k2 --algorithm grpo",
    "--gpus 16384 --model 671b --backend megatron",
    "--gpus 8 --model qwen3-8b",
    "--gpus 1024 --model 671b --framework any",
)
"""Those of the table in docs/search.md."""


def questions() -> list[str]:
    """Sixty: all large models, algorithms and sizes, by turns with Megatron-Core and as it comes, and others."""
    return [*SMALL, *(of + " --backend megatron" * (i % 2) for i, of in enumerate(_large()))]


def stale() -> list[str]:
    """All large models, algorithms, sizes and ways to train them, where samples may be stale."""
    ways = ("", " --backend megatron", " --framework any")
    return [of + way + " --allow async,rollout-logprobs" for of, way in product(_large(), ways)]


def _large() -> list[str]:
    each = product(LARGE, GPUS, ALGORITHMS)
    return [f"--gpus {gpus} --model {model} --algorithm {algorithm}" for model, gpus, algorithm in each]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one revision took for one question."""

    cpu_s: float
    memory_mb: float
    answer: str
    """Seconds of the best step and the gap; or how it ended."""
    plans: int = 0
    """Plans of the space, as the certificate counts them; 0: none was written."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="CPU seconds and memory of designs")
    parser.add_argument("--before", help="a revision to compare with")
    parser.add_argument("--table", action="store_true", help="the questions of the table in docs/search.md")
    parser.add_argument("--stale", action="store_true", help="the questions where samples may be stale")
    parser.add_argument("--only", default="", help="questions with these words")
    parser.add_argument("--time-limit", help="of each search; without it each ends after its share of work")
    parser.add_argument("--before-limit", default="60s", help="of each search of the earlier revision")
    parser.add_argument("--json", type=Path, help="where the rows are written too")
    parser.add_argument(
        "--from", type=Path, dest="known", help="rows of an earlier run, in place of a new one"
    )
    parser.add_argument("--figure", type=Path, help="an SVG of how CPU seconds and memory grow")
    asked = parser.parse_args()
    rows = _known(asked.known) if asked.known else _asked(asked)
    _summary(rows)
    if asked.figure:
        draw({question: now for question, (now, _) in rows.items()}, asked.figure)


def _known(path: Path) -> dict[str, tuple[Row, Row | None]]:
    told = {q: [Row(**row) for row in pair] for q, pair in json.loads(path.read_text()).items()}
    return {q: (pair[0], pair[1] if len(pair) > 1 else None) for q, pair in told.items()}


def _asked(asked: argparse.Namespace) -> dict[str, tuple[Row, Row | None]]:
    print(f"{bind()} cores; {pace()}; load {os.getloadavg()[0]:.1f} before it")
    print(f"{'CPU s':>7}{'MB':>6}  {'before':>7}{'MB':>6}{'ratio':>7}  {'answer':<24}question")
    rows: dict[str, tuple[Row, Row | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        before = _checkout(asked.before, Path(folder)) if asked.before else None
        for question in TABLE if asked.table else stale() if asked.stale else questions():
            if asked.only in question:
                limit = f" --time-limit {asked.time_limit}" if asked.time_limit else ""
                now = _row(ROOT, question + limit, folder)
                limited = f"{question} --time-limit {asked.before_limit}"
                rows[question] = now, _row(before, limited, folder) if before else None
                _print(question, *rows[question])
    if asked.json:
        told = {q: [asdict(row) for row in pair if row] for q, pair in rows.items()}
        asked.json.write_text(json.dumps(told, indent=1) + "\n")
    return rows


def _checkout(revision: str, folder: Path) -> Path:
    """The files of a revision."""
    there = folder / "before"
    there.mkdir()
    archive = subprocess.run(["git", "-C", ROOT, "archive", revision], check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", there], check=True, input=archive.stdout)
    return there


def _row(tree: Path, question: str, folder: str) -> Row:
    out = Path(folder) / "plan.json"
    out.unlink(missing_ok=True)
    command = ["-m", "rlhfsim.cli.main", "design", *question.split(), "--out", str(out)]
    spent, code = measured(command, tree)
    plan = json.loads(out.read_text()) if out.exists() else None
    choice = (plan or {}).get("choice") or plan or {}
    return Row(
        cpu_s=spent.cpu_s,
        memory_mb=spent.memory_bytes / MB,
        answer=_answer(code, plan),
        plans=choice.get("certificate", {}).get("space", 0),
    )


def _answer(code: int, plan: dict[str, Any] | None) -> str:
    if plan is None:
        return "nothing fits" if code == 1 else f"exit code {code}"
    choice = plan.get("choice") or plan
    best = choice.get("best") or plan["prediction"]
    gap = choice["certificate"]["gap"]
    return f"{best['step_s']:.6g} s" + (f", gap {gap:.1%}" if gap else ", proven")


def _print(question: str, now: Row, before: Row | None) -> None:
    then = f"{before.cpu_s:>7.1f}{before.memory_mb:>6.0f}" if before else f"{'':>13}"
    ratio = f"{now.cpu_s / before.cpu_s:>7.2f}" if before else f"{'':>7}"
    print(f"{now.cpu_s:>7.1f}{now.memory_mb:>6.0f}  {then}{ratio}  {now.answer:<24}{question}", flush=True)
    if before and before.answer != now.answer:
        print(f"{'':>35}was: {before.answer}", flush=True)


def draw(rows: dict[str, Row], path: Path) -> None:
    """CPU seconds and memory against GPUs and plans of the space, on logarithmic axes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "rlhfsim", "svg.fonttype": "none", "font.size": 9})
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    models = ("other", *LARGE)
    across = (("GPUs", lambda q, row: _gpus(q)), ("complete plans in the space", lambda q, row: row.plans))
    heights = (("CPU seconds", "cpu_s", MOST_S), ("MB", "memory_mb", MOST_MB))
    for (below, x), (beside, y, most) in product(across, heights):
        axis = axes[heights.index((beside, y, most))][across.index((below, x))]
        for i, (model, algorithm) in enumerate(product(models, ("PPO", "other algorithms"))):
            mine = {q: row for q, row in rows.items() if _kind(q) == (model, algorithm) and x(q, row)}
            points = [x(q, row) for q, row in mine.items()], [getattr(row, y) for row in mine.values()]
            label = f"{model}, {algorithm}" if mine else None
            axis.plot(*points, "o^"[i % 2], color=f"C{i // 2}", markersize=5, label=label)
        axis.axhline(most, color="0.6", linestyle=":")
        axis.set(xscale="log", yscale="log", xlabel=below, ylabel=beside)
        axis.label_outer()
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    print(f"{len(rows)} questions in {path}; dotted: {MOST_S:g} CPU s, {MOST_MB:g} MB")


def _gpus(question: str) -> int:
    return int(question.split("--gpus ")[1].split()[0])


def _kind(question: str) -> tuple[str, str]:
    """The model of a question where it is a large one, and whether a critic trains too."""
    model = question.split("--model ")[1].split()[0]
    grouped = "--algorithm" in question and "--algorithm ppo" not in question
    return model if model in LARGE else "other", "other algorithms" if grouped else "PPO"


def _summary(rows: dict[str, tuple[Row, Row | None]]) -> None:
    most = {q: MOST_STALE_S if "async," in q else MOST_S for q in rows}
    missed = [q for q, (now, _) in rows.items() if now.cpu_s > most[q] or now.memory_mb > MOST_MB]
    told = f"{MOST_S:g} CPU s ({MOST_STALE_S:g} with async) or {MOST_MB:g} MB"
    print(f"above {told}: {len(missed)} of {len(rows)}", *missed, sep="\n  ")
    slower = [q for q, (now, then) in rows.items() if then and now.cpu_s > SLOWER * then.cpu_s]
    print(f"above {SLOWER} times the time before: {len(slower)}", *slower, sep="\n  ")


if __name__ == "__main__":
    main()
