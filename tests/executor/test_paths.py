"""Every algorithm, weight path and layout runs; each run covers several of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs

from executor.engines.transformers.heads import has_head, load
from executor.launch import prepare
from executor.resolve import engine_specs
from executor.settings import Algorithm, Data, Evaluation, RewardRule
from rlhfsim.trace import read_trace

pytestmark = pytest.mark.slow
FAILING = RewardRule(kind="function", target="survival_reward:often_fails", retries=0, on_error="drop")
STARTS = RewardRule(kind="format", pattern="^[0-9]")
"""Whether the first character is a digit: of a random model, 0 for half of the groups."""
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
    "dapo, groups that differ, packed, ZeRO-3, through host memory": (
        "naive",
        "dapo",
        {
            "layout": {"dp": 2, "zero": 3, "micro_batch": 1, "pack_tokens": 48},
            "workload": {"packing": True, "kl": False, "dynamic_sampling": {"kept": 0.5, "gen_prompts": 6}},
            "rewards": (STARTS,),
            "algorithm": Algorithm(overlong_tokens=2, overlong_filter=True),
        },
    ),
    "reinforce++, groups that differ, overlapped sync, rollout's log-probs": (
        "async",
        "reinforce++",
        {
            "placement": {"schedule": {"staleness": 1, "overlapped_sync": True}},
            "workload": {
                "old_logprobs": "rollout",
                "kl": False,
                "samples": 4,
                "dynamic_sampling": {"kept": 0.5},
            },
            "rewards": (STARTS,),
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
    own = {k: v for k, v in changes.items() if k in ("rewards", "algorithm")}
    made = runs.plan(
        architecture, algorithm, tiny_model, **{k: v for k, v in changes.items() if k not in own}
    )
    wanted = runs.settings(tiny_model, **({"algorithm": Algorithm(kl_coefficient=0.01)} | own))
    outcome, heard = runs.run(made, wanted, tmp_path / "run", ray_address)
    assert [row["step"] for row in heard.rows] == [0, 1]
    bound = made.placement.schedule.staleness
    for row in heard.rows:
        assert row["policy/grad_norm"] > 0
        assert ("reward/dropped" in row) == ("reward/function" in row) == (FAILING in own.get("rewards", ()))
        if made.workload.dynamic_sampling is not None:
            kept = row["sampling/generated_groups"] - row["sampling/equal_groups"]
            assert row["sampling/kept_share"] == kept / row["sampling/generated_groups"]
            assert row["reward/std"] > 0
        assert row["staleness/max"] <= bound
        if row["staleness/max"] == 0:
            assert row.get("mismatch/max_abs_dlogp", 0.0) < 1e-4
    if made.workload.dynamic_sampling is not None:
        assert sum(row["sampling/equal_groups"] for row in heard.rows) > 0
    predicted = {p.name for p in made.prediction.phases} - {"controller"}
    measured = {s.name for s in read_trace(outcome.files.trace).spans}
    assert predicted <= measured | {"actor.generate.wait"}


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "sft", "reward_model"])
def test_given_responses_are_learnt_without_a_rollout(
    algorithm: str, tiny_model: Path, tmp_path: Path, ray_address: str
) -> None:
    rows = [
        {"prompt": f"{i}+", "answer": "1", "chosen": "1", "rejected": "2", "label": i % 2} for i in range(20)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fsdp2 = algorithm == "sft"
    made = runs.plan(
        "naive",
        algorithm,
        tiny_model,
        layout={"dp": 2, "zero": 3 if fsdp2 else 1},
        placement={"backend": "fsdp2" if fsdp2 else "deepspeed"},
        workload={"prompts": 16},
    )
    wanted = runs.settings(
        tiny_model,
        iterations=4,
        data=Data(path=str(tmp_path / "pairs.jsonl"), shuffle=False, held_out=0.2),
        evaluation=Evaluation(problems=4),
    )
    outcome, heard = runs.run(made, wanted, tmp_path / "run", ray_address)
    losses = [row[f"{algorithm}/loss"] for row in heard.rows]
    assert losses[-1] < losses[0]
    assert set(outcome.ended.evaluations) == {0, 4}
    assert any(name.startswith("evaluation/") for name in heard.rows[-1])
    model = outcome.files.model
    assert outcome.files.best.resolve() == model.resolve()
    assert (model / "tokenizer.json").is_file()
    assert has_head(str(model)) == (algorithm == "reward_model")
    if algorithm == "reward_model":
        config = json.loads((model / "config.json").read_text())
        assert config["architectures"] == ["Qwen2ForSequenceClassification"]
        assert config.get("num_labels", len(config.get("id2label", [1]))) == 1
        read_back_by_ppo(tiny_model, model)


def read_back_by_ppo(policy: Path, reward_model: Path) -> None:
    """The folder is accepted where the plan has a trained reward model, and gives its head."""
    made = runs.plan("naive", "ppo", policy, workload={"reward": {"model": "same"}})
    wanted = runs.settings(policy, reward_model=str(reward_model), reward_head="trained", rewards=None)
    job, _ = prepare(made, wanted)
    spec = engine_specs(job)["reward"]
    assert (spec.model, spec.head) == (str(reward_model), "score")
    head = load(spec.model, "score", "fp32").head.weight
    assert head.shape == (1, 128)
