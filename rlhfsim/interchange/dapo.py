"""DAPO in the keys of each framework: clip-higher, token mean, overlong shaping, or the part it lacks.

Dynamic sampling is a field of the workload and is written by each framework's own rows. arXiv 2503.14476.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlhfsim.interchange.export import Setting, Unsaid, Value, longest_response
from rlhfsim.plan import Plan
from rlhfsim.specs.workload.workload import CLIP_RANGES

TITLE = "DAPO: clip-higher, token mean, overlong shaping"
BUFFER, LIMIT = "buffer", "limit"
"""Stand for the last tokens of a response that are punished, and for its limit."""
BUFFER_SHARE = 0.2
"""Share of the limit of a response: 4,096 of 20,480 tokens (section 4.1)."""
LOW, HIGH = CLIP_RANGES["dapo"]
_SHAPING = "grpo.reward_shaping"
KEYS: Mapping[str, Mapping[str, Value]] = {
    "openrlhf": {
        "--actor.eps_clip_low_high": f"{LOW} {HIGH}",
        "--reward.overlong_buffer_len": BUFFER,
        "--reward.overlong_penalty_factor": 1.0,
    },
    "nemo-rl": {
        "loss_fn.ratio_clip_min": LOW,
        "loss_fn.ratio_clip_max": HIGH,
        "loss_fn.token_level_loss": True,
        f"{_SHAPING}.enabled": True,
        f"{_SHAPING}.overlong_buffer_length": BUFFER,
        f"{_SHAPING}.overlong_buffer_penalty": 1.0,
        f"{_SHAPING}.max_response_length": LIMIT,
    },
    "skyrl": {
        "trainer.algorithm.eps_clip_low": LOW,
        "trainer.algorithm.eps_clip_high": HIGH,
        "trainer.algorithm.loss_reduction": "token_mean",
    },
    "slime": {"--eps-clip": LOW, "--eps-clip-high": HIGH, "--calculate-per-token-loss": True},
    "areal": {
        "actor.eps_clip": LOW,
        "actor.eps_clip_higher": HIGH,
        "actor.overlong_reward_penalty": True,
        "actor.overlong_tokens": BUFFER,
        "actor.overlong_penalty_factor": 1.0,
    },
}
"""Clip ranges of verl and TRL lie with those of their other algorithms; token mean is the default of verl,
OpenRLHF and AReaL."""
UNFILTERED = "groups that are generated until they differ, which this plan of DAPO leaves out"
SHAPING = "overlong shaping of rewards"
LACKS: Mapping[str, Mapping[str, str]] = {
    "verl": {SHAPING: "rewards as they are: reward.reward_manager.name=dapo, with arguments of its own"},
    "trl": {SHAPING: "rewards as they are: trl.rewards.get_soft_overlong_punishment is one more function"},
    "skyrl": {SHAPING: "rewards as they are: it is a trainer of examples/algorithms/dapo"},
    "slime": {SHAPING: "rewards as they are: it is the reward function's"},
}


def dapo_settings(plan: Plan, framework: str) -> Iterator[Setting]:
    """The keys of DAPO that a framework has; none for other algorithms."""
    if plan.workload.algorithm != "dapo":
        return
    limit = longest_response(plan)
    stand_ins: Mapping[Value, Value] = {BUFFER: round(BUFFER_SHARE * limit), LIMIT: limit}
    for key, value in KEYS.get(framework, {}).items():
        found = stand_ins.get(value, value) if isinstance(value, str) else value
        yield Setting(key, found, "DAPO, arXiv 2503.14476")


def dapo_unsaid(plan: Plan, framework: str) -> Iterator[Unsaid]:
    """The parts of DAPO that a framework has no key for, or the plan does not ask for."""
    if plan.workload.algorithm != "dapo":
        return
    yield from (Unsaid(w, i) for w, i in LACKS.get(framework, {}).items())
    if plan.workload.dynamic_sampling is None:
        yield Unsaid(UNFILTERED, "every group is trained on; --dynamic-sampling SHARE plans it")
