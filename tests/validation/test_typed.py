"""Published RL runs typed into `rlhfsim estimate` as their tables print them, against what `validate` says."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from lab.scoreboard.rows import rows_of
from rlhfsim.cli.estimate import estimate
from rlhfsim.frameworks.configuration.described import RunSpecs
from rlhfsim.specs.workload.lengths import Fixed, LogNormal, stats
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.rlhf import specs_of
from rlhfsim.validation.kinds.rlhf import priced
from rlhfsim.validation.rows import Row

ROWS = {"rlhf.csv": (9, 20), "rlhf_nemo_rl.csv": (12, 17, 20, 21, 32), "rlhf_published.csv": (13,)}
"""Table -> lines, all of small models: large ones take seconds each (59 rows: 7.9 % apart, -1.9 % in the mean)."""


def typed(asked: RunSpecs) -> list[str]:
    """Options that say what a table prints: model, GPUs, batch, lengths and the degrees of both layouts."""
    work, placed = asked.workload, asked.placement
    assert placed.rollout is not None
    layout, apart = placed.actor.layout, len(placed.pools) > 1
    length = work.response_len
    assert isinstance(length, Fixed | LogNormal)
    response = f"{length.value:g}" if isinstance(length, Fixed) else _drawn(length)
    degrees = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep}
    told = {k: v for k, v in degrees.items() if placed.backend == "megatron" or v > 1}
    options = {
        "model": work.model,
        "algorithm": work.algorithm,
        "prompts": work.prompts,
        "samples": work.samples,
        "mini-batches": work.mini_batches,
        "prompt-len": round(stats(work.prompt_len).mean),
        "response-len": response,
        "rules": "workers=64",
        "framework": asked.cluster.framework,
        "backend": placed.backend,
        "gpu": asked.cluster.node_group.profile.name,
        "gpus": placed.pools[0].gpus,
        "rollout-gpus": placed.pools[1].gpus if apart else None,
        "architecture": placed.architecture,
        "actor": _pairs(told),
        "rollout": _pairs({"tp": placed.rollout.layout.tp, "pp": placed.rollout.layout.pp}),
    }
    return [x for name, value in options.items() if value for x in (f"--{name}", str(value))]


def _drawn(length: LogNormal) -> str:
    return f"lognormal:mean={length.mean:g},sigma={length.sigma:g},max={length.max:g}"


def _pairs(values: dict[str, object]) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())


def seconds(row: Row) -> tuple[float, float]:
    """Seconds of a step as typed and as validated."""
    asked = specs_of(assumptions.apply("rlhf", row)[0])
    answer = CliRunner().invoke(estimate, [*typed(asked), "--json"], catch_exceptions=False)
    return json.loads(answer.output)["plan"]["prediction"]["step_s"], priced(asked).seconds


@pytest.fixture(scope="module")
def ratios() -> list[float]:
    rows = [row for row in rows_of("rlhf") if row.line in ROWS.get(row.file, ())]
    return [one / other for one, other in map(seconds, rows)]


def test_a_typed_plan_has_the_seconds_of_the_validated_one(ratios: list[float]) -> None:
    off = [abs(ratio - 1) for ratio in ratios]
    assert len(ratios) == 8
    assert sum(off) / len(off) < 0.08
    assert max(off) < 0.16
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.05)
