"""What our executor runs next to the best production framework of which runs were compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlhfsim
from rlhfsim.plan import Plan
from rlhfsim.search import branch_and_bound
from rlhfsim.search.cache import SearchCache
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.request import Request
from rlhfsim.search.scope import ALONE
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.measured import compared, model_error
from rlhfsim.what_if.choose import ClusterOption, _rank
from rlhfsim.what_if.engine import Question, good
from rlhfsim.what_if.sizing import attempt
from rlhfsim.what_if.usual_trainer import assumed_trainer, beside, is_large, leader, trained
from rlhfsim.what_if.verdict import measured_frameworks

SMALL = Workload(algorithm="grpo", model="qwen2.5-0.5b", prompts=32, samples=4)


def request(**changes: object) -> Request:
    return replace(Request(cluster=rlhfsim.parse_cluster(2, "h100"), workload=SMALL), **changes)  # type: ignore[arg-type]


def other_side(asked: Request) -> Plan | None:
    found = good(Question(request=asked))
    assert found is not None
    return beside(asked, found.placement)


def test_frameworks_are_ordered_by_how_often_their_runs_were_compared() -> None:
    names = [runs.name for runs in measured_frameworks()]
    counts = [len(compared(name)) for name in names]
    assert names[0] == "nemo-rl"
    assert counts == sorted(counts, reverse=True)
    assert min(counts) > 0
    assert compared("rlhfsim") == compared("openrlhf") == ()
    assert 0.02 < model_error() < 0.3


@pytest.mark.parametrize(
    ("model", "large"),
    [("llama-3.1-70b", False), ("llama-3.1-405b", True), ("qwen3-30b-a3b", False), ("qwen3-235b-a22b", True)],
)
def test_only_models_that_nobody_trains_by_deepspeed_are_led_by_others(model: str, large: bool) -> None:
    assert is_large(resolve_model(model)) is large


def test_the_other_side_is_the_best_known_framework_or_ours() -> None:
    other = other_side(request())
    assert other is not None
    assert other.framework == "nemo-rl"
    ours = other_side(request(framework="nemo-rl", backend="megatron"))
    assert ours is not None
    assert (ours.framework, ours.placement.backend) == ("rlhfsim", "deepspeed")
    assert other_side(request(framework="any")) is None


def test_a_leader_is_the_fastest_unless_within_the_error_of_a_better_known_one() -> None:
    led = leader(request(fix={"actor": {"tp": 2}}))
    assert led is not None
    assert led.runs in measured_frameworks()
    assert led.fix == {"actor": {"tp": 2}}
    mine = good(Question(request=led))
    assert mine is not None
    for runs in measured_frameworks():
        for backend in runs.trainers:
            asked = request(framework=runs.name, backend=backend, fix=led.fix)
            found = good(Question(request=asked))
            assert found is None or found.seconds > mine.seconds * (1 - model_error()) ** 4


def test_a_framework_that_was_never_compared_leads_only_by_more_than_the_error() -> None:
    plan = other_side(request())
    assert plan is not None

    def option(name: str, share: float) -> ClusterOption:
        p = plan.prediction
        usd = None if p.usd_per_step is None else p.usd_per_step * share
        faster = replace(plan, prediction=replace(p, step_s=p.step_s * share, usd_per_step=usd))
        return ClusterOption(gpu="h100_sxm", gpus=2, framework=name, backend="fsdp2", plan=faster, meets=True)

    near, far = 1 - model_error() / 2, 1 - 2 * model_error()
    known = option("nemo-rl", 1.0)
    assert _rank(known) < _rank(option("skyrl", near))
    assert _rank(option("skyrl", far)) < _rank(known)
    assert framework("skyrl") not in measured_frameworks()


def test_who_leads_is_not_decided_by_the_work_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """On many GPUs the roles of a first plan alone may take more than a search that asks for any plan may do."""
    asked = request(cluster=rlhfsim.parse_cluster(128, "h100"), workload=replace(SMALL, prompts=256))
    monkeypatch.setattr(branch_and_bound, "FIRST_WORK", 3000)

    models = models_of(asked.workload)

    def search() -> branch_and_bound.Search:
        return branch_and_bound.Search(asked, models, Pricer(asked, models, SearchCache()), ALONE)

    assert search().first() is None
    assert search().first(insists=True) is not None


LARGE = Workload(algorithm="grpo", model="glm-4.5-air-106b-a12b", prompts=64)


def test_a_large_policy_is_led_alike_wherever_nobody_was_named() -> None:
    cluster = rlhfsim.parse_cluster(8, "h200")
    asked = trained(Request(cluster=cluster, workload=LARGE))
    assert (asked.framework, asked.backend) == ("verl", "fsdp2")  # Megatron-Core has no plan there
    assert trained(asked) == asked
    trial = attempt(Request(cluster=cluster, workload=LARGE))
    assert trial.plan is not None
    assert trial.plan.framework == "verl"
    for named in ({"framework": "rlhfsim"}, {"backend": "deepspeed"}):
        ours = trained(Request(cluster=cluster, workload=LARGE, **named))  # type: ignore[arg-type]
        assert ours.runs is framework("rlhfsim")
        assert assumed_trainer(ours) == ()
    small = trained(Request(cluster=cluster, workload=SMALL))
    assert (small.runs, assumed_trainer(small)) == (framework("rlhfsim"), ())


def test_a_large_policy_of_which_no_production_framework_has_a_plan_says_so() -> None:
    of = {"cluster": rlhfsim.parse_cluster(56, "h200"), "workload": replace(LARGE, model="deepseek-v3")}
    asked = trained(Request(**of))  # type: ignore[arg-type]
    [said] = assumed_trainer(asked)
    assert "no production framework" in said
    assert asked.runs is framework("rlhfsim")
    hurried = trained(Request(**of, time_limit=0.001))  # type: ignore[arg-type]
    assert assumed_trainer(hurried) == ()  # those not asked in time may have one
