"""Settings for every test: fuzzing is repeatable and has no deadline, so a busy machine changes nothing; a
browser where there is one."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
os.environ["COLUMNS"] = "100"
# before torch, and for all processes that tests start: where others compute too, threads that spin cost twice
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
gc.set_threshold(20_000, 20, 50)  # cycles are few, and looking for them took up to a twentieth of the time
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_finish() -> None:
    """What was imported is not looked through again by each collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor is what the tests of a file left in caches: a collection then took four seconds at the end."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none; long ones run where -m asks for them.

    Files with slow tests come first: where several processes share them, none is left with one at the end.
    """
    if "long" not in config.option.markexpr:
        later = [item for item in items if item.get_closest_marker("long") is not None]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)
    if Path("/proc/driver/nvidia/gpus").is_dir():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium of this machine; in CI its absence is an error."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        reason = f"no browser here: none of {', '.join(BROWSERS)} is installed (README says how)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


DESIGNS: dict[bytes, Any] = {}
"""Question in `rlhfsim design` -> its answer, for tests with `designs_once`."""


@pytest.fixture
def designs_once(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, Any]:
    """`rlhfsim design` searches a question once in a process: as text, as JSON and at every width it is the same.

    Emptied by a test that holds two searches of one question against each other.
    """
    module = importlib.import_module("rlhfsim.cli.design")
    search = module.search_design

    def once(request: Any, *, instead: Any = (), **asked: Any) -> Any:
        key = pickle.dumps((request, [one.text for one in instead], sorted(asked.items())))
        if key not in DESIGNS:
            DESIGNS[key] = search(request, instead=instead, **asked)
        return DESIGNS[key]

    monkeypatch.setattr(module, "search_design", once)
    return DESIGNS
