"""What AIConfigurator predicts for rows of `inference.csv`: `throughput_peer.csv`, of `lab.fits.throughput_peer`."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from rlhfsim.validation.outcome import Outcome

OUTPUT = Path(__file__).parent / "throughput_peer.csv"
KEY = "peer_s"
"""As in `lab.scoreboard.board`: the prediction of another planner, here tokens per second."""


@cache
def peers() -> dict[tuple[str, int], float]:
    """File and line -> tokens per second."""
    with OUTPUT.open(newline="", encoding="ascii") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["file"], int(row["line"])): float(row["output_tok_s_total"])
        for row in rows
        if row["output_tok_s_total"]
    }


def beside(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes with the peer's prediction where it has one."""
    known = peers()
    return [
        replace(o, detail={**o.detail, KEY: known[o.file, o.line]}) if (o.file, o.line) in known else o
        for o in outcomes
    ]
