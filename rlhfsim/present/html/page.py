"""From the content of a page to one HTML file: offline, escaped, with a policy that forbids the network.

Plotly's bundle is in the file once, gzipped and in base64 (2.0 MB in place of 4.8 MB); the page
inflates it with DecompressionStream (Chrome 80, Safari 16.4, Firefox 113). Elsewhere the tables remain.
Only scripts whose hash the policy names may run. The same content gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rlhfsim.outputs import write_atomically
from rlhfsim.present.answers.tree import Page
from rlhfsim.present.answers.written import tile_texts, written
from rlhfsim.present.html import plots, theme
from rlhfsim.present.words import tied

MARKS = {"good": "✓", "warn": "!", "bad": "✗", "plain": ""}
ZOOMS = (
    ("in", "Zoom in"),
    ("out", "Zoom out"),
    ("left", "Earlier"),
    ("right", "Later"),
    ("all", "Whole step"),
)
SIGNS = {"+": "sign-add", "-": "sign-del", "~": "sign-chg", "!": "sign-chg"}
PALETTES = {"light": theme.LIGHT, "dark": theme.DARK}
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def write(path: Path, page: Page) -> None:
    """Write the page in one step.

    Raises:
        RlhfsimError: the file cannot be written.
    """
    write_atomically(path, html(page))


def html(page: Page) -> str:
    """The whole file."""
    script = _file("page.js")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["tied"] = tied
    environment.globals.update(
        written=written,
        tile_texts=tile_texts,
        checked=plots.checked,
        json=embedded,
        zooms=ZOOMS,
        signs=SIGNS,
        marks=MARKS,
    )
    return (
        environment.from_string(_file("template.html"))
        .render(
            page=page,
            style=Markup(style()),
            script=Markup(script),
            plotly=plots.packed_script(),
            palettes=PALETTES,
            policy=_policy(script),
        )
        .lstrip()
        + "\n"
    )


def embedded(data: Mapping[str, Any]) -> Markup:
    """JSON inside a script element: nothing in it can end the element or begin another one."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    for char, code in _UNSAFE.items():
        text = text.replace(char, code)
    return Markup(text)


def _policy(script: str) -> str:
    """No network, no frames, no forms, no script but the two of this page."""
    allowed = f"'{plots.digest(script)}' '{plots.digest(plots.script())}'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def style() -> str:
    """The style sheet with the colours of the theme."""

    def variables(shade: str) -> str:
        return " ".join(f"--{name}: {value};" for name, value in PALETTES[shade].items())

    template = Environment(autoescape=False, undefined=StrictUndefined).from_string(
        _file("style.css")
    )  # CSS of our own
    return template.render(variables=variables, roles=theme.ROLES)


def _file(name: str) -> str:
    return (resources.files("rlhfsim.present.html") / name).read_text(encoding="utf-8")
