"""The only importer of Plotly: traces and figures, checked by its schema, and its script, packed."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from typing import Any

from rlhfsim.present.html import theme
from rlhfsim.present.tables import compact, rounded

Trace = dict[str, Any]


def spec(data: Iterable[Trace], layout: dict[str, Any]) -> dict[str, Any]:
    """Data and layout of a figure, for `checked`."""
    return {"data": coloured(list(data)), "layout": coloured(layout)}


def coloured(value: Any) -> Any:
    """Plain data with the page's variables in place of the names of colours, which `theme.SHADES` has."""
    if isinstance(value, Mapping):
        return {
            key: f"var(--{item})" if key.endswith("color") and item in theme.SHADES else coloured(item)
            for key, item in value.items()
        }
    return list(map(coloured, value)) if isinstance(value, list) else value


def checked(plot: Mapping[str, Any]) -> dict[str, Any]:
    """Data and layout, checked by Plotly's own schema; its default template is left out.

    Raises:
        ValueError: a property that Plotly does not have, which is our own bug.
    """
    import plotly.graph_objects as go  # an answer in a terminal draws nothing

    figure: dict[str, Any] = json.loads(go.Figure(plot).to_json())
    figure["layout"].pop("template", None)
    return figure


def text(name: str) -> str:
    """A name inside a figure, where Plotly reads tags: they are shown, not obeyed."""
    return escape(name, quote=False)


def bars(
    name: str,
    rows: Iterable[str],
    x: Iterable[float | None],
    look: tuple[str, str],
    unit: str = "s",
    **more: Any,
) -> Trace:
    """Horizontal bars in named rows; `look` is colour and pattern."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": text(name),
        "y": [text(row) for row in rows],
        "x": compact(x),
        "marker": theme.fill(look),
        "hovertemplate": f"%{{y}}: %{{x:.3s}} {unit}<extra>%{{fullData.name}}</extra>",
        **more,
    }


def points(name: str, x: Iterable[float | None], y: Iterable[float | None], **more: Any) -> Trace:
    """Markers, or a line where `mode` says so."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": text(name),
        "x": compact(x),
        "y": compact(y),
        **more,
    }


def whiskers(
    up: Iterable[float], down: Iterable[float], colour: str, width: int = 0, thickness: float = 1
) -> dict[str, Any]:
    """Error bars that may be longer on one side."""
    return {
        "type": "data",
        "symmetric": False,
        "array": compact(up),
        "arrayminus": compact(down),
        "width": width,
        "thickness": thickness,
        "color": colour,
    }


def rows(names: Sequence[str], x: str, *, each: int = 30, margin: int = 110, **more: Any) -> dict[str, Any]:
    """The layout of named rows, the first on top, each so many pixels high."""
    axis = {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": [text(name) for name in names],
        "autorange": "reversed",
        "showgrid": False,
        "title": {"text": ""},
    }
    return theme.layout(height=margin + each * max(len(names), 2), x=x, yaxis=axis, **more)


def logarithmic(values: Sequence[float], beyond: float, **more: Any) -> dict[str, Any]:
    """An axis that ends at a factor beyond the smallest and the largest value."""
    ends = [rounded(math.log10(min(values) / beyond)), rounded(math.log10(max(values) * beyond))]
    return {"type": "log", "range": ends, **more}


@cache
def script() -> str:
    """Plotly's bundle, which runs offline."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


@cache
def packed_script() -> str:
    """The bundle, compressed: a third of its size, and the page inflates it by itself."""
    return base64.b64encode(gzip.compress(script().encode(), 9, mtime=0)).decode()


def digest(code: str) -> str:
    """What a content security policy calls a script that may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
