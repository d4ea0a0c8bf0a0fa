"""Where nothing fits: the byte that is missing, and changes that are tried and lead to a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlhfsim
from rlhfsim.search import clock
from rlhfsim.search.request import Request, switched
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if import points, remedies
from rlhfsim.what_if.design import design

WORK = Workload(algorithm="grpo", model="qwen3-8b", prompts=16, samples=4)
ASKED = Request(cluster=rlhfsim.parse_cluster(1, "h100"), workload=WORK, forbid=frozenset({"offload"}))


def test_what_is_missing_and_what_would_fit_is_tried() -> None:
    answer = design(ASKED)
    assert answer.chosen is None
    memory = answer.missing
    assert memory is not None
    lacks = memory.peak
    assert lacks.bytes > lacks.capacity == ASKED.cluster.node_group.profile.usable_memory.value
    assert memory.peak_entry.role in ("actor", "reference", "reward", "rollout")
    names = [remedy.change for remedy in answer.remedies]
    assert answer.remedy == names[0] == "without --forbid offload"
    assert "--allow lora" in names
    assert any(name.startswith("--gpus ") for name in names)
    by_name = {remedy.change: remedy for remedy in answer.remedies}
    lora = by_name["--allow lora"]
    assert lora.other_work
    assert not answer.remedies[0].other_work
    alone = design(
        replace(ASKED, workload=switched(WORK, frozenset({"lora"}))), explain=False, simplest_s=None
    )
    assert alone.best is not None
    assert alone.best.prediction.step_s == pytest.approx(lora.step_s, rel=0.1)
    price = ASKED.cluster.node_group.profile.price
    assert price is not None
    assert lora.usd_per_step == pytest.approx(price.value / 3600 * lora.step_s)


def test_no_change_is_tried_once_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Request] = []
    monkeypatch.setattr(points, "mapped", lambda function, items: [function(x) for x in items])
    monkeypatch.setattr(remedies, "fitting", tried.append)
    with clock.within(1e-9):
        assert remedies.remedies(ASKED) == ()
    assert not tried
    assert remedies.remedies(ASKED) == ()
    assert tried
