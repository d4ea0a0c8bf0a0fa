"""Everything random in a simulated run, from one seed: lengths, reward times, stragglers. Off by default.

    draws = Draws(setting, Noise(lengths=True, reward_spread=0.3, straggler_share=0.01,
    straggler_slowdown=1.2), seed=1)
    draws.lengths(step)          # response lengths of that step
    draws.program(None, step)    # the priced step with them, slow ranks and reward times
    draws.disturbed(call, step)  # the priced call as it runs in that step
    draws.pace("trainer"), draws.replica_paces()

Each draw has a stream of its own, keyed by seed, what is drawn and the step, so the same seed gives the same
results whatever else is drawn and in whatever order.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from zlib import crc32

import numpy as np

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Cost, total
from rlhfsim.rollout.engine_step import Floats
from rlhfsim.rollout.schedule import known_lengths
from rlhfsim.specs.loading import checked
from rlhfsim.specs.workload.lengths import draw
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.calls import CallSetting, requests_of
from rlhfsim.step.iteration import Program, program
from rlhfsim.step.timetable import Step

GPU_RESOURCES = frozenset({"compute", "hbm", "overhead", "bubble", "tail"})
"""What a slow rank stretches; links keep their rate."""


@checked
@frozen
class Noise:
    """What varies between steps."""

    lengths: bool = False
    """Response lengths, with dynamic sampling the generation batches, and turns and answers of an environment
    are drawn anew for every step."""
    reward_spread: float = 0.0
    """Standard deviation of the log of reward times (rules and reward models); their mean stays."""
    straggler_share: float = 0.0
    """Share of the GPUs that are slow, all through the run."""
    straggler_slowdown: float = 1.0
    """Time of a slow GPU over that of a good one."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        limits = {"reward_spread": (0, 4), "straggler_share": (0, 1), "straggler_slowdown": (1, 100)}
        for name, (low, high) in limits.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise RlhfsimError(
                    "bad-value",
                    f"{name} {value} is not between {low} and {high}",
                    help=f"give {name} from {low} to {high}",
                )

    @property
    def quiet(self) -> bool:
        """Whether nothing is random."""
        return not (self.lengths or self.reward_spread or self._slow)

    @property
    def _slow(self) -> bool:
        return self.straggler_share > 0 and self.straggler_slowdown > 1


def generator(seed: int, what: str, step: int = 0) -> np.random.Generator:
    """The stream of one draw."""
    return np.random.default_rng([seed, crc32(what.encode()), step])


class Draws:
    """The draws of one run."""

    def __init__(self, setting: CallSetting, noise: Noise | None = None, seed: int | None = None) -> None:
        self.base = setting
        self.noise = noise or Noise()
        self.seed = setting.workload.seed if seed is None else seed
        self._programs: dict[float | None, Program] = {}

    def lengths(self, step: int) -> Floats:
        """Response lengths of a step, tokens: the same ones in another order, or drawn anew."""
        workload = self.base.workload
        rng = generator(self.seed, "lengths", step)
        if self.noise.lengths:
            return np.maximum(draw(workload.response_len, self._sequences(step), rng), 1.0)
        return rng.permutation(known_lengths(requests_of(self.base), self.base.drawn))

    def _sequences(self, step: int) -> int:
        """Sequences that a step generates."""
        requests, workload = requests_of(self.base), self.base.workload
        sampling, schedule = workload.dynamic_sampling, self.base.placement.schedule
        if sampling is None or schedule.continuous:
            return requests.sequences
        batches = sampling.drawn_batches(workload.prompts, generator(self.seed, "kept groups", step))
        return batches * requests.sequences

    def program(self, kv_tokens: float | None, step: int) -> Program:
        """The priced calls of a step as they run: its lengths, reward times and slow ranks."""
        if self.noise.lengths:
            drawn = tuple(self.lengths(step).tolist())
            priced = program(replace(self.base, drawn=drawn, workload=self._workload(step)), kv_tokens)
        else:
            priced = self._usual(kv_tokens)
        return replace(priced, steps=tuple(self.disturbed(call, step) for call in priced.steps))

    def _workload(self, step: int) -> Workload:
        """With an environment its seed is the step's: turns and answers are drawn from it."""
        workload = self.base.workload
        if workload.environment is None:
            return workload
        return replace(workload, seed=int(generator(self.seed, "answers", step).integers(2**31)))

    def _usual(self, kv_tokens: float | None) -> Program:
        """The priced calls of a quiet step."""
        if kv_tokens not in self._programs:
            self._programs[kv_tokens] = program(self.base, kv_tokens)
        return self._programs[kv_tokens]

    def disturbed(self, call: Step, step: int) -> Step:
        """A call as it runs in a step: a collective call waits for its slowest rank."""
        cost = call.cost
        if self.noise.reward_spread and call.name in ("rules.score", "reward.score"):
            factor = self.reward_factor(call.name, step)
            cost, call = cost.scaled(factor), replace(call, latency_s=call.latency_s * factor)
        slow = max((self.pace(pool) for pool in call.pools), default=1.0)
        if slow > 1:
            cost = stretched(cost, slow)
        return call if cost is call.cost else replace(call, cost=cost)

    def reward_factor(self, name: str, step: int) -> float:
        """Reward time of a step over its mean: exp(sigma z - sigma^2 / 2)."""
        sigma = self.noise.reward_spread
        z = float(generator(self.seed, name, step).standard_normal())
        return float(np.exp(sigma * z - sigma**2 / 2))

    @cached_property
    def stragglers(self) -> frozenset[int]:
        """Slow GPUs, counted over the cluster: the share rounded, at least one where it is above 0."""
        if not self.noise._slow:
            return frozenset()
        gpus = sum(pool.gpus for pool in self.base.cluster.node_groups)
        count = min(gpus, max(1, round(self.noise.straggler_share * gpus)))
        chosen = generator(self.seed, "stragglers").choice(gpus, size=count, replace=False)
        return frozenset(int(rank) for rank in chosen)

    def pace(self, pool: str) -> float:
        """Time of a call that needs every GPU of a pool over its price."""
        placed = next((p for p in self.base.placement.pools if p.name == pool), None)
        return self._pace(placed.start, placed.gpus) if placed is not None else 1.0

    def replica_paces(self) -> tuple[float, ...]:
        """The same for each rollout replica, which holds a block of its pool's GPUs."""
        role = self.base.placement.rollout
        assert role is not None
        start, each = self.base.placement.pool(role.pool).start, role.layout.replica_gpus
        return tuple(self._pace(start + r * each, each) for r in range(role.layout.dp))

    def _pace(self, start: int, gpus: int) -> float:
        slow = any(start <= rank < start + gpus for rank in self.stragglers)
        return self.noise.straggler_slowdown if slow else 1.0


def stretched(cost: Cost, factor: float) -> Cost:
    """The cost with what runs on the GPU itself `factor` times as long."""
    slow = (Cost(parts=(p,)).scaled(factor if p.resource in GPU_RESOURCES else 1.0) for p in cost.parts)
    return total(slow)
