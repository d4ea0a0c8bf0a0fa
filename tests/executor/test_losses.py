"""Properties of the losses: what must hold whatever the numbers are."""

from __future__ import annotations

from dataclasses import fields, replace
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from executor.algorithms.losses import Batch, compute
from executor.algorithms.metrics import finish, merge
from executor.samples import LossSpec

FULL = {
    "clip_high": 0.28,
    "dual_clip": 2.0,
    "kl_coefficient": 0.1,
    "entropy_coefficient": 0.01,
    "correction": "truncated",
    "max_tokens": 16,
}
LOSSES: list[tuple[Any, dict[str, Any]]] = [
    *(("policy", FULL | {"aggregation": kind}) for kind in ("token", "sequence", "constant")),
    ("policy", {"old_logprobs": "rollout"}),
    ("policy", {"correction": "masked"}),
    ("value", {}),
    ("value", {"value_clip": None, "aggregation": "sequence"}),
    ("dpo", {}),
    ("kto", {"kl_baseline": 0.3, "desirable_weight": 1.5}),
    ("sft", {}),
    ("reward_model", {}),
    ("distillation", {}),
    ("distillation", {"estimator": "k3", "aggregation": "sequence"}),
]


def random_batch(pairs: int = 4, tokens: int = 7, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * pairs

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    mask = (torch.arange(tokens) < lengths).float()
    names = ["old_logprobs", "reference_logprobs", "rollout_logprobs"]
    return Batch(
        mask=mask,
        num_tokens=int(mask.sum()),
        num_sequences=rows,
        logprobs=-drawn(rows, tokens).abs(),
        values=drawn(rows, tokens),
        scores=drawn(rows),
        entropy=drawn(rows, tokens).abs(),
        advantages=drawn(rows, tokens),
        returns=drawn(rows, tokens),
        old_values=drawn(rows, tokens),
        labels=torch.tensor([1.0, -1.0] * pairs),
        group=torch.arange(rows) // 2,
        **{name: -drawn(rows, tokens).abs() for name in names},
    )


def part(batch: Batch, rows: list[int]) -> Batch:
    """Some sequences of it, cut to their longest."""
    tokens = int(batch.mask[rows].sum(1).max()) if rows else 0
    tensors = {
        field.name: value[rows][:, :tokens] if value.dim() == 2 else value[rows]
        for field in fields(Batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    return replace(batch, **tensors)


def learning(batch: Batch) -> tuple[Batch, list[Tensor]]:
    """The batch with gradients wanted, and the tensors that get them."""
    leaves = {
        n: getattr(batch, n).clone().requires_grad_() for n in ("logprobs", "values", "scores", "entropy")
    }
    return replace(batch, **leaves), list(leaves.values())


def policy(batch: Batch, **settings: Any) -> tuple[Tensor, dict[str, float]]:
    loss, metrics = compute(LossSpec(name="policy", settings=settings), batch)
    return loss, finish(metrics)


def single(ratio: float, advantage: float, **more: Any) -> Batch:
    """One token whose probability changed by `ratio`."""
    one = torch.ones(1, 1)
    return Batch(
        mask=one,
        num_tokens=1,
        num_sequences=1,
        logprobs=one * (log(ratio) - 1.0),
        old_logprobs=-one,
        advantages=one * advantage,
        **more,
    )


@pytest.mark.parametrize(("name", "settings"), LOSSES)
@pytest.mark.parametrize(
    "split", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[6, 7], [0, 1], [2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5, 6, 7], []]]
)
def test_any_split_into_micro_batches_gives_the_same_loss_gradient_and_metrics(
    name: Any, settings: dict[str, Any], split: list[list[int]]
) -> None:
    batch, leaves = learning(random_batch())
    spec = LossSpec(name=name, settings=settings)
    whole, metrics = compute(spec, batch)
    expected = torch.autograd.grad(whole, leaves, allow_unused=True)
    results = [compute(spec, part(batch, rows)) for rows in split]
    total = torch.stack([loss for loss, _ in results]).sum()
    torch.testing.assert_close(total, whole)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    together = results[0][1]
    for _, more in results[1:]:
        together = merge(together, more)
    assert finish(together) == pytest.approx(finish(metrics), rel=1e-6)


@pytest.mark.parametrize(("name", "settings"), LOSSES)
def test_what_stands_in_the_padding_changes_nothing(name: Any, settings: dict[str, Any]) -> None:
    batch = random_batch()
    dirt = {
        field.name: torch.where(batch.mask > 0, value, 1e6)
        for field in fields(Batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
        and value.dim() == 2
        and field.name != "mask"
    }
    spec = LossSpec(name=name, settings=settings)
    clean, metrics = compute(spec, batch)
    dirty, same = compute(spec, replace(batch, **dirt))
    assert torch.equal(clean, dirty)
    assert finish(metrics) == finish(same)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gap", [-1e4, -300.0, -50.0, 50.0, 300.0, 1e4, float("inf"), float("-inf")])
def test_extreme_log_ratios_leave_loss_and_gradient_finite(estimator: str, gap: float) -> None:
    batch = random_batch()
    extreme = {
        "old_logprobs": batch.old_logprobs,
        "reference_logprobs": batch.reference_logprobs,
        "rollout_logprobs": batch.rollout_logprobs,
    }
    for name, value in extreme.items():
        assert value is not None
        shifted = value - gap if gap == gap and abs(gap) < float("inf") else torch.full_like(value, -abs(gap))
        sick, leaves = learning(replace(batch, **{name: shifted}))
        loss, metrics = compute(LossSpec(name="policy", settings=FULL | {"kl_estimator": estimator}), sick)
        loss.backward()
        assert torch.isfinite(loss)
        assert leaves[0].grad is not None
        assert torch.isfinite(leaves[0].grad).all()
        assert np.isfinite(list(finish(metrics).values())).all()


def test_a_nan_is_not_hidden() -> None:
    batch = random_batch()
    assert batch.logprobs is not None
    batch.logprobs[0, 0] = float("nan")
    assert torch.isnan(policy(batch)[0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.1, 2.0, -2.2),  # inside: -A r
        (1.5, 2.0, -2.0 * 1.28),  # better than allowed: no more than 1 + high
        (0.5, 2.0, -1.0),  # worse: the free term counts
        (0.5, -1.0, 0.8),  # 1 - low
        (1.5, -1.0, 1.5),
        (9.0, -1.0, 3.0),  # dual clip
    ],
)
def test_clipping_worked_by_hand(ratio: float, advantage: float, expected: float) -> None:
    loss, _ = policy(single(ratio, advantage), clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_without_dual_clip_a_bad_token_counts_in_full() -> None:
    assert policy(single(9.0, -1.0))[0].item() == pytest.approx(9.0, rel=1e-5)


def test_clip_fraction_counts_the_tokens_whose_clip_is_active() -> None:
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.0, 7.0]])
    batch = Batch(
        mask=torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]]),
        num_tokens=5,
        num_sequences=1,
        logprobs=ratios.log(),
        old_logprobs=torch.zeros(1, 6),
        advantages=torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, 1.0]]),
    )
    numbers = policy(batch)[1]
    assert numbers["policy/clip_fraction"] == pytest.approx(2 / 5)
    assert numbers["policy/ratio_mean"] == pytest.approx(1.0)
    assert numbers["policy/ratio_max"] == pytest.approx(1.5)


def test_a_clipped_token_has_no_gradient() -> None:
    batch, leaves = learning(replace(random_batch(), mask=torch.ones(8, 7), num_tokens=56))
    assert batch.logprobs is not None
    assert batch.advantages is not None
    far = replace(
        batch, old_logprobs=batch.logprobs.detach() - 1.0, rollout_logprobs=None, reference_logprobs=None
    )
    policy(far)[0].backward()
    assert leaves[0].grad is not None
    assert torch.equal(leaves[0].grad != 0, batch.advantages < 0)


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_that_of_reinforce() -> None:
    batch, leaves = learning(
        replace(random_batch(), old_logprobs=None, rollout_logprobs=None, reference_logprobs=None)
    )
    loss, numbers = policy(batch)
    loss.backward()
    assert batch.advantages is not None
    assert numbers["policy/ratio_mean"] == 1.0
    torch.testing.assert_close(leaves[0].grad, -batch.advantages * batch.mask / batch.num_tokens)


@pytest.mark.parametrize(
    ("kind", "cap", "weight"),
    [
        ("none", 2.0, 1.0),
        ("truncated", 2.0, 2.0),
        ("truncated", 5.0, 4.0),
        ("masked", 2.0, 0.0),
        ("masked", 5.0, 4.0),
    ],
)
def test_importance_correction_of_a_token_that_the_sampler_found_four_times_less_likely(
    kind: str, cap: float, weight: float
) -> None:
    batch = single(1.0, 1.0, rollout_logprobs=torch.full((1, 1), -1.0 - log(4.0)))
    loss, numbers = policy(batch, correction=kind, correction_cap=cap)
    assert loss.item() == pytest.approx(-weight, rel=1e-5)
    assert numbers["mismatch/abs_logprob_mean"] == pytest.approx(log(4.0), rel=1e-5)
    assert numbers["mismatch/kl"] == pytest.approx(4.0 - 1.0 - log(4.0), rel=1e-5)


def test_masking_drops_tokens_that_the_sampler_found_far_too_likely() -> None:
    batch = single(1.0, 1.0, rollout_logprobs=torch.full((1, 1), -1.0 + log(4.0)))
    assert policy(batch, correction="masked", correction_cap=2.0)[0].item() == 0.0
    assert policy(batch, correction="truncated", correction_cap=2.0)[0].item() == pytest.approx(-0.25)


def test_the_ratio_is_taken_against_the_sampler_where_its_log_probs_stand_for_the_old_ones() -> None:
    batch = single(1.0, -1.0, rollout_logprobs=torch.full((1, 1), -1.0 - log(4.0)))
    loss, numbers = policy(batch, old_logprobs="rollout", correction="truncated")
    assert loss.item() == pytest.approx(4.0, rel=1e-5)
    assert "correction/weight_mean" not in numbers
    assert numbers["mismatch/abs_logprob_max"] == pytest.approx(log(4.0), rel=1e-5)


def test_kl_in_the_reward_is_measured_but_not_added_to_the_loss() -> None:
    batch = random_batch()
    with_kl, numbers = policy(batch, kl_coefficient=0.5, kl_in="reward")
    assert with_kl == policy(replace(batch, reference_logprobs=None))[0]
    assert numbers["kl/max"] > numbers["kl/mean"] > 0.0
    assert policy(batch, kl_coefficient=0.5)[0] > with_kl


def test_entropy_is_estimated_from_the_sampled_tokens_where_the_distribution_is_unknown() -> None:
    batch = random_batch()
    assert batch.logprobs is not None
    estimated = policy(replace(batch, entropy=None))[1]["policy/entropy"]
    assert estimated == pytest.approx(float(-(batch.logprobs * batch.mask).sum() / batch.mask.sum()))
    with pytest.raises(AssertionError, match="entropy bonus"):
        policy(replace(batch, entropy=None), entropy_coefficient=0.1)


def test_value_loss_is_the_worse_of_clipped_and_free() -> None:
    one = torch.ones(1, 1)
    batch = Batch(
        mask=one, num_tokens=1, num_sequences=1, values=one * 1.0, old_values=one * 0.0, returns=one * 1.0
    )
    spec = LossSpec(name="value", settings={"value_clip": 0.2})
    loss, metrics = compute(spec, batch)
    assert loss.item() == pytest.approx(0.5 * 0.8**2)
    assert finish(metrics)["value/clip_fraction"] == 1.0


def test_explained_variance_matches_its_definition() -> None:
    batch = random_batch()
    assert batch.values is not None
    assert batch.returns is not None
    _, metrics = compute(LossSpec(name="value", settings={}), batch)
    chosen = batch.mask > 0
    values, returns = batch.values[chosen].numpy(), batch.returns[chosen].numpy()
    expected = 1.0 - np.var(returns - values) / np.var(returns)
    assert finish(metrics)["value/explained_var"] == pytest.approx(expected, rel=1e-5)
    flat = replace(batch, returns=torch.ones_like(batch.returns))
    assert "value/explained_var" not in finish(compute(LossSpec(name="value", settings={}), flat)[1])


def test_dpo_at_the_reference_is_log_two_and_falls_when_the_chosen_side_gains() -> None:
    batch = random_batch()
    same = replace(batch, logprobs=batch.reference_logprobs)
    spec = LossSpec(name="dpo", settings={"beta": 0.5})
    assert compute(spec, same)[0].item() == pytest.approx(log(2.0))
    assert batch.labels is not None
    assert same.logprobs is not None
    better = replace(same, logprobs=same.logprobs + 0.1 * batch.labels[:, None])
    loss, metrics = compute(spec, better)
    assert loss.item() < log(2.0)
    assert finish(metrics)["dpo/accuracy"] == 1.0


def test_a_reward_model_learns_by_the_bradley_terry_loss_of_its_pairs() -> None:
    batch = replace(random_batch(pairs=2), scores=torch.tensor([2.0, 0.5, -1.0, 1.0]))
    loss, metrics = compute(LossSpec(name="reward_model", settings={}), batch)
    by_hand = (log(1 + exp(-1.5)) + log(1 + exp(2.0))) / 2
    assert loss.item() == pytest.approx(by_hand)
    assert finish(metrics)["reward_model/accuracy"] == 0.5
    assert finish(metrics)["reward_model/margin"] == pytest.approx(-0.25)


def test_dpo_refuses_a_pair_that_is_torn_apart_or_turned_round() -> None:
    batch = random_batch()
    spec = LossSpec(name="dpo", settings={})
    with pytest.raises(AssertionError, match="one micro-batch"):
        compute(spec, part(batch, [0, 1, 2, 4]))
    with pytest.raises(AssertionError, match="chosen side"):
        compute(spec, part(batch, [1, 0]))


def test_kto_worked_by_hand() -> None:
    batch = Batch(
        mask=torch.ones(2, 2),
        num_tokens=4,
        num_sequences=2,
        labels=torch.tensor([1.0, -1.0]),
        logprobs=torch.tensor([[-1.0, -1.0], [-2.0, -1.0]]),
        reference_logprobs=torch.full((2, 2), -2.0),
    )
    loss, _ = compute(LossSpec(name="kto", settings={"beta": 0.5, "kl_baseline": 1.0}), batch)
    good, bad = 1 / (1 + exp(-0.5 * (2.0 - 1.0))), 1 / (1 + exp(-0.5 * (1.0 - 1.0)))
    assert loss.item() == pytest.approx(((1 - good) + bad) / 2)


@pytest.mark.parametrize("control", ["clip_cov", "kl_cov"])
def test_entropy_control_holds_back_its_share_of_the_tokens(control: str) -> None:
    batch = random_batch(pairs=16, tokens=20)
    settings = {"entropy_control": control, "covariance_share": 0.05, "covariance_bounds": (0.2, 9.0)}

    def gradient(settings: dict[str, Any], batch: Batch = batch) -> tuple[Tensor, dict[str, float]]:
        assert batch.logprobs is not None
        learns = replace(batch, logprobs=batch.logprobs.clone().requires_grad_())
        loss, metrics = compute(LossSpec(name="policy", settings=settings), learns)
        loss.backward()
        assert learns.logprobs is not None
        assert learns.logprobs.grad is not None
        return learns.logprobs.grad, finish(metrics)

    held, metrics = gradient(settings)
    again, _ = gradient(settings)
    assert torch.equal(held, again)  # the same on every rank that has these sequences
    tokens = int(batch.mask.sum())
    assert metrics["policy/controlled_fraction"] == pytest.approx(int(0.05 * tokens) / tokens)
    plain, unclipped = gradient({}), gradient({"clip_low": 1e9, "clip_high": 1e9})
    before = plain[0] if control == "clip_cov" else unclipped[0]
    changed = (held != before) & (batch.mask > 0)
    assert int(changed.sum()) == int(0.05 * tokens)
    if control == "clip_cov":
        assert not held[changed].any()
    empty, metrics = gradient(settings, replace(batch, mask=torch.zeros_like(batch.mask)))
    assert not empty.any()


# --- distillation -------------------------------------------------------------------------------------


def test_distillation_is_the_mean_divergence_of_the_tokens_that_count() -> None:
    batch = random_batch()
    loss, metrics = compute(LossSpec(name="distillation", settings={}), batch)
    assert batch.logprobs is not None
    assert batch.reference_logprobs is not None
    gap = ((batch.logprobs - batch.reference_logprobs) * batch.mask).numpy().astype(np.float64)
    assert float(loss) == pytest.approx(float((gap**2).sum() / 2 / batch.mask.sum()), rel=1e-5)
    assert finish(metrics)["kl/mean"] == pytest.approx(gap.sum() / float(batch.mask.sum()), rel=1e-5)


@pytest.mark.parametrize(("estimator", "reverse"), [("k2", True), ("k3", False)])
def test_distillation_follows_the_divergence_over_the_whole_vocabulary(estimator: str, reverse: bool) -> None:
    """The mean over drawn tokens of the gradient of k2 is that of KL(student || teacher), of k3 that of
    KL(teacher || student), both written out over all tokens."""
    drawn = torch.randn(2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    teacher = drawn[1].log_softmax(-1)

    def gradient(of: Any) -> Tensor:
        logits = drawn[0].clone().requires_grad_()
        of(logits.log_softmax(-1)).backward()
        assert logits.grad is not None
        return logits.grad

    def exact(student: Tensor) -> Tensor:
        p, q = (student, teacher) if reverse else (teacher, student)
        return (p.exp() * (p - q)).sum()

    def sampled(student: Tensor) -> Tensor:
        token = torch.ones(1, 1)
        losses = [
            compute(
                LossSpec(name="distillation", settings={"estimator": estimator}),
                Batch(
                    mask=token,
                    num_tokens=1,
                    num_sequences=1,
                    logprobs=one * token,
                    reference_logprobs=its * token,
                ),
            )[0]
            for one, its in zip(student, teacher, strict=True)
        ]
        return (student.detach().exp() * torch.stack(losses)).sum()

    assert torch.allclose(gradient(sampled), gradient(exact), atol=1e-5)
