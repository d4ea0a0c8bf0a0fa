"""A scenario of two GPUs and a small model, whose design takes no second."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "title": "small",
    "base": {
        "cluster": {"node_groups": [{"gpu": "h100", "gpus": 2}]},
        "workload": {
            "algorithm": "grpo",
            "model": "0.5b",
            "prompts": 16,
            "samples": 2,
            "reward": {"rules": {}},
            "response_len": {"kind": "lognormal", "mean": 500, "max": 2048},
        },
        "run": {"steps": 100},
    },
}


def small(**more: Any) -> dict[str, Any]:
    """A scenario of two GPUs with these keys beside its base."""
    return {**SMALL, **more}


def based(**run: Any) -> dict[str, Any]:
    """The base with another `run`."""
    return {**SMALL["base"], "run": run}
