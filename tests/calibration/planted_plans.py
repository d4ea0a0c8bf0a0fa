"""Small plans for planted runs, their true coefficients, and run folders as `rlhfsim launch` leaves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from lab.planted import Flaws, drawn, planted_run, planted_trace
from rlhfsim.api import estimate
from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.predict import pricer_of
from rlhfsim.calibration.priors import Prior, priors
from rlhfsim.plan import Plan, write_plan
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile, parse_cluster
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.trace import write_trace

GPU = "h100_sxm"


def plan(
    *,
    model: str = "qwen2.5-1.5b",
    prompts: int = 64,
    prompt: int = 200,
    response: int = 1000,
    gpus: int = 8,
    tp: int = 1,
    apart: bool = False,
    gpu: str = GPU,
) -> Plan:
    """GRPO with rule rewards: all roles on `gpus`, or with the rollout on as many of its own."""
    workload = Workload(
        algorithm="grpo",
        model=model,
        prompts=prompts,
        samples=8,
        prompt_len=Fixed(value=prompt),
        response_len=Fixed(value=response),
        reward=Reward(model=None, rules=Rules()),
    )
    pools = (
        ResourcePool(name="all", gpus=gpus),
        *([ResourcePool(name="rollout", start=gpus, gpus=gpus)] if apart else []),
    )
    role = RolePlacement(pool="all", layout=Layout(dp=gpus, zero=3))
    rollout = RolloutPlacement(
        pool=pools[-1].name, layout=RolloutLayout(tp=tp, dp=gpus // tp, memory_utilization=0.5)
    )
    placement = Placement(
        pools=pools,
        actor=role,
        reference=role,
        rollout=rollout,
        weight_path="broadcast" if apart else "ipc",
        backend="deepspeed" if apart else "fsdp2",
    )
    return estimate(placement, workload, parse_cluster(gpus * len(pools), gpu))


def six_plans() -> tuple[Plan, ...]:
    """Plans that differ in model, batch, lengths, layout, nodes and architecture."""
    return (
        plan(model="qwen2.5-7b", tp=2),
        plan(response=3000, prompts=32),
        plan(gpus=16, prompt=800),
        plan(model="qwen2.5-0.5b", prompts=128, gpus=4),
        plan(),
        plan(gpus=4, apart=True),
    )


def beliefs(plans: tuple[Plan, ...], profile: Profile) -> dict[str, Prior]:
    """Priors of every coefficient that any of the plans reads."""
    rng = np.random.default_rng(0)
    read = {
        name for p in plans for name in pricer_of(planted_run(p, profile, {}, rng, name="r"), profile).read()
    }
    return priors(profile, sorted(read))


def truth(known: Mapping[str, Prior], rng: np.random.Generator) -> dict[str, float]:
    """A world as the priors have it."""
    return {name: drawn(prior, rng) for name, prior in known.items()}


def planted_runs(
    plans: tuple[Plan, ...],
    profile: Profile,
    values: Mapping[str, float],
    rng: np.random.Generator,
    flaws: Mapping[int, Flaws] | None = None,
) -> tuple[Observation, ...]:
    """One run of every plan in that world; `flaws` by run."""
    return tuple(
        planted_run(p, profile, values, rng, name=f"r{i}", flaws=(flaws or {}).get(i))
        for i, p in enumerate(plans)
    )


def run_folder(
    folder: Path,
    made: Plan,
    values: Mapping[str, float],
    seed: int = 0,
    profile: Profile | None = None,
    flaws: Flaws | None = None,
) -> Path:
    """A run folder of `rlhfsim launch` on a planted cluster."""
    folder.mkdir(parents=True)
    write_plan(folder / "plan.json", made)
    own = profile or load_profile(made.hardware[0].profile)
    trace = planted_trace(made, own, values, np.random.default_rng(seed), flaws=flaws)
    write_trace(folder / "trace.json", replace(trace, source="measured"))
    rows = [
        {"step": i, "response/length_mean": made.workload.response_len.maximum} for i in range(trace.steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "environment.json").write_text(
        json.dumps({"libraries": {"vllm": "0.11.0"}, "devices": ["H100"] * 2})
    )
    return folder
