"""Console text of a training job as clean lines: without colours, progress bars and Ray's prefixes."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
_PREFIX = re.compile(r"^\s*\((?:[^()\s]+\s+)?(?:[\w.:-]+\s+)*pid=\d+(?:,\s*ip=[\w.:]+)?\)\s?")
"""`(TaskRunner pid=4242, ip=10.0.0.1) ` and `(main_task pid=17) `."""
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")


def lines(text: str) -> Iterator[str]:
    """Lines of a log as the job printed them; a carriage return begins a new one."""
    for line in re.split(r"[\r\n]+", _ANSI.sub("", text)):
        clean = _REPEATED.sub("", _PREFIX.sub("", line)).rstrip()
        if clean:
            yield clean


def cut_off(text: str) -> bool:
    """Whether the last line has no end: the job or the copy was stopped within it."""
    return bool(text) and not text.endswith(("\n", "\r"))
