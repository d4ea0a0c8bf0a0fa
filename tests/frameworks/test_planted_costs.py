"""From a question to a better plan: design, export, a job's log, import, calibrate, design again.

The log is that of a simulated cluster whose software costs are planted. What the framework costs there is
found again inside its interval, and the plan that is designed with it is the one that the truth asks for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lab.planted import Flaws, planted_trace
from rlhfsim.api import estimate
from rlhfsim.calibration.observation import phase_seconds, read_run, step_windows
from rlhfsim.cli.main import cli
from rlhfsim.interchange.configuration.configuration import configuration_named
from rlhfsim.interchange.configuration.described import Lengths, setup
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import Value, exporter
from rlhfsim.interchange.logs.printed import printed_values
from rlhfsim.plan import Plan, read_plan
from rlhfsim.specs.hardware.profiles import load_profile, parse_cluster
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.trace import WAIT, Trace
from tests.frameworks.log_forms import console_log, nested
from tests.frameworks.test_accepted import answers, installed

GPU = "h100-sxm"
PROMPT = 512
STEPS = 8
GENERATE = "actor.generate"
QUESTION = (
    *("--model", "qwen2.5-7b", "--algorithm", "grpo", "--samples", 8, "--prompts", 64, "--mini-batches", 2),
    *("--rules", "workers=64", "--prompt-len", PROMPT, "--response-len", "lognormal:mean=700,max=2048"),
)
FILLED: Mapping[Value, Value] = {
    "${MODEL}": "Qwen/Qwen2.5-7B-Instruct",
    "${REWARD}": "http://127.0.0.1:5000/reward",
}
"""What a user gives for the variables of a launch."""
APART = "--architecture disaggregated --forbid split,standalone --weight-path broadcast"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A cluster of eight GPUs under a framework, with costs that its user does not know."""

    framework: str
    planted: Mapping[str, float]
    """Coefficient -> its true value."""
    generation: float
    """How many times as long its rollouts take as the cost model says."""
    runs: tuple[str, ...]
    """Options of the designs that were run, beside the question."""
    asked: str = ""
    """Options of the designs before and after its runs."""
    in_bias: tuple[str, ...] = ()
    """Planted costs that its designs do not tell from the bias of their phase."""
    said: tuple[str | int, ...] = ()
    """What its log does not hold and the user says."""


WORLDS = (
    World(
        framework="verl",
        planted={"rl_layer_time": 4e-3},
        generation=1.25,
        runs=(  # small packs, or kernels hide what a layer costs the host
            "--backend fsdp2 --fix actor.pack_tokens=4096",
            "--backend fsdp2 --fix actor.pack_tokens=4096,rollout.tp=2",
            "--backend fsdp2 --fix actor.cp=2",
        ),
        asked="--backend megatron",
    ),
    World(
        framework="openrlhf",
        planted={"rl_layer_time": 16e-3, "sync_start_latency": 1.0},  # large beside its slow rollouts
        generation=1.5,
        runs=("", "--fix rollout.tp=1", "--forbid recompute", APART),
        in_bias=("sync_start_latency",),
        said=("--prompt-len", PROMPT),
    ),
    World(
        framework="nemo-rl",
        planted={"rl_layer_time": 30e-3, "sync_staging_time": 0.4},
        generation=1.25,
        runs=(
            "--backend megatron",
            "--backend fsdp2 --fix rollout.tp=1 --fix actor.pack_tokens=2560",
            f"{APART} --backend megatron",
            f"{APART} --backend fsdp2",
        ),
        asked="--backend megatron",
        said=("--prompt-len", PROMPT),
    ),
)


def command(*words: object) -> dict[str, Any]:
    """A command with `--json`, which must succeed."""
    done = CliRunner().invoke(cli, [*map(str, words), "--json"])
    assert done.exit_code == 0, f"{done.output[-2000:]} {done.exception!r}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def designed(world: World, out: Path, profile: object = GPU, options: str = "") -> Plan:
    """The fastest plan for the cluster as `profile` describes it."""
    where = ("--gpus", 8, "--profile", profile, "--framework", world.framework, "--fastest")
    command("design", *where, *QUESTION, *options.split(), "--out", out)
    return read_plan(out)


def true_profile(world: World, folder: Path) -> Path:
    """The GPU with the costs of its framework as they really are."""
    known = load_profile(GPU).coefficients
    costs = {
        name: {"value": v, "low": v, "high": v, "source": "planted", "dimension": known[name].dimension}
        for name, v in world.planted.items()
    }
    factor = {
        "value": world.generation,
        "low": world.generation,
        "high": world.generation,
        "source": "planted",
    }
    biases = {"runs": 1, "phases": [{"phase": GENERATE, "mode": "graphs", "factor": factor}]}
    path = folder / "truth.yaml"
    profile = {
        "name": "truth",
        "title": "H100 SXM",
        "extends": "h100_sxm",
        "coefficients": costs,
        "biases": {world.framework: biases},
    }
    path.write_text(json.dumps(profile))
    return path


def settings_of(world: World, plan: Plan) -> dict[str, Value]:
    """The exported settings, variables of the launch filled in."""
    written = exporter(world.framework).write(plan).values
    return {key.lstrip("+-"): FILLED.get(value, value) for key, value in written.items()}


def as_run(world: World, plan: Plan, settings: Mapping[str, Value]) -> Plan:
    """What the framework runs: the plan but for what it cannot be told."""
    described = configuration_named(world.framework).describe(FrameworkSettings(settings, "launch"))
    longest = plan.workload.response_len.maximum
    lengths = Lengths(prompt=PROMPT, response=stats(plan.workload.response_len).mean, longest=longest)
    specs = setup(described, lengths, GPU)
    cluster = replace(specs.cluster, framework=world.framework)
    return estimate(specs.placement, specs.workload, cluster)


def trace_of(world: World, ran: Plan, number: int) -> Trace:
    """What really happened: five per cent of noise from step to step."""
    slow = Flaws(slowed={GENERATE: world.generation})
    rng = np.random.default_rng(number)
    return planted_trace(ran, load_profile(GPU), world.planted, rng, steps=STEPS, flaws=slow)


def imported(world: World, number: int, folder: Path) -> Path:
    """One run: designed, exported, run on the planted cluster, read from its log."""
    plan = designed(world, folder / f"plan{number}.json", options=world.runs[number])
    command(
        "export", folder / f"plan{number}.json", "--to", world.framework, "--out", folder / f"launch{number}"
    )
    settings = settings_of(world, plan)
    ran = as_run(world, plan, settings)
    trace = trace_of(world, ran, number)
    log, out = folder / f"job{number}.log", folder / f"run{number}"
    log.write_text(console_log(world.framework, settings, ran, trace))
    command("import-run", log, "--gpu", "h100", *world.said, "--out", out)
    assert read_plan(out / "plan.json").prediction.step_s == pytest.approx(ran.prediction.step_s, rel=1e-3)
    return out


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[World], Path]:
    """A folder with the first run of a world, which is made once."""
    folders: dict[str, Path] = {}

    def folder_of(world: World) -> Path:
        if world.framework not in folders:
            folder = tmp_path_factory.mktemp(world.framework)
            imported(world, 0, folder)
            folders[world.framework] = folder
        return folders[world.framework]

    return folder_of


def held(after: Mapping[str, float], value: float) -> bool:
    """Whether the truth lies within P1 to P99, of which P10 to P90 is known."""
    end = after["high"] if value > after["value"] else after["low"]
    return abs(math.log(value / after["value"])) <= 2.326 / 1.2816 * abs(math.log(end / after["value"]))


def in_truth(world: World, truth: Path, plan: Plan) -> Plan:
    """What the plan takes on the cluster as it really is."""
    cluster = replace(parse_cluster(8, str(truth)), framework=world.framework)
    return estimate(plan.placement, plan.workload, cluster)


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.framework)
def test_planted_costs_are_found_in_logs_and_change_the_plan(
    world: World, first_run: Callable[[World], Path]
) -> None:
    folder = first_run(world)
    runs = [folder / "run0", *(imported(world, number, folder) for number in range(1, len(world.runs)))]
    if installed(world.framework):
        designs = [read_plan(folder / f"plan{number}.json") for number in range(len(runs))]
        assert not any(answers(world.framework, designs, folder)), "the framework itself accepts them"
    ours = folder / "ours.yaml"
    fitted = command("calibrate", *runs, "--out", ours)
    found = {c["name"]: c["after"] for c in fitted["coefficients"]}
    [bias] = [b["factor"] for b in fitted["biases"] if (b["phase"], b["mode"]) == (GENERATE, "graphs")]
    told = {name: value for name, value in world.planted.items() if name not in world.in_bias}
    pairs = [(bias, world.generation), *((found[name], value) for name, value in told.items())]
    assert not set(world.in_bias) & set(found)
    assert [(after, value) for after, value in pairs if not held(after, value)] == []
    before, after = fitted["step_error"]
    assert after < 0.05 < before
    truth = true_profile(world, folder)
    first = in_truth(world, truth, designed(world, folder / "first.json", options=world.asked))
    again = designed(world, folder / "again.json", ours, world.asked)
    best = designed(world, folder / "best.json", truth, world.asked)
    came = in_truth(world, truth, again)
    assert again.placement != first.placement
    assert came.prediction.step_s < 1.01 * best.prediction.step_s < first.prediction.step_s
    assert again.prediction.low_s <= came.prediction.step_s <= again.prediction.high_s
    long = {p.name: p.seconds for p in came.prediction.phases if p.seconds > 0.05 * came.prediction.step_s}
    assert {p.name: p.seconds for p in again.prediction.phases if p.name in long} == pytest.approx(
        long, rel=0.06
    )


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.framework)
def test_a_log_in_the_form_of_a_framework_holds_the_times_of_its_run(
    world: World, first_run: Callable[[World], Path]
) -> None:
    folder = first_run(world)
    run = folder / "run0"
    seen, ran = read_run(run), read_plan(run / "plan.json")
    trace = trace_of(world, ran, 0)
    log = (folder / "job0.log").read_text()
    assert printed_values(log) == [nested(settings_of(world, read_plan(folder / "plan0.json")))]
    windows = step_windows(trace)
    assert seen.step_s == pytest.approx([end - start for start, end in list(windows.values())[1:]], rel=1e-3)
    work = phase_seconds([span for span in trace.spans if span.step and span.kind != WAIT])
    told = {name: sum(times) for name, times in seen.phases.items()}
    for name, covers in {name: seen.covers.get(name, (name,)) for name in told}.items():
        assert told[name] == pytest.approx(sum(sum(work.get(c, ())) for c in covers), rel=1e-2, abs=0.1)
