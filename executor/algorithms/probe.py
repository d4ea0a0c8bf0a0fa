"""The parts of an algorithm that the user brings, tried on two prompts before anything starts."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from executor.algorithms import losses, recipes
from executor.algorithms.advantages import estimated
from executor.algorithms.batch import collate
from executor.algorithms.custom import Parts
from executor.samples import Sample
from executor.settings import Settings
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.specs.workload.workload import Workload

LENGTHS, MAX_TOKENS = (3, 2, 4, 1), 8


def check(settings: Settings, plan: Plan) -> None:
    """Each part of `custom` is made and called once.

    Raises:
        RlhfsimError: it fails, or gives what cannot be used; names the part.
    """
    custom, workload = settings.custom, plan.workload
    parts = Parts(custom=custom, with_reference=workload.has_reference)
    if hasattr(parts.made.get("sampler"), "update") and plan.placement.schedule.asynchronous:
        raise RlhfsimError(
            "custom-sampler",
            "custom.sampler follows the training (it has update), but an asynchronous plan asks ahead of it",
            help="take a sampler without update, or a synchronous plan",
        )
    if "sampler" in parts.made:
        parts.positions(0, workload.gen_prompts, None)
    if not workload.generates:
        return
    samples = parts.filtered(_samples(workload), 0)
    with tempfile.TemporaryDirectory(prefix="rlhfsim-probe-") as folder:
        parts.save(Path(folder))
        parts.load(Path(folder))
    if "advantages" in parts.made:
        samples = estimated(
            lambda seen: parts.estimates(seen, 0, critic=workload.has_critic),
            workload.algorithm,
            samples,
            settings.algorithm,
            MAX_TOKENS,
        )
    if custom.loss is not None:
        _check_loss(settings, workload)


def _check_loss(settings: Settings, workload: Workload) -> None:
    """A finite loss with a finite gradient that reaches the log-probs."""
    own = settings.custom.loss
    assert own is not None
    samples = _samples(workload)
    logprobs = torch.full((len(samples), max(LENGTHS)), -1.0, requires_grad=True)
    batch = collate(samples, num_tokens=sum(LENGTHS), num_sequences=len(samples), logprobs=logprobs)
    alone = replace(settings.algorithm, kl_coefficient=0.0, entropy_coefficient=0.0)
    spec = recipes.actor_loss(workload, alone, max_tokens=MAX_TOKENS, custom=own)
    loss, _ = losses.compute(spec, batch)
    if loss.requires_grad:
        loss.backward()
    gradient = logprobs.grad
    if gradient is None or not (torch.isfinite(loss) and gradient.any() and torch.isfinite(gradient).all()):
        why = (
            "has no gradient"
            if gradient is None or not gradient.any()
            else "is not finite, or its gradient is not"
        )
        raise RlhfsimError(
            "custom-loss",
            f"custom.loss {own.target}: the loss of a probe of {len(samples)} samples {why}",
            help="compute its terms from batch.logprobs, under batch.mask",
        )


def _samples(workload: Workload) -> list[Sample]:
    """Two prompts, two samples each, one of them better; with what the plan's calls find out."""
    rows = [np.full(length, -1.25, np.float32) for length in LENGTHS]
    return [
        Sample(
            id=number,
            group=number // 2,
            prompt=np.arange(2),
            response=np.arange(len(row)),
            versions=np.zeros(len(row), np.int32),
            rollout_logprobs=row,
            old_logprobs=row + np.float32(0.125),
            reference_logprobs=row if workload.has_reference else None,
            values=np.zeros(len(row), np.float32) if workload.has_critic else None,
            reward=float(number % 2),
            rewards={"answer": float(number % 2)},
            advantages=np.full(len(row), 2 * (number % 2) - 1, np.float32),
            answer="1",
            meta={},
        )
        for number, row in enumerate(rows)
    ]
