"""Colours and patterns of every page: Okabe and Ito's palette in two shades, and never colour alone.

Palette: M. Okabe, K. Ito, "Color Universal Design", jfly.uni-koeln.de/color (2008). Figures name colours,
of which `plots.spec` makes variables (`var(--blue)`); the page resolves them for light, dark and print.
"""

from __future__ import annotations

from typing import Any

from rlhfsim.specs.workload.roles import BY_NAME, PLACED

SHADES = {
    "bg": ("#ffffff", "#0f1318"),
    "panel": ("#f6f7f9", "#181d24"),
    "text": ("#1b1f24", "#e8ecf1"),
    "muted": ("#57606a", "#a3adb8"),
    "line": ("#d0d7de", "#333c47"),
    "grid": ("#e6e9ed", "#262d36"),
    "good": ("#00714f", "#4fd1a5"),
    "warn": ("#8a5a00", "#f0b429"),
    "bad": ("#b3261e", "#ff8a80"),
    "link": ("#005fa8", "#7cc4f5"),
    "blue": ("#0072b2", "#3d9bd9"),
    "orange": ("#e69f00", "#f0b23c"),
    "green": ("#009e73", "#2bb98f"),
    "red": ("#d55e00", "#ef7d35"),
    "purple": ("#cc79a7", "#dd94bb"),
    "sky": ("#56b4e9", "#8accf2"),
    "yellow": ("#c9b800", "#f0e442"),
    "grey": ("#8c959f", "#7d8793"),
    "ink": ("#1b1f24", "#e8ecf1"),
}
"""Name -> colour on a light and on a dark ground."""
LIGHT = {name: light for name, (light, _) in SHADES.items()}
DARK = {name: dark for name, (_, dark) in SHADES.items()}
ROLES: dict[str, tuple[str, str]] = {
    **{name: (BY_NAME[name].colour, BY_NAME[name].pattern) for name in PLACED},
    "rules": ("sky", "\\"),
    "controller": ("grey", "|"),
    "custom": ("purple", "x"),
}
"""Role -> colour, pattern."""
RESOURCES: dict[str, tuple[str, str]] = {
    "compute": ("red", ""),
    "hbm": ("blue", ""),
    "nvlink": ("sky", "/"),
    "network": ("green", "/"),
    "wan": ("green", "x"),
    "pcie": ("orange", "\\"),
    "storage": ("yellow", "\\"),
    "host": ("purple", "."),
    "environment": ("sky", "x"),
    "rewards": ("orange", "x"),
    "controller": ("purple", "-"),
    "custom": ("purple", "x"),
    "bubble": ("grey", "x"),
    "tail": ("grey", "-"),
    "overhead": ("ink", "."),
}
"""Resource -> colour, pattern."""
BYTES: dict[str, tuple[str, str]] = {
    "weights": ("blue", ""),
    "gradients, optimizer": ("orange", "/"),
    "KV cache": ("green", "x"),
    "activations, buffers, rest": ("purple", "."),
}
"""What memory holds -> colour, pattern."""
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x", "star", "hexagon")
KINDS = ("blue", "orange", "green", "purple", "sky", "red", "grey", "yellow")
"""Colours for things in a row, each with a symbol of its own."""


def nth(i: int) -> dict[str, str]:
    """Colour and symbol of the i-th of many things."""
    return {"color": KINDS[i % len(KINDS)], "symbol": SYMBOLS[i % len(SYMBOLS)]}


def fill(pair: tuple[str, str], *, faint: bool = False) -> dict[str, Any]:
    """The marker of a bar."""
    name, shape = pair
    marker: dict[str, Any] = {"color": name, "line": {"color": "bg", "width": 1}}
    if shape:
        marker["pattern"] = {
            "shape": shape,
            "bgcolor": name,
            "fgcolor": "bg",
            "fgopacity": 0.6,
            "size": 7,
            "solidity": 0.22,
        }
    if faint:
        marker["opacity"] = 0.45
    return marker


def layout(*, height: int, x: str, y: str = "", legend: bool = True, **more: Any) -> dict[str, Any]:
    """The layout that all figures share: thin grid, transparent ground, legend above."""
    axis = {
        "gridcolor": "grid",
        "zerolinecolor": "line",
        "linecolor": "line",
        "automargin": True,
        "fixedrange": True,
    }
    base: dict[str, Any] = {
        "height": height,
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {
            "color": "text",
            "size": 13,
            "family": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif",
        },
        "margin": {"l": 8, "r": 16, "t": 8, "b": 8, "pad": 4},
        "showlegend": legend,
        "dragmode": False,
        "hovermode": "closest",
        "legend": {
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.02,
            "x": 0,
            "xanchor": "left",
            "traceorder": "normal",
            "font": {"size": 12},
        },
        "hoverlabel": {"bgcolor": "panel", "bordercolor": "line", "font": {"color": "text", "size": 13}},
        "xaxis": {**axis, "title": {"text": x, "font": {"size": 12}}},
        "yaxis": {**axis, "title": {"text": y, "font": {"size": 12}}},
    }
    for key, value in more.items():
        base[key] = base[key] | value if isinstance(base.get(key), dict) else value
    return base


def upright(x: float, name: str, dash: str | None = None) -> dict[str, Any]:
    """A line across the whole height of a figure at `x`, in the colour of that name."""
    line = {"width": 2, "color": name} | ({"dash": dash} if dash else {})
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}
