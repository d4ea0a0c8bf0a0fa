"""The answers as a page: one table of checks, one of expected against seen."""

from __future__ import annotations

from typing import Any

from lab.first_contact.checks import Answer

TOLERANCE = 0.1
"""Tolerance of seen / expected, where a row does not say."""


def verdict(row: dict[str, Any]) -> str:
    """agrees, low or high against what was expected; seen where nothing was."""
    if row.get("expected") is None or row.get("seen") is None:
        return "seen"
    ratio, allowed = row["seen"] / row["expected"], row.get("tolerance", TOLERANCE)
    if abs(ratio - 1) <= allowed:
        return "agrees"
    return "high" if ratio > 1 else "low"


def page(answers: list[Answer]) -> str:
    """Markdown."""
    lines = ["# First contact", "", "| check | outcome | seconds | reason |", "| --- | --- | --- | --- |"]
    lines += [f"| {a.title} | {a.outcome} | {a.seconds:.0f} | {_cell(a.reason)} |" for a in answers]
    lines += [
        "",
        "| check | what | expected | seen | ratio | verdict |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_line(answer.name, row) for answer in answers for row in answer.rows]
    return "\n".join(lines) + "\n"


def _line(name: str, row: dict[str, Any]) -> str:
    expected, seen, unit = row.get("expected"), row.get("seen"), row.get("unit", "")
    ratio = f"{seen / expected:.3f}" if expected and isinstance(seen, int | float) else ""
    parts = (name, row["what"], _number(expected, unit), _number(seen, unit), ratio, verdict(row))
    return f"| {' | '.join(map(_cell, parts))} |"


def _number(value: Any, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.4g} {unit}".strip() if isinstance(value, float) else f"{value} {unit}".strip()


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
