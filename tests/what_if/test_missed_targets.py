"""Changes that would meet targets which a design misses."""

from __future__ import annotations

import pytest

import rlhfsim
from rlhfsim.search import clock
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import requirement
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if import missed_targets, points
from rlhfsim.what_if.engine import Question, good
from rlhfsim.what_if.missed_targets import that_meet
from rlhfsim.what_if.risk.odds import Targets

WORK = Workload(algorithm="grpo", model="qwen2.5-0.5b", prompts=256, samples=8)


def missed(text: str) -> Targets:
    return Targets(requirements=(requirement(text),), steps=100, confidence=0.8)


def test_more_gpus_meet_a_step_time_that_few_miss_and_do_so_when_asked() -> None:
    request = Request(cluster=rlhfsim.parse_cluster(1, "a100"), workload=WORK)
    now = good(Question(request=request))
    assert now is not None
    target = now.seconds / 2.5
    found = that_meet(request, missed(f"step_time<{target}s"))
    larger = [change for change in found if change.change.startswith("--gpus ")]
    assert len(larger) == 1
    assert int(larger[0].change.split()[1]) > 1
    assert larger[0].step_s < target
    assert all(change.probability >= 0.8 for change in found)


def test_nothing_is_named_where_no_change_meets_the_target() -> None:
    request = Request(cluster=rlhfsim.parse_cluster(1, "a100"), workload=WORK)
    assert that_meet(request, missed("step_time<1ms")) == ()


def test_no_change_is_tried_once_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(cluster=rlhfsim.parse_cluster(1, "a100"), workload=WORK)
    tried = []
    monkeypatch.setattr(points, "mapped", lambda function, items: [function(x) for x in items])
    monkeypatch.setattr(missed_targets, "good", lambda question: tried.append(question))
    assert that_meet(request, missed("step_time<1h")) == ()
    assert tried
    tried.clear()
    with clock.within(1e-9):
        assert that_meet(request, missed("step_time<1h")) == ()
    assert not tried
