"""KL estimates: expectation, gradient, limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.algorithms.kl import KL_LIMIT, kl


def test_kl_estimates_average_to_the_divergence_and_only_k3_and_k2_stay_positive() -> None:
    generator = torch.Generator().manual_seed(1)
    shift, count = 0.3, 400_000  # p = N(0, 1), q = N(shift, 1): KL = shift^2 / 2
    x = torch.randn(count, generator=generator, dtype=torch.float64)
    log_ratio = ((x - shift) ** 2 - x**2) / 2
    k1, k2, k3 = (kl(log_ratio, name, torch.exp) for name in ("k1", "k2", "k3"))
    truth = shift**2 / 2
    assert k1.mean().item() == pytest.approx(truth, abs=2e-3)
    assert k3.mean().item() == pytest.approx(truth, abs=2e-3)
    assert k2.mean().item() == pytest.approx(truth * (1 + shift**2 / 4), abs=2e-3)  # its bias
    assert k1.min() < 0.0
    assert min(k2.min().item(), k3.min().item()) >= 0.0
    assert k3.std() < k1.std()


def test_k2_has_the_gradient_of_the_divergence_and_k1_none_on_average() -> None:
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    logp, logq = logits.log_softmax(0), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    p = logp.exp()
    (truth,) = torch.autograd.grad((p * (logp - logq)).sum(), logits, retain_graph=True)
    for name, expected in (("k2", truth), ("k1", torch.zeros_like(truth))):
        expectation = (p.detach() * kl(logp - logq, name, torch.exp)).sum()
        (found,) = torch.autograd.grad(expectation, logits, retain_graph=True)
        torch.testing.assert_close(found, expected)


def test_kl_is_the_same_for_tensors_and_arrays_and_k3_alone_has_a_limit() -> None:
    """As verl 0.9.1 has it, see kl_penalty_forward."""
    values = np.array([-1e4, -15.0, -3.0, 0.0, 2.0, 15.0, 1e4], dtype=np.float32)
    for name, largest in (("k1", 1e4), ("k2", 0.5e8), ("k3", KL_LIMIT)):
        array = kl(values, name, np.exp)
        np.testing.assert_allclose(array, kl(torch.from_numpy(values), name, torch.exp).numpy(), rtol=1e-6)
        assert np.abs(array).max() == largest


def test_k1_and_k2_of_far_tokens_equal_verls() -> None:
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    policy, reference = torch.tensor([-30.0, -1.0, -0.5]), torch.tensor([-0.5, -28.0, -1.0])
    for name in ("k1", "k2", "k3"):
        expected = core.kl_penalty_forward(policy, reference, name)
        torch.testing.assert_close(kl(policy - reference, name, torch.exp), expected)
