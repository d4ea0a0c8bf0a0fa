"""What a run learnt: its evaluations and some of its samples, as its folder has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhfsim.present.answers.tree import Block, Column, table_of
from rlhfsim.present.tables import AMOUNTS, COUNT, FIGURE
from rlhfsim.run_folder import MAX_METRICS, METRICS, SAMPLES
from rlhfsim.specs.loading import read_text

SHOWN = 4
"""Samples of a step."""
MOST_CHARACTERS = 300
"""Most characters of a prompt or response on the page."""
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
        columns = [
            Column(name.removeprefix(PREFIX), lambda row, name=name: _number(row.get(name)), FIGURE)
            for name in names
        ]
        held_out = "Evaluations on problems held out"
        yield table_of(held_out, rows, Column("iteration", lambda row: int(row["step"]) + 1, COUNT), *columns)
    samples = list(lines(folder / SAMPLES))
    for part, title in (("training", "samples"), ("evaluation", "responses to problems held out")):
        logged = [line for line in samples if line.get("part") == part]
        steps = sorted({int(line["step"]) for line in logged})
        for step in dict.fromkeys((*steps[:1], *steps[-1:])):
            done = step + 1 if part == "training" else step
            yield _samples(f"Iteration {done:,}: {title}", [x for x in logged if x["step"] == step])


def _samples(caption: str, chosen: list[Line]) -> Block:
    return table_of(
        caption,
        chosen[:SHOWN],
        Column("prompt", lambda line: _short(line.get("prompt"))),
        Column("response", lambda line: _short(line.get("response"))),
        Column("reward", lambda line: _number(line.get("reward")), FIGURE),
        Column("rules", lambda line: dict(line.get("rewards") or {}), AMOUNTS),
        Column("tokens", lambda line: _number(line.get("response_tokens")), COUNT),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _short(text: Any) -> str:
    shown = str(text or "")
    return shown if len(shown) <= MOST_CHARACTERS else shown[: MOST_CHARACTERS - 3] + "..."
