"""The scoreboard as Markdown: targets beside figures, then each kind with its sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab.scoreboard.reliability import FEWEST
from rlhfsim.outputs import markdown_text
from rlhfsim.present.answers.validate import (
    KIND_COLUMNS,
    kind_cells,
    percent,
    rate_text,
    target_cells,
    verdict_text,
)
from rlhfsim.present.tables import FINE_CHANGE
from rlhfsim.units import significant

REASONS = 8
"""Skip reasons shown per kind; the rest is summed."""
SOURCES = 12
"""Publications shown per kind, those with most rows first."""

_HEAD = """# Accuracy

Predictions against published measurements that nobody on this project made. This file and
`accuracy.json` are the output of `python -m lab.scoreboard --report reports/accuracy.md`; a test fails when
they are stale or a figure got worse. What the columns mean, which cells a row must have and how
blanks are filled: [docs/validation.md](../docs/validation.md).

The first table is the headline: every row is predicted by coefficients that were fitted without any row of
its publisher (repository, paper or thread), and its P10 to P90 comes from the errors of all other publishers.
The targets are meant there, except where they say otherwise. Fits are repeated without the publisher for
training, RL and weight sync. `memory.kv_tokens` leaves out the one publication that gave a coefficient.
Nothing is fitted on peaks and weights of memory or on `inference`, but priors and trainers' sources were
looked up with some rows in sight. Half of the one publication of `decode` was kept back.

Error is (predicted - measured) / measured; bias is its median, so above 0 the prediction is too
high. Coverage is the share of measurements inside the predicted P10 to P90 (80 % is right). Rows
that fitted a constant are counted as `fit` and never scored. Every row is a published best case, a
single run or an issue report: the measurements have errors of their own.
"""


def markdown(board: Mapping[str, Any]) -> str:
    """The committed report."""
    parts = [
        _HEAD,
        "## Leaving one publisher out\n",
        _left_out(board["kinds"]),
        "## Targets\n",
        _targets(board["targets"]),
        ELSEWHERE,
        "## Odds\n",
        _odds(board["odds"]),
        "## Groups\n",
        _groups(board["kinds"]),
        "## With all fits\n",
        _kinds(board["kinds"]),
    ]
    parts += [_kind(kind, figures) for kind, figures in board["kinds"].items()]
    return "\n".join(parts)


def left_out_cells(kind: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of the table of errors with no row of the publisher in any fit."""
    errors = tuple(percent(figures.get(k)) for k in ("median_abs_error", "mean_abs_error", "p90_abs_error"))
    counts = (str(figures["scored"]), str(figures.get("num_sources", "")))
    return (kind, *counts, *errors, FINE_CHANGE.shown(figures.get("bias")), percent(figures.get("coverage")))


LEFT_OUT_COLUMNS = ("kind", "rows", "publications", "median", "mean", "P90", "bias", "coverage")


def _left_out(kinds: Mapping[str, Any]) -> str:
    """The headline: every publisher predicted by fits that read none of its rows."""
    shown = {kind: figures.get("left_out", {}) for kind, figures in kinds.items()}
    timed = {k: f for k, f in shown.items() if f.get("scored") and "recall" not in f}
    lines = [left_out_cells(kind, figures) for kind, figures in timed.items()]
    parts = [table(LEFT_OUT_COLUMNS, lines)]
    for kind, figures in timed.items():
        if len(groups := figures["publishers"]) > 1:
            ranked = sorted(groups.items(), key=lambda item: (-item[1]["scored"], item[0]))[:SOURCES]
            parts += [
                table((f"{kind}, left out", *LEFT_OUT_COLUMNS[1:]), [left_out_cells(*g) for g in ranked])
            ]
    return "\n".join(parts)


def _targets(targets: Iterable[Mapping[str, Any]]) -> str:
    """Limits and what is reached; what is missed with its reason."""
    lines = [(*target_cells(t), t.get("reason", "")) for t in targets]
    return table(("kind", "figure", "target", "reached", "", "why it is missed"), lines)


ELSEWHERE = """Not of rows, but held by tests: of five published pairs of time to a reward three lie inside P10 to P90
(80 % wanted, MISSED; `tests/what_if/test_time_to_reward.py`): AReaL 7B is 3.4 % beyond its P90, and 80 % intervals
hold no more than three of five in a quarter of cases. Runs as they are typed: docs/validation.md.
"""
ODDS = """Stated probabilities against what happened, publishers left out. A step is held against deadlines of
0.7, 0.85, 1, 1.15, 1.3 and 1.6 times its prediction, which no measurement chose; those of one step come true
or fail together. `oom` is the probability of fitting. A Brier score of 0 is best; the last column is that of
always stating the share that happens.
"""
GROUPS = """Rows by what decides how well they are known, with no row of their publisher in any fit or
law (`lab/scoreboard/group_law.py`; the numbers of a user's plan: `rlhfsim/step/groups.csv`); groups of 8
rows or more. The form of the law (which groups, their order, how fast few rows shrink) was chosen with such
figures in view, of some thirty forms; its numbers were not. Bias is that of the prediction, then of P50.
"""


def _odds(odds: Mapping[str, Any]) -> str:
    """Brier scores, and the curve of every kind."""
    scores = [
        (kind, *_happened(f), significant(f["brier"]), significant(f["brier_of_share"]))
        for kind, f in odds.items()
    ]
    columns = ("odds of", "cases", "stated", "happened", "Brier score", "of the share")
    curve = [
        (kind, f"{percent(b['low'])} to {percent(b['high'])}", *_happened(b))
        for kind, f in odds.items()
        for b in f["bins"]
    ]
    return "\n".join((ODDS, table(columns, scores), table(("odds of", "between", *columns[1:4]), curve)))


def _happened(part: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(part["cases"]), percent(part["stated"]), percent(part["happened"])


def _groups(kinds: Mapping[str, Any]) -> str:
    """Coverage of the groups that are judged."""
    lines = [
        (
            *(kind, name, str(g["rows"]), str(g["publishers"])),
            *(percent(g["coverage"]), percent(g["above_median"])),
            *(FINE_CHANGE.shown(g["bias"]), FINE_CHANGE.shown(g["median_bias"])),
        )
        for kind, figures in kinds.items()
        for name, g in figures.get("left_out", {}).get("groups", {}).items()
        if g["rows"] >= FEWEST
    ]
    columns = ("kind", "group", "rows", "publishers", "coverage", "above P50", "bias", "bias of P50")
    return "\n".join((GROUPS, table(columns, lines)))


def _kinds(kinds: Mapping[str, Any]) -> str:
    return table(KIND_COLUMNS, [kind_cells(kind, figures) for kind, figures in kinds.items()])


def _kind(kind: str, figures: Mapping[str, Any]) -> str:
    parts = [f"## {kind}\n"]
    if not figures.get("rerun", True):
        parts.append("Not rerun here (its package is not installed): the committed figures.\n")
    parts.append(_verdicts(figures) if "recall" in figures else _errors(figures))
    if figures["skip_reasons"]:
        parts.append(table(("skipped because", "rows"), _reasons(figures["skip_reasons"])))
    return "\n".join(parts)


def _errors(figures: Mapping[str, Any]) -> str:
    columns = ("rows of", "rows", "predicted", "fit", "scored", "median", "mean", "P90", "bias", "coverage")
    lines = [
        _line(title, figures[key])
        for title, key in (
            ("without assumptions", "without_assumptions"),
            ("with assumptions", "with_assumptions"),
        )
        if figures[key]["rows"]
    ]
    ranked = sorted(figures["sources"].items(), key=lambda item: (-item[1]["scored"], item[0]))
    lines += [_line(name, found) for name, found in ranked[:SOURCES] if found["scored"]]
    parts = [_summary(figures), table(columns, lines)]
    if "order_counts" in figures:
        parts.append(_order(figures))
    if figures.get("worst"):
        parts.append(table(("worst rows", "where", "measured", "predicted", "error"), _worst(figures)))
    return "\n".join(parts)


def _transferred(figures: Mapping[str, Any]) -> str:
    """What calibration on one row changes for the others."""
    kinds = (
        ("calibrated on the other row", figures, figures["same_model"]),
        ("without calibration", figures["cold"], figures["same_model_cold"]),
        ("one factor on the whole step", figures["ratio"], None),
    )
    lines = [(name, *_pair(one), *(_pair(same) if same else ("", ""))) for name, one, same in kinds]
    columns = (
        "predicted",
        "median",
        "P90",
        f"one model ({figures['same_model']['scored']} pairs): median",
        "P90",
    )
    sources = [
        (name, str(found["scored"]), *_pair(found), *_pair(figures["cold_sources"][name]))
        for name, found in figures["sources"].items()
    ]
    each = ("second row of", "pairs", "median", "P90", "without calibration: median", "P90")
    return (
        "\nA row here is an ordered pair of steps of one framework and release: the first calibrates, the "
        "second is"
        f" predicted.\n\n{table(columns, lines)}\n{table(each, sources)}"
    )


def _pair(figures: Mapping[str, Any]) -> tuple[str, str]:
    """Median and P90 of absolute errors."""
    return percent(figures["median_abs_error"]), percent(figures["p90_abs_error"])


def _order(figures: Mapping[str, Any]) -> str:
    """Pairs in the right order, and the wrong ones."""
    text = (
        f"Order of two plans for one job (same model, workload and framework; measured times more than"
        f" 10 % apart): right in {rate_text(figures['order_counts'])} within a release of the framework,"
        f" in {rate_text(figures['order_counts_any_release'])} over all releases, which are predicted alike.\n"
    )
    wrong = figures["wrong_order_any_release"]
    if not wrong:
        return text
    columns = ("wrong order: faster", "slower", "measured", "predicted")
    return f"{text}\n{table(columns, [_wrong(a, b) for a, b in wrong])}"


def _wrong(fast: Mapping[str, Any], slow: Mapping[str, Any]) -> tuple[str, ...]:
    times = (
        f"{significant(fast[key])} and {significant(slow[key])} {fast['unit']}"
        for key in ("measured", "predicted")
    )
    return (fast["label"], slow["label"], *times)


def _summary(figures: Mapping[str, Any]) -> str:
    within = percent(figures["within_factor_2"])
    text = (
        f"{figures['scored']} rows of {figures['num_sources']} publications scored; median of the"
        f" sources' medians {percent(figures['median_of_source_medians'])}; within a factor 2: {within}.\n"
    )
    if "cold" in figures:
        text += _transferred(figures)
    other = figures.get("aiconfigurator")
    if other:
        text += (
            f"\naiconfigurator on the same {other['rows']:.0f} rows: median"
            f" {percent(other['median_abs_error'])}, mean {percent(other['mean_abs_error'])},"
            f" bias {FINE_CHANGE.shown(other['bias'])}.\n"
        )
    return text


def _line(name: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    return kind_cells(name, figures)


def _worst(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            row["label"],
            f"{row['file']}:{row['line']}",
            f"{significant(row['measured'])} {row['unit']}",
            f"{significant(row['predicted'])} {row['unit']}",
            FINE_CHANGE.shown(row["error"]),
        )
        for row in figures["worst"]
    ]


def _verdicts(figures: Mapping[str, Any]) -> str:
    text = f"{verdict_text(figures).capitalize()}.\n"
    columns = ("rows", "predicted", "fit", "scored", "recall", "false alarms")
    return "\n".join(
        (
            text,
            table(("half", *columns), _verdict_lines(figures["halves"])),
            table(("framework", *columns), _verdict_lines(figures["frameworks"])),
        )
    )


def _verdict_lines(groups: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            *(str(found[key]) for key in ("rows", "predicted", "fit", "scored")),
            _counts(found["recall_counts"]),
            _counts(found["false_alarm_counts"]),
        )
        for name, found in groups.items()
    ]


def _counts(rate: Mapping[str, Any]) -> str:
    return f"{rate['hits']} of {rate['of']}" if rate["of"] else "-"


def _reasons(reasons: Mapping[str, int]) -> list[tuple[str, str]]:
    listed = [(reason, str(count)) for reason, count in reasons.items()]
    rest = sum(int(count) for _, count in listed[REASONS:])
    return listed[:REASONS] + ([("other reasons", str(rest))] if rest else [])


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [columns, ["---"] * len(columns), *lines]
    return "".join("| " + " | ".join(markdown_text(cell) for cell in row) + " |\n" for row in rows)
