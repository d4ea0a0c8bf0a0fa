"""Pages as a browser shows them: drawn, quiet, offline, zoomable, dark, printed, on a phone, and inert to
hostile names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from report_pages import HOSTILE, NAMES

from rlhfsim.present.html import theme

PHONE = {"width": 390, "height": 844}

UNTOLD = """
() => [...document.querySelectorAll('figure:has(.plot)')].flatMap(f => {
  const held = new Set([...f.querySelectorAll('[data-value]')].map(c => Number(c.dataset.value)));
  return f.querySelector('.plot').data.filter(t => t.meta !== 'guide' && t.hoverinfo !== 'skip')
    .flatMap(t => [...(t.x || []), ...(t.y || [])]).filter(v => typeof v === 'number' && !held.has(v)).map(v => `${f.id}: ${v}`);
})"""
"""Numbers that a figure draws and its table does not hold."""
SCREENS = """
() => [document.querySelector('header').offsetHeight, document.getElementById('appendices').getBoundingClientRect().top]
  .map(y => y / 800)
"""
"""Screens of 800 pixels that the verdict takes, and all that comes before the appendices."""
COLUMNS = """
() => [...document.querySelectorAll('.node')].map(n => [
  [...n.querySelectorAll('.ids .cells > span')].flatMap(e => { const r = e.getBoundingClientRect(); return [Math.round(r.left), Math.round(r.right)]; }),
  [...n.querySelectorAll('.lane:not(.ids)')[0].querySelectorAll('.piece')].flatMap(e => { const r = e.getBoundingClientRect(); return [Math.round(r.left), Math.round(r.right)]; }),
])
"""
"""Left and right ends of the named GPUs of each node, and of the pieces of its first role."""
WAITS = 50
"""Looks at a page, a tenth of a second apart, before a change counts as missing."""


@dataclass
class Watched:
    """An open page with everything that it complained about or asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


Open = Callable[..., Watched]


def until(page: Any, expression: str) -> None:
    """Wait for a truth; the page's policy forbids Playwright's own way, which evaluates text inside the
    page."""
    for _ in range(WAITS):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"this did not become true: {expression}")


@pytest.fixture
def opened(browser: Any, files: dict[str, Path]) -> Iterator[Open]:
    """A page of its own context; every request but the file itself is stopped and counted."""
    contexts: list[Any] = []

    def open_(name: str, **options: Any) -> Watched:
        context = browser.new_context(**options)
        contexts.append(context)
        seen = Watched(page=context.new_page())
        address = files[name].as_uri()

        def stop(route: Any) -> None:
            if route.request.url == address:
                route.continue_()
                return
            seen.requests.append(route.request.url)
            route.abort()

        seen.page.route("**/*", stop)
        seen.page.on(
            "console", lambda m: seen.complaints.append(m.text) if m.type in ("error", "warning") else None
        )
        seen.page.on("pageerror", lambda e: seen.complaints.append(str(e)))
        seen.page.on("dialog", lambda d: (seen.complaints.append(f"dialog {d.message}"), d.dismiss()))
        seen.page.goto(address)
        seen.page.wait_for_selector("html[data-drawn]", timeout=30_000)
        return seen

    yield open_
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_drawn_as_its_table_says_without_complaint_or_request(
    opened: Open, name: str
) -> None:
    seen = opened(name)
    page = seen.page
    assert page.evaluate("document.documentElement.dataset.drawn") == "yes"
    boxes = page.evaluate(
        "[...document.querySelectorAll('.plot')].map(b => {const r = b.querySelector('svg.main-svg').getBoundingClientRect(); return [r.width, r.height]})"
    )
    marks = page.evaluate(
        "[...document.querySelectorAll('.plot')].map(b => b.querySelectorAll('.point, .js-line, path.point, .lines').length)"
    )
    assert len(boxes) == page.locator(".plot").count() >= 5
    assert all(w > 300 and h > 100 for w, h in boxes)
    assert all(marks)
    assert page.evaluate(UNTOLD) == []
    verdict, all_of_it = page.evaluate(SCREENS)
    assert verdict <= 1
    assert all_of_it <= 6
    assert seen.complaints == []
    assert seen.requests == []


@pytest.mark.parametrize("name", NAMES)
def test_nothing_scrolls_sideways_on_a_phone(opened: Open, name: str) -> None:
    page = opened(name, viewport=PHONE, has_touch=True).page
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate("document.querySelector('header').getBoundingClientRect().bottom") <= PHONE["height"]
    assert (
        page.locator("details.known li").count() == 0
        or not page.locator("details.known li").first.is_visible()
    )
    outside = page.evaluate(
        f"[...document.querySelectorAll('.plot, figure, .tile, .node')].filter(e => e.getBoundingClientRect().right > {PHONE['width']}).length"
    )
    assert outside == 0
    for columns, pieces in page.evaluate(COLUMNS):
        assert columns[0] == pieces[0]
        assert columns[-1] == pieces[-1]


def test_hovering_shows_a_label(opened: Open) -> None:
    page = opened("plan").page
    bar = page.locator("#timeline .point path").first
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = page.locator("#timeline .hoverlayer .hovertext")
    label.wait_for(timeout=5_000)
    assert "takes" in label.text_content()


def test_the_timeline_zooms_by_keyboard_and_comes_back(opened: Open) -> None:
    page = opened("plan").page
    span = "(() => { const [a, b] = document.getElementById('timeline-plot')._fullLayout.xaxis.range; return b - a; })()"
    whole = page.evaluate(span)
    page.locator("#timeline [data-zoom=in]").focus()
    page.keyboard.press("Enter")
    until(page, f"{span} < {whole * 0.6}")
    page.locator("#timeline [data-zoom=all]").focus()
    page.keyboard.press("Enter")
    until(page, f"Math.abs({span} - {whole}) < {whole * 1e-6}")


def test_the_first_tab_leads_past_the_menu(opened: Open) -> None:
    page = opened("plan").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#main"


def test_figures_follow_dark_mode_while_the_page_is_open(opened: Open) -> None:
    page = opened("plan", color_scheme="light").page
    ink = "getComputedStyle(document.querySelector('#timeline .xtick text')).fill"
    ground = "getComputedStyle(document.body).backgroundColor"
    assert (page.evaluate(ink), page.evaluate(ground)) == (rgb(theme.LIGHT["text"]), rgb(theme.LIGHT["bg"]))
    page.emulate_media(color_scheme="dark")
    until(page, f"{ink} === '{rgb(theme.DARK['text'])}'")
    assert page.evaluate(ground) == rgb(theme.DARK["bg"])


def rgb(code: str) -> str:
    """`#0f1318` as a browser tells it."""
    return f"rgb({', '.join(str(int(code[i : i + 2], 16)) for i in (1, 3, 5))})"


def test_it_prints_in_ink_on_paper_from_a_dark_screen(opened: Open) -> None:
    page = opened("plan", color_scheme="dark").page
    made = page.pdf(format="A4")
    assert made.startswith(b"%PDF")
    assert made.count(b"/Type /Page\n") + made.count(b"/Type /Page ") >= 4
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == rgb(theme.LIGHT["bg"])
    assert not page.locator("nav").is_visible()


def test_hostile_names_stay_words(opened: Open) -> None:
    seen = opened("hostile")
    assert seen.page.title() == HOSTILE
    assert seen.page.locator("img").count() == 0
    assert HOSTILE in seen.page.locator("#timeline .yaxislayer-above").text_content()
    assert seen.complaints == []


def test_a_browser_that_cannot_unpack_says_so_and_keeps_the_tables(
    browser: Any, files: dict[str, Path]
) -> None:
    context = browser.new_context()
    context.add_init_script("delete globalThis.DecompressionStream")
    page = context.new_page()
    page.goto(files["plan"].as_uri())
    page.wait_for_selector("html[data-drawn=no]")
    assert "numbers are in the table" in page.locator("#timeline-plot").text_content()
    assert page.locator("#timeline td[data-value]").count() > 10
    context.close()
