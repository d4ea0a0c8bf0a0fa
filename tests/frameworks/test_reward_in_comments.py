"""A reward model that no key names: a comment of the launch holds it, beside whom it stands and how it is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhfsim.api import estimate
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.described import Lengths, RunDescription, placement_of, workload_of
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.configuration.served_reward import SERVED_REWARD
from rlhfsim.interchange.export import export
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import Placement, RolePlacement
from rlhfsim.specs.workload.workload import Reward
from tests.frameworks.test_accepted import plan, workload

MODEL = "qwen2.5-1.5b"
PLAIN: dict[str, Any] = {"tp": 2, "dp": 4, "zero": 1}
CUT = Layout(tp=2, dp=4, zero=1, micro_batch=4)


def scored(*, apart: int = 0) -> Plan:
    """A plan of slime whose 8 GPUs train and score; `apart`: GPUs of the rollout alone."""
    rollout = {"tp": 2, "dp": (apart or 8) // 2}
    asked = plan(workload("grpo", kl=False), "megatron", PLAIN, rollout, apart, residency="offloaded")
    placement = replace(asked.placement, reward=RolePlacement(pool="train", layout=CUT))
    work = replace(asked.workload, reward=Reward(model=MODEL))
    return estimate(placement, work, parse_cluster(8 + apart, "h100"))


def read(folder: Path, **given: str) -> tuple[RunDescription, Placement]:
    configuration, settings = read_configuration([folder], {"MODEL": "qwen2.5-7b", **given})
    run = configuration.run(settings)
    return run, placement_of(run, workload_of(run, Lengths(prompt=1.0, response=1.0, longest=None)))


def written(asked: Plan, folder: Path) -> str:
    files = export(asked, "slime", frozenset()).files
    for name, text in files.items():
        (folder / name).write_text(text)
    return files["launch.sh"]


@pytest.mark.parametrize("apart", [0, 8])
def test_it_reads_back_where_the_plan_has_it(apart: int, tmp_path: Path) -> None:
    asked = scored(apart=apart)
    assert f"# rlhfsim: {SERVED_REWARD} = " in written(asked, tmp_path)
    run, placed = read(tmp_path)
    assert run.reward_model == MODEL
    assert placed.role("reward") is not None
    assert (placed.role("reward").layout, placed.role("reward").residency) == (CUT, "resident")
    assert placed.role("reward").pool == placed.actor.pool
    assert placed.pool(placed.role("reward").pool).gpus == 8
    assert len(placed.pools) == 1 + (apart > 0)


def test_it_follows_the_gpus_that_somebody_changed(tmp_path: Path) -> None:
    written(scored(), tmp_path)
    _, placed = read(tmp_path, actor_num_nodes="2")
    assert placed.role("reward") is not None
    assert placed.role("reward").layout == replace(CUT, dp=8)


def test_the_export_names_it_and_a_comment_that_cannot_be_is_refused(tmp_path: Path) -> None:
    asked = scored()
    [said] = [u for u in export(asked, "slime", frozenset()).written.unsaid if "reward model" in u.what]
    assert said.of == ()
    assert said.nearest is not None
    assert said.nearest.placement.role("reward") is None
    text = written(asked, tmp_path).replace(f'{SERVED_REWARD} = {{"model"', f'{SERVED_REWARD} = {{"name"')
    (tmp_path / "launch.sh").write_text(text)
    with pytest.raises(RlhfsimError, match="name"):
        read(tmp_path)
