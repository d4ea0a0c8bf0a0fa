"""The committed samples: there, small, whole, and free of any machine's paths."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from rlhfsim.calibration.comparison.side_by_side import read
from rlhfsim.present.answers.compare import run_page
from rlhfsim.present.html import plots
from rlhfsim.present.html.page import html

REPORTS = Path(__file__).parents[2] / "reports"
FILES = sorted(REPORTS.glob("*.html"))
LIMIT = 30e6
"""Bytes of all samples together."""


def test_every_sample_has_its_file_and_every_file_its_sample() -> None:
    assert {f.stem for f in FILES} == set(_samples().SAMPLES)
    assert sum(f.stat().st_size for f in FILES) < LIMIT


def _samples() -> ModuleType:
    spec = importlib.util.spec_from_file_location("samples", REPORTS / "samples.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.stem))
def test_a_sample_is_whole_and_names_no_machine(path: Path) -> None:
    text = path.read_text()
    assert text.endswith("</html>\n")
    assert text.count(plots.packed_script()) == 1
    words = text.replace(plots.packed_script(), "")
    assert not re.findall(r"(?:^|[\s\"'=>])/(?:tmp|home|root|work|Users|var)/[^\s<]*", words)


def test_the_run_of_the_samples_still_gives_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPORTS.parent)
    page = run_page(read(Path("reports/demo_run")), commands="rlhfsim demo")
    assert {"timeline", "phases", "gap", "memory", "steps", "nodes"} <= {f.key for f in page.figures}
    assert html(page) == html(page)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.stem))
def test_a_sample_is_of_this_version_and_that_of_a_run_of_the_version_that_ran(path: Path) -> None:
    project = tomllib.loads((REPORTS.parent / "pyproject.toml").read_text())["project"]
    ran = json.loads((REPORTS / "demo_run" / "plan.json").read_text())["rlhfsim_version"]
    version = ran if path.stem == "run_demo" else project["version"]
    [generator] = re.findall(r'<meta name="generator" content="rlhfsim ([^"]*)">', path.read_text())
    assert generator == version, f"run: python reports/samples.py {path.stem}"
