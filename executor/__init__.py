"""Runs a plan as a real RLHF job on Ray, DeepSpeed and vLLM; docs/executor.md is its page."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = (
    "CISPO",
    "DAPO",
    "DPO",
    "GRPO",
    "GSPO",
    "KTO",
    "PPO",
    "RLOO",
    "SFT",
    "DrGRPO",
    "ReinforcePlusPlus",
    "RewardModel",
)


def __getattr__(name: str) -> Any:
    """The runs of `executor.trainers`, which needs the planner: nothing else here does."""
    if name in __all__:
        return getattr(importlib.import_module("executor.trainers"), name)
    raise AttributeError(f"module 'executor' has no attribute {name!r}")
