"""How long a grid of what-if points takes: each designed anew by the exact search, on 2 cores, beside the
limit.

    python lab/benchmarks/whatif_speed.py [--points 1000] [--measured N] [--allow async|none|both]

Points are drawn without repetition from 2,304 questions about 64 GPUs and 70B: four GPUs, two backends, PPO
and GRPO, three batches, eight response lengths (three long-tailed), three oversubscriptions, synchronous
or async allowed. No two points ask the same. They are sorted so that neighbours share layouts, bytes and
prices of roles, and go through the processes of `rlhfsim whatif`, which take runs of neighbours.
`--measured` takes about N of the points, in whole runs from all over the grid, where time is short.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from itertools import product

from process import bind, pace

import rlhfsim
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.workload.lengths import Fixed, Lengths, LogNormal
from rlhfsim.specs.workload.workload import Algorithm
from rlhfsim.what_if.scenarios.workers import local

LIMIT_S, LIMIT_POINTS, LIMIT_CORES = 300.0, 1000, 2
GPUS = ("h100", "h200", "b200", "a100-80")
BACKENDS: tuple[Backend, ...] = ("deepspeed", "megatron")
ALGORITHMS: tuple[tuple[Algorithm, int], ...] = (("ppo", 1), ("grpo", 8))
"""Algorithm and samples of a prompt."""
SEQUENCES = (256, 512, 1024)
RESPONSES: tuple[Lengths, ...] = (
    *(Fixed(value=tokens) for tokens in (512, 1024, 2048, 4096, 8192)),
    LogNormal(mean=500, sigma=0.8, max=2048),
    LogNormal(mean=1000, sigma=1.0, max=4096),
    LogNormal(mean=2000, sigma=0.8, max=8192),
)
ALLOWED: dict[str, tuple[frozenset[str], ...]] = {
    "none": (frozenset(),),
    "async": (frozenset({"async"}),),
    "both": (frozenset(), frozenset({"async"})),
}
OVERSUBSCRIPTIONS = (1.0, 2.0, 4.0)
NEIGHBOURS = 12
"""Points of a run where `--measured` takes runs."""
SEED = 7


@dataclass(frozen=True, slots=True)
class Point:
    """A question; the fields that share most come last."""

    gpu: str
    backend: Backend
    algorithm: tuple[Algorithm, int]
    sequences: int
    response: Lengths
    oversubscription: float
    allow: frozenset[str]

    @property
    def kind(self) -> str:
        """What decides how long it takes."""
        lengths = "fixed lengths" if isinstance(self.response, Fixed) else "long-tailed"
        return f"{'async allowed' if self.allow else 'synchronous'}, {lengths}"


def main() -> None:
    """Print what the grid took."""
    parser = argparse.ArgumentParser(description="Speed of what-if grids")
    parser.add_argument("--points", type=int, default=LIMIT_POINTS)
    parser.add_argument("--allow", choices=sorted(ALLOWED), default="both")
    parser.add_argument("--measured", type=int, help="about so many of them alone")
    asked = parser.parse_args()
    cores, points = bind(LIMIT_CORES), grid(asked.points, asked.allow)
    points = spread(points, asked.measured or len(points))
    print(f"{cores} cores; {pace()}")
    begin = time.perf_counter()
    found = _all(points, cores)
    wall = time.perf_counter() - begin
    _print(points, [found[i] for i in range(len(points))], wall, cores)


def grid(count: int, allow: str) -> list[Point]:
    """Different points, neighbours side by side."""
    every = [
        Point(*values)
        for values in product(
            GPUS, BACKENDS, ALGORITHMS, SEQUENCES, RESPONSES, OVERSUBSCRIPTIONS, ALLOWED[allow]
        )
    ]
    chosen = random.Random(SEED).sample(range(len(every)), min(count, len(every)))
    return [every[i] for i in sorted(chosen)]


def spread(points: list[Point], count: int) -> list[Point]:
    """About `count` points in runs of neighbours, evenly spaced."""
    runs = [points[i : i + NEIGHBOURS] for i in range(0, len(points), NEIGHBOURS)]
    every = max(1, round(len(points) / count))
    return [point for run in runs[every // 2 :: every] for point in run]


def _all(points: list[Point], cores: int) -> dict[int, float]:
    """Seconds of each point as `rlhfsim whatif` searches them; progress on stderr."""
    took: dict[int, float] = {}
    for done in local(cores)([request(p) for p in points]):
        if done is not None:
            took[done[0]] = done[1].seconds
            print(f"\r{len(took):,} of {len(points):,} points", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return took


def request(point: Point) -> rlhfsim.Request:
    """The question of a point."""
    name, samples = point.algorithm
    workload = rlhfsim.Workload(
        model="70b",
        algorithm=name,
        prompts=point.sequences // samples,
        samples=samples,
        response_len=point.response,
    )
    cluster = rlhfsim.parse_cluster(64, point.gpu, oversubscription=point.oversubscription)
    return rlhfsim.Request(cluster=cluster, workload=workload, backend=point.backend, allow=point.allow)


def _print(points: list[Point], took: list[float], wall: float, cores: int) -> None:
    print(f"{'points':<34}{'number':>8}{'mean s':>9}{'median s':>10}{'most s':>9}")
    for kind in dict.fromkeys(["all", *sorted({p.kind for p in points})]):
        some = sorted(s for p, s in zip(points, took, strict=True) if kind in ("all", p.kind))
        print(
            f"{kind:<34}{len(some):>8,}{sum(some) / len(some):>9.2f}{some[len(some) // 2]:>10.2f}{some[-1]:>9.2f}"
        )
    each = wall * cores / len(points)
    limit = LIMIT_S * LIMIT_CORES / LIMIT_POINTS
    print(
        f"{len(set(points)):,} distinct points of {len(points):,} in {wall:.1f} s: {len(points) / wall:.2f} a second, {each:.2f} core-seconds each"
    )
    print(
        f"1,000 points on 2 cores at this pace: {each * LIMIT_POINTS / LIMIT_CORES:.0f} s; "
        f"limit {LIMIT_S:.0f} s ({limit:.2f} core-seconds a point)  {'ok' if each <= limit else 'MISSED'}"
    )


if __name__ == "__main__":
    main()
