"""Gains that frameworks publish for asynchronous schedules and placements, beside what is predicted.

    python -m lab.gains          # published, predicted, and the seconds behind it

Each gain is a quotient of two step times of equal work, both priced by `rlhfsim.estimate` of two placements.
NeMo-RL's are rows of the measurement tables, turned into plans as `validate` does; the others are built
here, and what their source does not print is assumed the same on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

from lab.scoreboard.rows import rows_of
from rlhfsim.api import estimate
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.rlhf import specs_of
from rlhfsim.validation.kinds.rlhf import step_seconds
from rlhfsim.validation.rows import Row

THIRD = 1 / 3
"""A predicted gain that is off by no more than this share of the published one has its size."""
NEMO = "NVIDIA-NeMo/RL@docs/about/performance-summary.md"
FULLY = "volcengine/verl@docs/advance/fully_async.md (commit 2147009822)"
ONE_OFF = "volcengine/verl@docs/advance/one_step_off.md (commit b178a3cd56)"
AREAL = "arXiv 2505.24298, Table 1"
DSCHAT = "OpenRLHF/OpenRLHF@README.md (commit 391e1de4b0)"


Old = Literal["recompute", "rollout"]
"""Where old log-probs come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """One published quotient of two step times."""

    name: str
    source: str
    published: tuple[float, float]
    """Time before and after, in the source's unit."""
    before: Callable[[], float]
    """Predicted seconds for the same work."""
    after: Callable[[], float]

    @property
    def was(self) -> float:
        """The published gain."""
        return self.published[0] / self.published[1]

    @property
    def told(self) -> float:
        """The predicted gain."""
        return self.before() / self.after()

    @property
    def ordered(self) -> bool:
        """Whether the prediction says which side is faster as the source does."""
        return (self.was > 1) == (self.told > 1)

    @property
    def sized(self) -> bool:
        """Whether it is within a third of the published gain."""
        return self.ordered and abs(self.told / self.was - 1) <= THIRD


# --- NeMo-RL: rows of the measurement tables ----------------------------------------------------------


@cache
def _rows() -> tuple[Row, ...]:
    return tuple(rows_of("rlhf"))


@cache
def _row(model: str, release: str, schedule: str, gpu: str, gpus: int) -> Row:
    asked = {
        "actor_model": model,
        "framework": f"NeMo-RL {release}",
        "staleness": schedule,
        "gpu_type": gpu,
        "gpus": str(gpus),
        "precision_gen": "bf16",
    }
    (row,) = [
        r
        for r in _rows()
        if r.values["algorithm"] == "GRPO" and all(r.values[k] == v for k, v in asked.items())
    ]
    return assumptions.apply("rlhf", row)[0]


@cache
def _predicted(row_of: Callable[[], Row]) -> float:
    asked = specs_of(row_of())
    return estimate(asked.placement, asked.workload, asked.cluster).prediction.step_s


def _nemo(model: str, release: str, gpu: str, gpus: int) -> Gain:
    rows = [partial(_row, model, release, schedule, gpu, gpus) for schedule in ("On policy", "1-step Off")]
    known = [step_seconds(row()) or 0.0 for row in rows]
    return Gain(
        name=f"NeMo-RL {release}, {model}, {gpus} {gpu}: one step off against on-policy",
        source=NEMO,
        published=(known[0], known[1]),
        before=partial(_predicted, rows[0]),
        after=partial(_predicted, rows[1]),
    )


# --- placements built here ------------------------------------------------------------------------------


def _math(model: str, prompts: int, updates: int, old: Old, response: LogNormal) -> Workload:
    """GRPO of math problems with 16 samples a prompt, without KL."""
    return Workload(
        algorithm="grpo",
        model=model,
        prompts=prompts,
        samples=16,
        kl=False,
        reward=Reward(rules=Rules()),
        old_logprobs=old,
        mini_batches=updates,
        prompt_len=Fixed(value=150),
        response_len=response,
    )


def _step(placement: Placement, workload: Workload, gpu: str, framework: str | None) -> float:
    gpus = sum(pool.gpus for pool in placement.pools)
    cluster = Cluster(node_groups=(node_group(gpu, gpus),), framework=framework)
    return estimate(placement, workload, cluster).prediction.step_s


def _together(gpus: int, actor: Layout, tp: int, backend: Backend) -> Placement:
    engine = RolloutLayout(tp=tp, dp=gpus // tp, memory_utilization=0.8)
    return Placement(
        pools=(ResourcePool(name="all", gpus=gpus),),
        actor=RolePlacement(pool="all", offload_between=True, layout=actor),
        rollout=RolloutPlacement(pool="all", sleep=2, layout=engine),
        weight_path="ipc",
        backend=backend,
    )


def _apart(
    train: int, rollout: int, actor: Layout, tp: int, backend: Backend, schedule: Schedule
) -> Placement:
    engine = RolloutLayout(tp=tp, dp=rollout // tp, memory_utilization=0.8)
    return Placement(
        pools=(
            ResourcePool(name="train", gpus=train),
            ResourcePool(name="rollout", start=train, gpus=rollout),
        ),
        actor=RolePlacement(pool="train", layout=actor),
        rollout=RolloutPlacement(pool="rollout", sleep=0, layout=engine),
        weight_path="broadcast",
        backend=backend,
        schedule=schedule,
    )


def _verl_layout(gpus: int) -> Layout:
    return Layout(cp=4, dp=gpus // 4, zero=3, pack_tokens=61_440, score_pack_tokens=92_160)


MATH_7B = LogNormal(mean=1500, sigma=1.0, max=28_672)
"""Qwen2.5-Math-7B in verl's asynchronous runs; the mean is not printed: one with which generation, log-probs and update of
the co-located run on 32 GPUs are near their printed times."""


@cache
def _verl_together(gpus: int, response: LogNormal = MATH_7B) -> float:
    placement = _together(gpus, _verl_layout(gpus), 4, "fsdp2")
    return _step(placement, _math("qwen2.5-7b", 512, 16, "recompute", response), "h20", "verl")


@cache
def _verl_fully(gpus: int) -> float:
    """Seconds for 512 prompts: four steps of 128, six batches of which may be under way (staleness 0.5)."""
    schedule = Schedule(staleness=5, partial_rollout=True)
    placement = _apart(gpus // 2, gpus // 2, _verl_layout(gpus // 2), 4, "fsdp2", schedule)
    return 4 * _step(placement, _math("qwen2.5-7b", 128, 4, "rollout", MATH_7B), "h20", "verl")


SHORT = LogNormal(mean=600, sigma=1.0, max=20_480)
"""The same model in its first 100 steps; not printed either, chosen by the printed update in the same way."""


@cache
def _verl_one_off() -> float:
    placement = _apart(12, 4, _verl_layout(12), 2, "fsdp2", Schedule(staleness=1))
    return _step(placement, _math("qwen2.5-7b", 512, 16, "recompute", SHORT), "h20", "verl")


LONG = LogNormal(mean=14_000, sigma=0.7, max=31_744)
"""Reasoning with 31k tokens at most; the mean is not printed: RLinf prints 13,975 for the 1.5B model (27,648 at most)."""


@cache
def _areal(model: str, nodes: int, asynchronous: bool) -> float:
    gpus, work = 8 * nodes, _math(model, 512, 4, "recompute", LONG)
    train = gpus // 4 if asynchronous else gpus
    actor = Layout(dp=train, zero=1, pack_tokens=32_768)
    if not asynchronous:
        return _step(_together(gpus, actor, 1, "megatron"), work, "h800", None)
    schedule = Schedule(staleness=4, partial_rollout=True)
    return _step(_apart(train, gpus - train, actor, 1, "megatron", schedule), work, "h800", None)


# --- OpenRLHF over DeepSpeed-Chat -----------------------------------------------------------------------


def _ppo(model: str, *, padded: bool) -> Workload:
    return Workload(
        model=model,
        prompts=1024,
        mini_batches=8,
        packing=not padded,
        prompt_len=Fixed(value=1024),
        response_len=Fixed(value=1024),
    )


@cache
def _deepspeed_chat(model: str, gpus: int) -> float:
    """All roles on all GPUs; generation eager, in fixed batches of four sequences, on gathered weights."""
    frozen = RolePlacement(pool="all", layout=Layout(dp=gpus, zero=3, micro_batch=4))
    trained = RolePlacement(
        pool="all", layout=Layout(dp=gpus, zero=3, micro_batch=4, offload_optimizer="cpu")
    )
    engine = RolloutLayout(dp=gpus, max_num_seqs=4, cuda_graphs=False, memory_utilization=0.5)
    placement = Placement(
        pools=(ResourcePool(name="all", gpus=gpus),),
        actor=trained,
        critic=trained,
        reference=frozen,
        reward=frozen,
        rollout=RolloutPlacement(pool="all", sleep=2, layout=engine),
        weight_path="reshard",
        backend="deepspeed",
    )
    return _step(placement, _ppo(model, padded=True), "a800", "deepspeed-chat")


@cache
def _openrlhf(model: str, gpus: int, tp: int) -> float:
    """Actor and reference, critic and reward share three eighths of the GPUs each; engines have the rest.

    Near the 1 : 1 : 1 that its tuning guide recommends, with `--colocate_actor_ref` and `--colocate_critic_reward`.
    """
    size = gpus * 3 // 8
    trained = Layout(dp=size, zero=3, micro_batch=4, offload_optimizer="cpu")
    frozen = Layout(dp=size, zero=3, micro_batch=4)
    placement = Placement(
        pools=(
            ResourcePool(name="actor", gpus=size),
            ResourcePool(name="critic", start=size, gpus=size),
            ResourcePool(name="rollout", start=2 * size, gpus=gpus // 4),
        ),
        actor=RolePlacement(pool="actor", layout=trained),
        critic=RolePlacement(pool="critic", layout=trained),
        reference=RolePlacement(pool="actor", layout=frozen),
        reward=RolePlacement(pool="critic", layout=frozen),
        rollout=RolloutPlacement(pool="rollout", sleep=0, layout=RolloutLayout(tp=tp, dp=gpus // 4 // tp)),
        weight_path="broadcast",
        backend="deepspeed",
    )
    return _step(placement, _ppo(model, padded=False), "a800", "openrlhf")


# --- the table ------------------------------------------------------------------------------------------


def _fully(gpus: int, published: tuple[float, float]) -> Gain:
    return Gain(
        name=f"verl, Qwen2.5-Math-7B, {gpus} H20: fully asynchronous against co-located",
        source=FULLY,
        published=published,
        before=partial(_verl_together, gpus),
        after=partial(_verl_fully, gpus),
    )


def _paper(model: str, nodes: int, published: tuple[float, float]) -> Gain:
    return Gain(
        name=f"AReaL, {model}, {nodes} nodes of 8 H800: asynchronous against synchronous",
        source=AREAL,
        published=published,
        before=partial(_areal, model, nodes, False),
        after=partial(_areal, model, nodes, True),
    )


def _roles(label: str, model: str, gpus: int, tp: int, published: tuple[float, float]) -> Gain:
    return Gain(
        name=f"{label}, {gpus} A800: OpenRLHF against DeepSpeed-Chat",
        source=DSCHAT,
        published=published,
        before=partial(_deepspeed_chat, model, gpus),
        after=partial(_openrlhf, model, gpus, tp),
    )


@cache
def gains() -> tuple[Gain, ...]:
    """Every row of the table."""
    return (
        _nemo("LLAMA3.1_8B", "v0.5", "H100", 16),
        _nemo("Qwen3-30B3A", "v0.6", "H100", 32),
        _nemo("Qwen3-30B3A", "v0.4", "H100", 32),
        _nemo("Qwen3-235B", "v0.6", "H100", 256),
        _nemo("DeepSeek V3", "v0.6", "H100", 512),
        _nemo("LLAMA3.1_8B", "v0.5", "GB200", 8),
        _nemo("Qwen3-235B", "v0.6", "GB200", 128),
        _nemo("DeepSeek V3", "v0.6", "GB200", 256),
        _fully(32, (790.10, 294.77)),
        _fully(64, (365.28, 189.26)),
        _fully(128, (356.30, 150.63)),
        Gain(
            name="verl, Qwen2.5-Math-7B, 16 H20: one step off (12 and 4) against co-located",
            source=ONE_OFF,
            published=(749, 520),
            before=partial(_verl_together, 16, SHORT),
            after=_verl_one_off,
        ),
        _paper("deepseek-r1-distill-qwen-1.5b", 16, (41.0, 14.8)),
        _paper("deepseek-r1-distill-qwen-7b", 24, (57.7, 25.4)),
        _roles("LLaMA2 7B", "llama-2-7b", 16, 1, (855.09, 471.11)),
        _roles("LLaMA2 13B", "llama-2-13b", 32, 2, (1528.93, 608.93)),
        _roles("LLaMA2 70B", "llama-2-70b", 32, 4, (10407.0, 4488.53)),
    )


def rows() -> str:
    """The rows of the table, in Markdown."""
    lines = []
    for gain in gains():
        words = ["yes" if good else "**no**" for good in (gain.ordered, gain.sized)]
        lines.append(f"| {gain.name} | {gain.was:.2f} | {gain.told:.2f} | {' | '.join(words)} |\n")
    return "".join(lines)


if __name__ == "__main__":
    for one in gains():
        print(
            f"{one.was:5.2f} {one.told:5.2f}  {one.before():8.1f} s {one.after():8.1f} s  {one.name}; {one.source}"
        )
