"""Which head the loss of a trainer of TRL has, by release."""

from __future__ import annotations

from rlhfsim.interchange.releases import numbers
from rlhfsim.specs.frameworks.files import heads_of
from rlhfsim.specs.placement.heads import UNFUSED, Head

FUSED_SINCE = {"SFT": (1, 14), "DPO": None}
"""Trainer -> first release whose loss goes through tiles; None: none does."""
USUALLY_SINCE = (1, 15)
"""The same of the other trainers."""


def tiled(trainer: str, version: str | None) -> bool:
    """Whether the loss of a trainer (`GRPOTrainer`) goes through tiles; None: in the latest release."""
    since = next((first for name, first in FUSED_SINCE.items() if trainer.startswith(name)), USUALLY_SINCE)
    return since is not None and (version is None or numbers(version)[:2] >= since)


def head_of(trainer: str, version: str | None) -> Head:
    """What surrounds the logits in the loss of a trainer."""
    if tiled(trainer, version):
        return heads_of("trl")["tiled"]
    return UNFUSED if trainer.startswith("SFT") else heads_of("trl")["whole"]
