"""The systems that use our engines run, scaled to the machine, from their scenario files."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs

from rlhfsim.cli.launch import make_tiny, scaled, tiny_folder
from rlhfsim.trace import read_trace

pytestmark = pytest.mark.slow
ALWAYS = ("vllm-example", "vram-managed-pipeline", "verl")
WITH_TIME = ("openrlhf", "deepspeed-chat", "xtuner-rlhf", "sample-factory", "trl")


@pytest.mark.parametrize(
    "system", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.long) for name in WITH_TIME)]
)
def test_the_system_runs(system: str, tmp_path: Path, ray_address: str) -> None:
    out = tmp_path / "run"
    made, _ = scaled(system, 2, out)
    make_tiny(out)
    wanted = runs.settings(tiny_folder(out))
    outcome, heard = runs.run(made, wanted, out, ray_address, self_check=False)
    assert len(heard.rows) == 2
    assert all(row["staleness/max"] <= made.placement.schedule.staleness for row in heard.rows)
    measured = {s.name for s in read_trace(outcome.files.trace).spans}
    assert {"actor.generate", "actor.train", "actor.sync"} <= measured
