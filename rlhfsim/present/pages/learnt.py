"""What a run learnt: its evaluations and some of its samples, as its folder has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhfsim.frameworks.rlhfsim.run_folder import MAX_METRICS, METRICS, SAMPLES
from rlhfsim.present.answers.tree import Block
from rlhfsim.present.tables import Cell, number, table
from rlhfsim.specs.loading import read_text

SHOWN = 4
"""Samples of a step."""
MOST_CHARACTERS = 300
"""Of a prompt or response on the page."""
PREFIX = "evaluation/"
Line = Mapping[str, Any]


def lines(path: Path) -> Iterator[Line]:
    """Objects of a JSONL file of a run; lines that are not whole are left out."""
    if not path.is_file():
        return
    for text in read_text(path, MAX_METRICS).splitlines():
        try:
            line = json.loads(text)
            int(line["step"])
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            continue
        yield line


def learnt(folder: Path | None) -> Iterator[Block]:
    """Evaluations by iteration, and samples of the first and the last that were logged."""
    if folder is None:
        return
    rows = [row for row in lines(folder / METRICS) if any(name.startswith(PREFIX) for name in row)]
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(PREFIX))
    if rows:
        columns = [(name.removeprefix(PREFIX), _value(name)) for name in names]
        yield table("Evaluations on problems held out", rows, ("iteration", _iteration), *columns)
    samples = list(lines(folder / SAMPLES))
    for part, title in (("training", "samples"), ("evaluation", "responses to problems held out")):
        logged = [line for line in samples if line.get("part") == part]
        steps = sorted({int(line["step"]) for line in logged})
        for step in dict.fromkeys((*steps[:1], *steps[-1:])):
            done = step + 1 if part == "training" else step
            yield _samples(f"Iteration {done:,}: {title}", [x for x in logged if x["step"] == step])


def _iteration(row: Line) -> str:
    return f"{int(row['step']) + 1:,}"


def _value(name: str) -> Any:
    def shown(row: Line) -> Cell:
        value = row.get(name)
        return number(value if isinstance(value, int | float) else None, ".4g", "-")

    return shown


def _samples(caption: str, chosen: list[Line]) -> Block:
    return table(
        caption,
        chosen[:SHOWN],
        ("prompt", lambda line: _short(line.get("prompt"))),
        ("response", lambda line: _short(line.get("response"))),
        ("reward", lambda line: number(_number(line.get("reward")), ".4g", "-")),
        ("rules", lambda line: ", ".join(f"{k} {v:.3g}" for k, v in dict(line.get("rewards") or {}).items())),
        ("tokens", lambda line: number(_number(line.get("response_tokens")), ",.0f", "-")),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _short(text: Any) -> str:
    shown = str(text or "")
    return shown if len(shown) <= MOST_CHARACTERS else shown[: MOST_CHARACTERS - 3] + "..."
