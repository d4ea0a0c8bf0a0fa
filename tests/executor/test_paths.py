"""Every algorithm, weight path and layout runs; each run covers several of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs

from executor.settings import Algorithm, Data, RewardRule
from rlhfsim.trace import read_trace

pytestmark = pytest.mark.slow
FAILING = RewardRule(kind="function", target="survival_reward:often_fails", retries=0, on_error="drop")
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rloo over disk, streamed": (
        "disaggregated",
        "rloo",
        {
            "layout": {"dp": 2, "zero": 1},
            "placement": {"weight_path": "disk", "schedule": {"streaming": True}},
            "rewards": (FAILING, RewardRule(kind="digits")),
        },
    ),
    "dr-grpo, packed, ZeRO-3, through host memory": (
        "naive",
        "dr-grpo",
        {"layout": {"dp": 2, "zero": 3}, "workload": {"packing": True}},
    ),
    "reinforce++, overlapped sync, rollout's log-probs": (
        "async",
        "reinforce++",
        {
            "placement": {"schedule": {"staleness": 1, "overlapped_sync": True}},
            "workload": {"old_logprobs": "rollout", "kl": False},
        },
    ),
    "adapters only, the base as reference": (
        "disaggregated",
        "grpo",
        {"placement": {"weight_path": "lora"}, "workload": {"lora": {"rank": 4}}},
    ),
    "ppo, tensor parallel, reward model": (
        "hybrid",
        "ppo",
        {"layout": {"dp": 1, "tp": 2, "zero": 1}, "workload": {"reward": {"model": "same"}}},
    ),
    "pipeline parallel, two updates": (
        "disaggregated",
        "grpo",
        {"layout": {"dp": 1, "pp": 2, "zero": 1}, "workload": {"mini_batches": 2}},
    ),
    "workers created and destroyed": (
        "smart",
        "grpo",
        {
            "placement": {
                "rollout": {
                    "pool": "all",
                    "residency": "recreated",
                    "sleep": 2,
                    "layout": {"dp": 1, "memory_utilization": 0.3},
                }
            }
        },
    ),
}


WITH_TIME = {"workers created and destroyed"}
"""A system that does so runs in test_systems_run.py."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if case in WITH_TIME else ()) for case in CASES]
)
def test_it_runs(case: str, tiny_model: Path, tmp_path: Path, ray_address: str) -> None:
    architecture, algorithm, changes = CASES[case]
    rewards = {k: v for k, v in changes.items() if k == "rewards"}
    made = runs.plan(
        architecture, algorithm, tiny_model, **{k: v for k, v in changes.items() if k != "rewards"}
    )
    wanted = runs.settings(tiny_model, algorithm=Algorithm(kl_coefficient=0.01), **rewards)
    outcome, heard = runs.run(made, wanted, tmp_path / "run", ray_address)
    assert [row["step"] for row in heard.rows] == [0, 1]
    bound = made.placement.schedule.staleness
    for row in heard.rows:
        assert row["policy/grad_norm"] > 0
        assert ("reward/dropped" in row) == ("reward/function" in row) == bool(rewards)
        assert row["staleness/max"] <= bound
        if row["staleness/max"] == 0:
            assert row.get("mismatch/max_abs_dlogp", 0.0) < 1e-4
    predicted = {p.name for p in made.prediction.phases} - {"controller"}
    measured = {s.name for s in read_trace(outcome.files.trace).spans}
    assert predicted <= measured | {"actor.generate.wait"}


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "sft", "reward_model"])
def test_given_responses_are_learnt_without_a_rollout(
    algorithm: str, tiny_model: Path, tmp_path: Path, ray_address: str
) -> None:
    rows = [
        {"prompt": f"{i}+", "answer": "1", "chosen": "1", "rejected": "2", "label": i % 2} for i in range(16)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = runs.plan("naive", algorithm, tiny_model, layout={"dp": 2, "zero": 1}, workload={"prompts": 16})
    wanted = runs.settings(
        tiny_model, iterations=4, data=Data(task="file", path=str(tmp_path / "pairs.jsonl"), shuffle=False)
    )
    _, heard = runs.run(made, wanted, tmp_path / "run", ray_address)
    losses = [row[f"{algorithm}/loss"] for row in heard.rows]
    assert losses[-1] < losses[0]
