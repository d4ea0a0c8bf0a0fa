"""The only importer of Plotly: checked specifications of figures, and its script, packed."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from functools import cache
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs


def spec(data: list[dict[str, Any]], layout: dict[str, Any]) -> dict[str, Any]:
    """Data and layout, checked by Plotly's own schema; its default template is left out.

    Raises:
        ValueError: a property that Plotly does not have, which is our own bug.
    """
    found: dict[str, Any] = json.loads(go.Figure(data=data, layout=layout).to_json())
    found["layout"].pop("template", None)
    return found


def text(name: str) -> str:
    """A name inside a figure, where Plotly reads tags: they are shown, not obeyed."""
    return escape(name, quote=False)


@cache
def script() -> str:
    """Plotly's bundle, which runs offline."""
    return str(get_plotlyjs())


@cache
def packed_script() -> str:
    """The bundle, compressed: a third of its size, and the page inflates it by itself."""
    return base64.b64encode(gzip.compress(script().encode(), 9, mtime=0)).decode()


def digest(code: str) -> str:
    """What a content security policy calls a script that may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
