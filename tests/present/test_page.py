"""The file itself: one well-formed document, the same bytes each time, everything escaped, nothing
fetched."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from report_pages import HOSTILE, NAMES

from rlhfsim.present.answers.tree import Figure, Page
from rlhfsim.present.answers.written import written
from rlhfsim.present.html import plots
from rlhfsim.present.html.page import embedded, html

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Document(HTMLParser):
    """Elements with their place in the tree; unclosed and unopened ones are counted."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(scope="module")
def texts(files: dict[str, Path]) -> dict[str, str]:
    return {name: path.read_text() for name, path in files.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_document_is_well_formed_with_landmarks_and_headings_in_order(
    texts: dict[str, str], name: str
) -> None:
    found = Document(texts[name])
    assert not found.wrong
    assert not found.open
    assert found.of("html") == [{"lang": "en"}]
    assert all(len(found.of(tag)) == 1 for tag in ("h1", "main", "header", "footer", "nav", "title"))
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    ids = [attrs["id"] for _, attrs in found.elements if "id" in attrs]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_finding_a_text_alternative_and_a_table(
    pages: dict[str, Page], texts: dict[str, str], name: str
) -> None:
    figures = pages[name].figures
    assert len(figures) >= 5
    assert all(len(f.title) > 10 and len(f.alt) > 20 and len(f.how) > 20 and f.table.rows for f in figures)
    found = Document(texts[name])
    assert len(found.of("figure")) == len(found.of("figcaption")) == len(figures)
    labels = [attrs.get("aria-label") for _, attrs in found.elements if attrs.get("role") == "img"]
    assert labels == [f.alt for f in figures]


@pytest.mark.parametrize("name", NAMES)
def test_one_copy_of_plotly_and_no_address_to_fetch(texts: dict[str, str], name: str) -> None:
    text = texts[name]
    assert text.count(plots.packed_script()[:200]) == 1
    found = Document(text)
    assert not [
        a for tag, a in found.elements if "src" in a or tag in ("link", "iframe", "object", "base", "img")
    ]
    assert all((a["href"] or "").startswith("#") for a in found.of("a"))
    policy = next(a["content"] for a in found.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline' " not in policy.split("style-src")[0]
    assert "http" not in policy


@pytest.mark.parametrize("name", NAMES)
def test_the_same_page_gives_the_same_bytes(pages: dict[str, Page], texts: dict[str, str], name: str) -> None:
    assert html(pages[name]) == texts[name]
    assert len(texts[name].encode()) < 4e6


def test_hostile_names_are_text_in_html_and_in_json(texts: dict[str, str]) -> None:
    text = texts["hostile"]
    assert "<img" not in text
    assert HOSTILE in unescape(text)
    specs = re.findall(r'<script type="application/json" id="[^"]*-spec">(.*?)</script>', text, flags=re.S)
    assert len(specs) >= 5
    assert any("img src" in spec for spec in specs)
    for spec in specs:
        assert not set("<>&") & set(spec)
        assert not [t for t in strings(json.loads(spec)) if "<img" in t]


def strings(data: Any) -> Iterator[str]:
    """Every text in plain data."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        yield from (t for value in data.values() for t in strings(value))
    elif isinstance(data, list):
        yield from (t for value in data for t in strings(value))


def test_embedded_json_cannot_end_its_element() -> None:
    data = {"a": "</script><!-- & \u2028"}
    text = str(embedded(data))
    assert not {"<", ">", "&", "\u2028"} & set(text)
    assert json.loads(text) == data


@pytest.mark.parametrize("name", NAMES)
def test_tables_hold_what_figures_draw(pages: dict[str, Page], name: str) -> None:
    for figure in pages[name].figures:
        missing = drawn(figure) - written(figure.table).numbers
        assert not missing, f"{figure.key} draws {sorted(missing)[:5]}"


def drawn(figure: Figure) -> set[float]:
    """Numbers that stand for data in a figure; guides such as a line of equality are none."""
    found: set[float] = set()
    for trace in figure.plot["data"] if figure.plot else ():
        if trace.get("meta") != "guide" and trace.get("hoverinfo") != "skip":
            values = [v for key in ("x", "y", "base") for v in trace.get(key, ())]
            found |= {float(v) for v in values if isinstance(v, int | float)}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_colour_is_fixed_and_no_bar_is_told_by_colour_alone(pages: dict[str, Page], name: str) -> None:
    for figure in pages[name].figures:
        if figure.plot is None:
            continue
        fixed = [t for t in strings(figure.plot) if re.fullmatch(r"#[0-9a-fA-F]{3,8}", t)]
        assert not fixed, f"{figure.key} has {fixed[:3]}"
        bars = [
            t for t in figure.plot["data"] if t["type"] == "bar" and figure.plot["layout"].get("showlegend")
        ]
        looks = [(t["marker"]["color"], t["marker"].get("pattern", {}).get("shape")) for t in bars]
        assert len(looks) == len(set(looks))
        assert len({shape for _, shape in looks}) == len(looks) or len(looks) > 2
