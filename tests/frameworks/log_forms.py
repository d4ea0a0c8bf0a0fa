"""A simulated run as the log of the framework that the plan was exported to.

Times stand under the framework's own timers (`FRAMEWORK` of its `logs.py`), which say what each covers, so
that a log written here is the one that is read there. The configuration stands as the framework prints it
at its start: verl, NeMo-RL and SkyRL with `pprint`, OpenRLHF as a `SimpleNamespace`, slime as a list; TRL and
AReaL print none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pprint import pformat
from types import SimpleNamespace
from typing import Any

from rlhfsim.calibration.observation import phase_seconds, step_windows
from rlhfsim.interchange.export import Value
from rlhfsim.interchange.logs.framework import Framework, framework_named
from rlhfsim.interchange.logs.imported import timers
from rlhfsim.plan import Plan
from rlhfsim.specs.workload.lengths import AnyLengths, stats
from rlhfsim.trace import Trace

RAY = "\x1b[36m(TaskRunner pid=4242)\x1b[0m "
"""What Ray puts before the lines of a task."""


def console_log(name: str, settings: Mapping[str, Value], plan: Plan, trace: Trace) -> str:
    """Configuration and steps as framework `name` prints them; `settings` as exported, variables filled."""
    rows = list(logged(framework_named(name), plan, trace))
    head, steps = FORMS[name]
    lines = [*head(nested(settings))]
    for number, row in enumerate(rows, start=1):
        lines += steps(number, len(rows), row)
    return "\n".join(lines) + "\n"


def logged(framework: Framework, plan: Plan, trace: Trace) -> Iterator[dict[str, float]]:
    """Metric -> value of every step: each phase under the first timer that covers it, and the lengths."""
    stale = plan.placement.schedule.asynchronous
    logged_timers = [timer for timer in timers(framework, stale) if not timer.derived]
    names = [timer.metric for timer in logged_timers]
    lengths = _lengths(framework, plan)
    tokens = plan.workload.num_sequences * sum(stats(x).mean for x in _both(plan))
    for step, (start, end) in step_windows(trace).items():
        phases = phase_seconds([span for span in trace.spans if span.step == step])
        row, taken = dict[str, float](), set[str]()
        for timer in logged_timers:
            under = [phase for phase in timer.of(names) if phase in phases and phase not in taken]
            if under:
                row[timer.metric] = sum(phases[phase][0] for phase in under)
                taken |= {*under}
        counted = {} if framework.prompt else {"num_tokens": tokens * (step + 1)}
        yield {**lengths, **counted, **row, framework.step: end - start}


def _lengths(framework: Framework, plan: Plan) -> dict[str, float]:
    prompt, response = map(stats, _both(plan))
    kinds = (
        (framework.prompt, prompt.mean),
        (framework.response, response.mean),
        (framework.longest, plan.workload.response_len.maximum),
    )
    return {metrics[0]: value for metrics, value in kinds if metrics}


def _both(plan: Plan) -> tuple[AnyLengths, AnyLengths]:
    return plan.workload.prompt_len, plan.workload.response_len


def nested(settings: Mapping[str, Value]) -> dict[str, Any]:
    """`{"--a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *above, last = key.lstrip("+-").split(".")
        at = tree
        for part in above:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


# --- verl -----------------------------------------------------------------------------------------


def verl_head(config: Mapping[str, Any]) -> Iterator[str]:
    """`pprint(OmegaConf.to_container(config, resolve=True))` (verl/trainer/main_ppo.py)."""
    yield "2026-11-20 06:50:29,276\tINFO worker.py:1832 -- Started a local Ray instance."
    yield from (RAY + line for line in pformat(config).splitlines())


def verl_step(number: int, last: int, row: Mapping[str, float]) -> Iterator[str]:
    """`step:3 - timing_s/gen:1.5 - ...` (verl/utils/logger/aggregate_logger.py)."""
    items = [f"step:{number}", "actor/pg_loss:np.float64(-0.0012)", f"training/global_step:{number}"]
    yield RAY + " - ".join([*items, *(f"{name}:{value!r}" for name, value in row.items())])


# --- OpenRLHF -------------------------------------------------------------------------------------


def openrlhf_head(config: Mapping[str, Any]) -> Iterator[str]:
    """`strategy.print(args)` of nested arguments (openrlhf/cli/train_ppo_ray.py, utils/config.py)."""
    yield repr(_namespace(config))


def _namespace(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return SimpleNamespace(**{key: _namespace(inner) for key, inner in value.items()})


def openrlhf_step(number: int, last: int, row: Mapping[str, float]) -> Iterator[str]:
    """`Global step 3: {...}` (openrlhf/trainer/ppo_trainer.py)."""
    values = {"policy_loss": 0.0123, "act_lr": 1e-6, **row}
    where = "(PPOTrainer pid=77) INFO 11-20 19:25:45 ppo_trainer.py:551]"
    yield f"{where} ✨ Global step {number}: {values}"


# --- NeMo-RL --------------------------------------------------------------------------------------


def nemo_head(config: Mapping[str, Any]) -> Iterator[str]:
    """`Final config:` and `pprint` (examples/run_grpo.py)."""
    yield "Loaded configuration from: grpo.yaml"
    yield "Final config:"
    yield from pformat(config).splitlines()


def nemo_step(number: int, last: int, row: Mapping[str, float]) -> Iterator[str]:
    """A block of times (`log_training_step` in nemo_rl/algorithms/grpo.py)."""
    prefix = "timing/train/"
    total = row[prefix + "total_step_time"]
    yield f"\n{'=' * 25} Step {number}/{last} {'=' * 25}"
    yield "\n📊 Training Results:\n  • Loss: 0.0123"
    yield f"  • Mean Generation Length: {row['train/mean_gen_tokens_per_sample']:.4f}"
    yield f"\n⏱️  Timing:\n  • Total step time: {total:.2f}s"
    for name, value in row.items():
        if name.startswith(prefix) and name != prefix + "total_step_time":
            yield f"  • {name.removeprefix(prefix)}: {value:.2f}s ({value / total:.1%})"


# --- TRL ------------------------------------------------------------------------------------------


def trl_head(config: Mapping[str, Any]) -> Iterator[str]:
    """Nothing: no trainer prints its arguments, and a history of Weights & Biases has none."""
    return iter(())


def trl_step(number: int, last: int, row: Mapping[str, float]) -> Iterator[str]:
    """Rows of a run's history in Weights & Biases: blocks (trl/extras/profiling.py), then the step."""
    blocks = {name: value for name, value in row.items() if name.startswith("profiling/")}
    for i, (name, value) in enumerate(blocks.items()):
        yield json.dumps({"_step": 10 * number + i, name: value})
    metrics = {f"train/{name}": value for name, value in row.items() if name not in blocks}
    yield json.dumps({"_step": 10 * number + 9, "train/loss": 0.0123, **metrics})


# --- SkyRL ----------------------------------------------------------------------------------------

SKYRL = "(skyrl_entrypoint pid=9) "


def skyrl_head(config: Mapping[str, Any]) -> Iterator[str]:
    """`pprint` of the configuration (skyrl/train/entrypoints/main_base.py)."""
    yield from (SKYRL + line for line in pformat(config).splitlines())


def skyrl_step(number: int, last: int, row: Mapping[str, float]) -> Iterator[str]:
    """`Step 3:` and a printed dict whose floats are text (skyrl/train/utils/tracking.py)."""
    yield f"{SKYRL}2026-11-20 10:00:00.123 | INFO     | skyrl.train.utils.tracking:log:99 - Step {number}: "
    values = {name: f"{value:.4f}" for name, value in row.items()}
    yield from (SKYRL + line for line in pformat(values).splitlines())


# --- slime ----------------------------------------------------------------------------------------

SLIME = "\x1b[36m(MegatronTrainRayActor pid=38610)\x1b[0m "


def slime_head(config: Mapping[str, Any]) -> Iterator[str]:
    """Megatron's list of arguments (`_print_args` in megatron/training/arguments.py)."""
    yield f"{SLIME}------------------------ arguments ------------------------"
    for key, value in {"rank": 0, "world_size": 8, **config}.items():
        name = key.replace("-", "_")
        yield f"{SLIME}  {name} {'.' * max(2, 46 - len(name))} {value}"


def slime_step(number: int, last: int, row: Mapping[str, float]) -> Iterator[str]:
    """`perf 3: {...}` of the rollout and of the trainer (slime/utils/train_metric_utils.py)."""
    rollout = {name: value for name, value in row.items() if name.startswith("rollout/")}
    perf = {name: value for name, value in row.items() if name.startswith("perf/")}
    rollout["perf/rollout_time"] = perf.pop("perf/rollout_time")
    yield f"(RolloutManager pid=7) [2026-11-20 12:20:29] rollout.py:390 - perf {number}: {rollout}"
    yield f"{SLIME}[2026-11-20 12:20:29] train_metric_utils.py:44 - perf {number}: {perf}"


# --- AReaL ----------------------------------------------------------------------------------------


def areal_head(config: Mapping[str, Any]) -> Iterator[str]:
    """Nothing: it writes its configuration to a file."""
    return iter(())


def areal_step(number: int, last: int, row: Mapping[str, float]) -> Iterator[str]:
    """A table of names and values (areal/utils/stats_logger.py), without the time of the step."""
    yield f"20261120-10:00:00.123 StatsLogger INFO: Epoch 1/1 Step {number}/{last} Train step {number}/{last} done."
    yield "20261120-10:00:00.123 StatsLogger INFO: Stats (1/1):"
    values = {name: value for name, value in row.items() if name not in ("timeperf/step", "response_len/avg")}
    values["ppo_actor/seq_len/avg"] = row["response_len/avg"] + row["ppo_actor/prompt_len/avg"]
    cells = [f"{name} │ {value:.4e}" for name, value in values.items()]
    yield from (f"│ {' │ '.join(cells[i : i + 2])} │" for i in range(0, len(cells), 2))


FORMS = {
    "skyrl": (skyrl_head, skyrl_step),
    "slime": (slime_head, slime_step),
    "areal": (areal_head, areal_step),
    "verl": (verl_head, verl_step),
    "openrlhf": (openrlhf_head, openrlhf_step),
    "nemo-rl": (nemo_head, nemo_step),
    "trl": (trl_head, trl_step),
}
"""Framework -> what it prints at its start, and of a step."""
