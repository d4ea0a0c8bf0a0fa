"""Our losses and advantages against TRL and verl, through tests/data/agreement/vectors.json."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.algorithms.advantages import advantages, gae, whiten
from executor.algorithms.kl import kl
from executor.algorithms.kto_baseline import kl_baseline
from executor.algorithms.losses import Batch, compute
from executor.algorithms.metrics import finish
from executor.algorithms.shaping import length_penalty
from executor.samples import LossSpec, Sample
from executor.settings import Algorithm

FILE = Path(__file__).parents[1] / "data" / "agreement" / "vectors.json"
CASES = json.loads(FILE.read_text(encoding="ascii"))["cases"]
TOLERANCE = 1e-5


def names(start: str) -> list[str]:
    return [name for name in CASES if name.startswith(start)]


def near(found: Any, expected: Any) -> None:
    """Equal to 1e-5 of the largest entry."""
    expected = np.asarray(expected)
    room = TOLERANCE * float(np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0.0, atol=room)


def batch_of(case: dict[str, Any], learns: str) -> Batch:
    """The whole step in one micro-batch, with gradient on the field `learns`."""
    fields = {name: torch.tensor(value) for name, value in case["inputs"].items() if "moved" not in name}
    fields[learns].requires_grad_()
    mask = fields["mask"]
    return Batch(num_tokens=int(mask.sum()), num_sequences=len(mask), **fields)


def check_loss(case: dict[str, Any], loss_name: Any, learns: str, **more: Any) -> None:
    batch = batch_of(case, learns)
    loss, metrics = compute(LossSpec(name=loss_name, settings=case["settings"] | more), batch)
    loss.backward()
    expected = case["outputs"]
    near(getattr(batch, learns).grad, expected["gradient"])
    if "loss" in expected:
        near(loss.item(), expected["loss"])
    numbers = finish(metrics)
    for name, value in expected.get("metrics", {}).items():
        near(numbers[name], value)


@pytest.mark.parametrize("name", names("policy"))
def test_policy_loss_and_gradient_agree(name: str) -> None:
    check_loss(CASES[name], "policy", "logprobs")


def test_value_loss_and_gradient_agree() -> None:
    check_loss(CASES["value-verl"], "value", "values")


def test_dpo_loss_and_gradient_agree() -> None:
    check_loss(CASES["dpo-trl"], "dpo", "logprobs")


def test_kto_loss_and_gradient_agree() -> None:
    case = CASES["kto-trl"]
    moved, reference = (np.array(case["inputs"][name]) for name in ("moved", "moved_reference"))
    baseline = kl_baseline([*moved[:, None]], [*reference[:, None]])
    near(baseline, case["outputs"]["baseline"])
    assert baseline > 0.0
    check_loss(case, "kto", "logprobs", kl_baseline=baseline)


@pytest.mark.parametrize("name", names("kl"))
def test_kl_estimates_agree(name: str) -> None:
    case = CASES[name]
    log_ratio = torch.tensor(case["inputs"]["log_ratio"])
    near(kl(log_ratio, case["settings"]["estimator"], torch.exp), case["outputs"]["kl"])


def test_gae_agrees_where_tokens_of_a_tool_are_skipped() -> None:
    case = CASES["gae-verl-tools"]
    mask, rewards, values = (np.array(case["inputs"][name]) for name in ("mask", "rewards", "values"))
    rows = [gae(*row, **case["settings"], mask=m) for *row, m in zip(rewards, values, mask, strict=True)]
    near(np.stack([returns for _, returns in rows]), case["outputs"]["returns"])
    sampled = whiten([found[m > 0] for (found, _), m in zip(rows, mask, strict=True)])
    near(np.concatenate(sampled), np.array(case["outputs"]["whitened"])[mask > 0])


def samples_of(inputs: dict[str, Any]) -> list[Sample]:
    lengths = np.array(inputs["mask"]).sum(1).astype(int)
    return [
        Sample(
            id=i,
            group=inputs["group"][i],
            prompt=np.zeros(1, np.int64),
            response=np.zeros(length, np.int64),
            reward=inputs["reward"][i],
            **{
                name: np.array(inputs[name][i][:length], np.float32)
                for name in ("old_logprobs", "reference_logprobs", "values")
            },
        )
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dr-grpo", "rloo", "reinforce++"])
def test_advantages_agree_with_kl_in_the_reward(algorithm: str) -> None:
    case = CASES[f"advantages-verl-{algorithm}"]
    settings = Algorithm(reward_clip=None, **case["settings"])
    for i, sample in enumerate(advantages(algorithm, samples_of(case["inputs"]), settings)):
        assert sample.advantages is not None
        near(sample.advantages, case["outputs"]["advantages"][i][: sample.num_tokens])
        if sample.returns is not None:
            near(sample.returns, case["outputs"]["returns"][i][: sample.num_tokens])


def test_the_penalty_of_overlong_responses_agrees() -> None:
    case = CASES["overlong-trl"]
    settings = Algorithm(overlong_tokens=case["settings"]["overlong_tokens"])
    longest = case["settings"]["max_tokens"]
    near(
        [-length_penalty(n, settings, longest) for n in case["inputs"]["length"]], case["outputs"]["penalty"]
    )


def test_the_packages_themselves_agree_on_other_numbers() -> None:
    """Where verl and TRL are installed: their functions, on fresh inputs."""
    for package in ("verl.trainer.ppo.core_algos", "trl"):
        pytest.importorskip(package, exc_type=ImportError)
    spec = importlib.util.spec_from_file_location("make_vectors", FILE.with_name("make_vectors.py"))
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    fresh.RNG = np.random.default_rng(17)
    for name, case in fresh.recipes().items():
        if name.startswith("policy"):
            check_loss(fresh.plain(case), "policy", "logprobs")


def test_the_vectors_clip_on_both_sides_so_that_agreement_means_something() -> None:
    outputs = CASES["policy-verl-token"]["outputs"]["metrics"]
    assert outputs["policy/clip_fraction"] > 0.1
    assert outputs["policy/dual_clip_fraction"] > 0.02
    for kind in ("gspo", "gspo-token", "cispo"):
        assert 0.05 < CASES[f"policy-verl-{kind}"]["outputs"]["metrics"]["policy/clip_fraction"] < 0.5
