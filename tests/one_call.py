"""One training or scoring call under one layout, for tests that name its parts one by one."""

from __future__ import annotations

from typing import Any

from rlhfsim.kernels.cost import Cost
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.sequences import Sequences
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.software import default_software
from rlhfsim.training import forward as scoring
from rlhfsim.training.training import TrainedModel


def train(
    device: Device,
    model: ModelSpec,
    layout: Layout,
    sequences: Sequences,
    *,
    pack_len: float | None = None,
    **given: Any,
) -> Cost:
    """All optimizer steps of one pass over `sequences`, with their updates."""
    given = {"software": default_software(given["backend"]), **given}
    asked = TrainedModel(device, model, sequences, **given)
    return asked.passes(layout, pack_len) + asked.updates(layout)


def forward(
    device: Device,
    model: ModelSpec,
    layout: Layout,
    sequences: Sequences,
    *,
    pack_len: float | None = None,
    **given: Any,
) -> Cost:
    """One pass over `sequences` without gradients."""
    given = {"software": default_software(given["backend"]), **given}
    return scoring.forward(scoring.ScoredModel(device, model, sequences, **given), layout, pack_len)
