"""Settings for every test: fuzzing is repeatable and has no deadline, so a busy machine changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none; long ones run where -m asks for them.

    Real engines run one test after the other, in one process of pytest-xdist, beside everything else; other
    tests go to its processes a file at a time, so that what a file prepares is prepared once.
    """
    if "long" not in config.option.markexpr:
        later = [item for item in items if item.get_closest_marker("long") is not None]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]
    for item in items:
        engines = item.get_closest_marker("slow") and not item.get_closest_marker("parallel")
        item.add_marker(pytest.mark.xdist_group("engines" if engines else item.path.stem))
    if Path("/proc/driver/nvidia/gpus").is_dir():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
