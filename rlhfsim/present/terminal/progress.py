"""Bars on standard error while many things are worked on, where somebody watches; gone when all are done."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlhfsim.present.terminal.console import console


def advancing() -> Progress:
    """A bar that moves by itself."""
    return Progress(console=console(stderr=True), transient=True)


def counting(name: str) -> Progress:
    """A bar with counts, the pace that its tasks say as `each`, and the time that is left.

    It has no thread of its own: processes are forked while it shows.
    """
    each, left = TextColumn("{task.fields[each]}"), TimeRemainingColumn(elapsed_when_finished=True)
    columns = TextColumn(name), BarColumn(), MofNCompleteColumn(), each, left
    return Progress(*columns, console=console(stderr=True), transient=True, auto_refresh=False)
