"""What pages are made of, as components: the figures, tables and lists of `present`, in its style."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from dash import dcc, html

from rlhfsim.present.answers.tree import (
    Block,
    Changed,
    Code,
    EqualNodes,
    Figure,
    Listing,
    Mark,
    Tile,
    TypedTable,
)
from rlhfsim.present.answers.written import tile_texts, written
from rlhfsim.present.html import theme
from rlhfsim.present.html.page import MARKS, SIGNS
from rlhfsim.present.html.plots import checked
from rlhfsim.present.words import tied

Component = Any
P = TypeVar("P")
_GRAPH: Any = {"displaylogo": False, "displayModeBar": False, "responsive": True, "scrollZoom": False}


def block(item: Block) -> Component:
    """One figure, table, list, text to copy, or list of changes."""
    match item:
        case Figure():
            return figure(item)
        case TypedTable():
            return html.Div(table(item), className="block")
        case Listing():
            lines = html.Ul([html.Li(tied(line)) for line in item.items], className="plain")
            return html.Div([html.H3(item.title, className=item.mark), lines], className="block")
        case Code():
            return html.Div([html.H3(item.title), html.Pre(html.Code(item.text))], className="block")
        case Changed():
            changes = [
                html.Div([html.Span(sign, className=f"sign {SIGNS.get(sign, '')}"), text])
                for sign, text in item.lines
            ]
            return html.Div([html.H3(item.title), html.Div(changes, className="changed")], className="block")


def figure(item: Figure) -> Component:
    """A finding, its picture, how to read it, and its numbers behind a summary."""
    drawn = [graph(item)] if item.plot else [node(group) for group in item.nodes]
    numbers = html.Details([html.Summary("The numbers behind this figure"), table(item.table)])
    picture = html.Div(drawn, role="img", **spoken(label=item.alt))
    return html.Figure(
        [html.H3(tied(item.title)), picture, html.Figcaption(tied(item.how)), numbers], id=item.key
    )


def spoken(**names: str) -> dict[str, Any]:
    """Attributes for assistive technology: `label` as `aria-label`."""
    return {f"aria-{name}": text for name, text in names.items()}


def graph(item: Figure) -> Component:
    """A plot in the light colours of the theme."""
    plot = themed(checked(item.plot or {}))
    height = plot["layout"]["height"]
    return dcc.Graph(figure=plot, config=_GRAPH, style={"height": f"{height}px"}, className="plot")


def themed(value: Any) -> Any:
    """Plain data with colours in place of the theme's variables."""
    if isinstance(value, str):
        return (
            theme.LIGHT.get(value.removeprefix("var(--").removesuffix(")"), value)
            if "var(" in value
            else value
        )
    if isinstance(value, list):
        return [themed(item) for item in value]
    return {key: themed(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def node(group: EqualNodes) -> Component:
    """Equal nodes: a column a GPU, a row a role."""
    columns: dict[str, Any] = {"--n": str(group.gpus)}
    ids = html.Div([html.Span(f"GPU {i}") for i in range(group.gpus)], className="cells", style=columns)
    rows = [html.Div([html.Span(), ids], className="lane ids")]
    for lane in group.lanes:
        pieces = [
            html.Span(
                label,
                className=f"piece {lane.role}",
                title=f"{lane.name}: {label}",
                style={"gridColumn": f"{start + 1}/span {span}"},
            )
            for start, span, label in lane.pieces
        ]
        cells = html.Div(pieces, className="cells", style=columns)
        rows.append(html.Div([html.Span([lane.name, html.Small(lane.layout)]), cells], className="lane"))
    return html.Div([html.P(group.title), *rows], className="node")


def table(values: TypedTable) -> Component:
    """A table that scrolls by itself."""
    data = written(values)
    head = html.Tr([html.Th(title, scope="col") for title in data.titles])
    rows = [
        html.Tr(
            [
                html.Th(str(first.text), scope="row"),
                *(html.Td(str(x.text), className="n" if x.value is not None else "") for x in rest),
            ]
        )
        for first, *rest in data.rows
    ]
    parts = [html.Caption(values.caption), html.Thead(head), html.Tbody(rows)]
    return html.Div(html.Table(parts), className="scroll", tabIndex="0")


def status(text: str, kind: str) -> Component:
    """One line about the search; assistive technology reads it when it changes."""
    return html.P(text, id="status", className=f"status {kind}", role="status")


def verdict_line(text: str, mark: Mark) -> Component:
    """The verdict behind its sign."""
    sign = html.Span(MARKS[mark], className=f"mark {mark}", **spoken(hidden="true"))
    return html.P([sign, tied(text)], className="verdict")


def places(kind: Callable[[str, str], P], *names: str) -> Iterator[P]:
    """Inputs, outputs or states of a callback, each by component and property: `poll.interval`."""
    return (kind(*name.split(".")) for name in names)


def tiles(items: Iterable[Tile]) -> Component:
    """The figures of the verdict."""
    return html.Dl([_tile(item) for item in items], className="tiles")


def _tile(item: Tile) -> Component:
    value, detail = map(tied, tile_texts(item))
    shown = html.Dd(value, className=f"value {item.mark}"), html.Dd(detail, className="detail")
    return html.Div([html.Dt(item.label), *shown], className="tile")
