"""The desk in headless Chromium, by clicking: the answer follows, at the width of a desk and of a phone."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhfsim.cli.desk import FIELDS, asked, elsewhere, of_documents
from rlhfsim.desk.server import Server, names
from tests.desk.test_documents import JOBS
from tests.desk.test_pasted import SCRIPT
from tests.frameworks.test_importers import verl_console

START = "gpus=4&model=0.5b&algorithm=grpo&prompts=64&samples=2&response-len=256"
VERDICT = (
    "g => document.querySelector('#answer .verdict')?.innerText.replace(/\\s/g, ' ').includes(g + ' GPU')"
)
FINAL = "/^Proven: .* better\\.$/.test(document.getElementById('status')?.innerText)"
WAIT_MS = 60_000
GROUND = {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 19, 24)"}


@pytest.fixture(scope="module")
def desk() -> Iterator[Server]:
    """On a port that the system chose."""
    readers: Any = {
        "read": partial(asked, files=True),
        "candidates": partial(elsewhere, files=True),
        "documents": partial(of_documents, files=True),
    }
    with Server("127.0.0.1", 0, fields=FIELDS, **readers, start=START) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        yield server
        server.stop()
        thread.join()


@pytest.mark.parametrize("width", [1280, 390])
def test_moving_a_field_designs_anew(desk: Server, browser: Any, width: int) -> None:
    scheme = "dark" if width > 860 else "light"
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page, complaints, asked_for = context.new_page(), [], []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: complaints.append(str(e)))
    page.on("request", lambda r: asked_for.append(r.url))
    page.goto(desk.address)
    page.wait_for_function(VERDICT, arg=4, timeout=WAIT_MS)
    page.click("#pin")
    page.wait_for_function("location.search.includes('base=')", timeout=WAIT_MS)
    page.click("#double")
    page.wait_for_function(VERDICT, arg=8, timeout=WAIT_MS)
    page.wait_for_selector(".changed", timeout=WAIT_MS)
    assert "gpus=8" in page.url
    assert "base=gpus%3D4" in page.url
    page.fill("#field-gpus input", "8x")
    page.wait_for_selector("#field-gpus .message:not(:empty)", timeout=WAIT_MS)
    assert "8x" in page.inner_text("#field-gpus .message")
    assert page.evaluate(VERDICT, 8)
    page.go_back()
    page.wait_for_function("document.querySelector('#field-gpus input').value === '4'", timeout=WAIT_MS)
    page.wait_for_function(VERDICT, arg=4, timeout=WAIT_MS)
    page.wait_for_function(FINAL, timeout=WAIT_MS)
    tops = [page.locator(name).bounding_box()["y"] for name in (".headline", "#question", ".cards")]
    assert (tops == sorted(tops)) == (width < 860)  # a phone has the verdict first, then the question
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == GROUND[scheme]
    with page.expect_download() as download:
        page.click("#save")
    assert download.value.suggested_filename == "plan.json"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].map(p => p.getBoundingClientRect().right)"
    )
    assert len(drawn) >= 4
    assert max(drawn) <= width
    compare(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not [url for url in asked_for if not url.startswith((desk.address, "blob:", "data:"))]
    assert complaints == []
    context.close()


def compare(page: Any) -> None:
    """Candidates on a table; a row asks for its plan; other work makes the table old."""
    page.click("#tabs button:nth-child(2)")
    page.fill("#candidates .gpu input", "l4")
    page.fill("#candidates .gpus input", "1")
    page.click("#candidates .framework button")
    page.click(".dash-dropdown-option:has-text('rlhfsim')")
    page.click("#compare")
    page.click("#stop", timeout=WAIT_MS)
    page.wait_for_selector("#table .status:not(.busy)", timeout=WAIT_MS)
    page.click("#compare")
    page.click("#table tr.front", timeout=WAIT_MS)
    page.wait_for_selector("#choose", state="hidden", timeout=WAIT_MS)
    page.wait_for_function(VERDICT, arg=1, timeout=WAIT_MS)
    assert all(part in page.url for part in ("gpus=1", "gpu=l4", "framework=rlhfsim", "backend="))
    page.click("#tabs button:nth-child(2)")
    assert page.locator("#table tr.now").count() == 1
    outside = (
        "[...document.querySelectorAll('#table .scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    )
    assert page.evaluate(outside) == 0
    page.fill("#field-prompts input", "32")
    page.wait_for_selector("#table .status.warn", timeout=WAIT_MS)


def test_a_script_is_pasted_and_a_log_dropped(desk: Server, browser: Any, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 844})
    page.goto(desk.address)
    page.click("#tabs button:nth-child(3)")
    page.fill("#own-text", SCRIPT)
    page.fill("#own-gpu", "h100")
    page.click("#own-judge")
    page.wait_for_selector("#own-answer .status.good", timeout=WAIT_MS)
    assert "fits: risk of running out of memory" in page.inner_text("#own-answer pre")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    (tmp_path / "job.log").write_text(verl_console(3))
    page.set_input_files("#own-file input", tmp_path / "job.log")
    page.wait_for_function(
        "document.querySelector('#own-answer .status')?.innerText.includes('A log of verl')", timeout=WAIT_MS
    )
    page.click("#tabs button:nth-child(1)")
    page.wait_for_selector("#own", state="hidden", timeout=WAIT_MS)
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_files_are_answered_with_their_pictures(
    desk: Server, browser: Any, tmp_path: Path, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844})
    page.goto(
        desk.address + "?gpus=4&gpu=h100&model=0.5b&algorithm=grpo&prompts=64&samples=2&response-len=256"
    )
    page.click("#tabs button:nth-child(4)")
    for name, text in {**JOBS, "run.yaml": "steps: 10\n"}.items():
        (tmp_path / name).write_text(text)
    page.set_input_files("#files-drop input", [tmp_path / name for name in JOBS])
    page.wait_for_function("document.getElementById('files-text').value.includes('long.yaml')")
    page.click("#files-ask")
    page.wait_for_selector("#files-answer .verdict", timeout=4 * WAIT_MS)  # several searches
    assert "2 jobs on 4" in page.inner_text("#files-answer .subtitle")
    page.wait_for_selector("#files-answer #schedule .js-plotly-plot .barlayer path", timeout=WAIT_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.set_input_files("#files-drop input", [tmp_path / "run.yaml"])
    page.wait_for_function("document.getElementById('files-text').value.includes('run.yaml')")
    page.click("#files-ask")
    page.wait_for_selector("#files-state .status.bad", timeout=WAIT_MS)
    assert "ask pool and run at once" in page.inner_text("#files-state")
    page.close()


def status_of(address: str, **headers: str) -> int:
    data = b"{}" if "Content-Type" in headers else None
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers, data=data)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_foreign_names_and_sites_are_refused(desk: Server) -> None:
    port = desk.address.rstrip("/").rsplit(":", 1)[1]
    assert status_of(desk.address) == 200
    assert status_of(desk.address, Host=f"localhost:{port}") == 200
    assert status_of(desk.address, Host=f"rebound.example:{port}") == 403
    update = f"{desk.address}_dash-update-component"
    sent = {"Content-Type": "application/json", "Sec-Fetch-Site": "cross-site"}
    assert status_of(update, **sent) == 403


def test_which_names_mean_this_machine() -> None:
    assert names("127.0.0.1")("localhost")
    assert not names("127.0.0.1")("10.0.0.7")
    assert names("0.0.0.0")("10.0.0.7")
    assert not names("0.0.0.0")("rebound.example")
