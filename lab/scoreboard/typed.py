"""Published RL runs typed into `rlhfsim estimate` as their tables print them, against what `validate` says.

python -m lab.scoreboard.typed               every row of a framework that can be typed; some minutes
python -m lab.scoreboard.typed nemo          rows whose framework or model has this text
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from statistics import mean

from click.testing import CliRunner

from lab.scoreboard.rows import rows_of
from rlhfsim.cli.estimate import estimate
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.described import RunSpecs
from rlhfsim.specs.frameworks.runs import frameworks
from rlhfsim.specs.workload.lengths import Fixed, LogNormal, stats
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.rlhf import specs_of
from rlhfsim.validation.kinds.rlhf import priced, step_seconds
from rlhfsim.validation.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """One published step: measured, as typed and as validated."""

    row: Row
    measured_s: float
    typed_s: float
    validated_s: float
    assumed: tuple[str, ...]
    """What the answer says that it took from the framework."""

    @property
    def apart(self) -> float:
        """By what share the typed plan is longer than the validated one."""
        return self.typed_s / self.validated_s - 1

    @property
    def error(self) -> float:
        """By what share the typed plan is longer than the measured step."""
        return self.typed_s / self.measured_s - 1


def command(asked: RunSpecs) -> list[str]:
    """Options that say what a table prints: model, GPUs, batch, lengths, precision, lag, degrees of layouts."""
    work, placed = asked.workload, asked.placement
    assert placed.rollout is not None
    layout, apart = placed.actor.layout, len(placed.pools) > 1
    length = work.response_len
    assert isinstance(length, Fixed | LogNormal)
    response = f"{length.value:g}" if isinstance(length, Fixed) else _drawn(length)
    degrees = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep}
    told = {k: v for k, v in degrees.items() if placed.backend == "megatron" or v > 1}
    allowed = {"fp8": work.rollout_precision == "fp8", "fp8-training": work.train_precision == "fp8"}
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
        "max-staleness": placed.schedule.staleness or None,
        "allow": ",".join(name for name, wanted in allowed.items() if wanted),
        "actor": _pairs(told),
        "rollout": _pairs({"tp": placed.rollout.layout.tp, "pp": placed.rollout.layout.pp}),
    }
    return [x for name, value in options.items() if value for x in (f"--{name}", str(value))]


def _drawn(length: LogNormal) -> str:
    return f"lognormal:mean={length.mean:g},sigma={length.sigma:g},max={length.max:g}"


def _pairs(values: dict[str, object]) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())


def typed(row: Row) -> Typed | None:
    """The seconds of one row; None where it has no step, not what a plan needs, or a framework that nobody
    can type."""
    filled = assumptions.apply("rlhf", row)[0]
    try:
        measured_s = step_seconds(filled)
        asked = specs_of(filled)
        validated_s = priced(asked).seconds
    except RlhfsimError:
        return None
    if measured_s is None or asked.cluster.framework not in {runs.name for runs in frameworks()}:
        return None
    answer = CliRunner().invoke(estimate, [*command(asked), "--json"], catch_exceptions=False)
    plan = json.loads(answer.output)["plan"]
    assumed = tuple(plan["assumed"])
    return Typed(
        row=row,
        measured_s=measured_s,
        typed_s=plan["prediction"]["step_s"],
        validated_s=validated_s,
        assumed=assumed,
    )


def summary(rows: list[Typed]) -> str:
    """How far typed plans lie from validated ones and from the measurements."""
    apart, off = [row.apart for row in rows], [abs(row.error) for row in rows]
    valid = [abs(row.validated_s / row.measured_s - 1) for row in rows]
    return (
        f"{len(rows)} rows: typed is {mean(apart):+.1%} from validated in the mean, {mean(map(abs, apart)):.1%} "
        f"either way; error typed {mean(off):.1%}, validated {mean(valid):.1%}"
    )


def main() -> None:
    """Type every row, or those whose framework or model has the text of the first argument."""
    word, done = (sys.argv[1:] or [""])[0].lower(), []
    for row in rows_of("rlhf"):
        name = f"{row.text('framework')} {row.text('actor_model')}"
        if word in name.lower() and (found := typed(row)) is not None:
            done.append(found)
            print(
                f"{row.file}:{row.line} {name} {row.text('gpus')} {row.text('gpu_type')} "
                f"{row.text('architecture')}: measured {found.measured_s:.4g} s, validated "
                f"{found.validated_s:.4g}, typed {found.typed_s:.4g} ({found.apart:+.1%})",
                *found.assumed,
                sep=" | ",
                flush=True,
            )
    print(summary(done))


if __name__ == "__main__":
    main()
