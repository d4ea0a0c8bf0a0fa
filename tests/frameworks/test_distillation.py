"""Distillation in NeMo-RL's keys: what is written, what is refused or named, and that it reads back the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from lab.planted import planted_trace
from rlhfsim.api import cluster_of, estimate
from rlhfsim.calibration.observation import phase_seconds, read_run
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.keys import unread
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import export
from rlhfsim.interchange.nearest import with_placement
from rlhfsim.interchange.nemo_rl.keys import TABLE
from rlhfsim.interchange.nemo_rl.logs import FRAMEWORK
from rlhfsim.interchange.refusal import lacks_of
from rlhfsim.plan import Plan, read_plan
from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.hardware.profiles import load_profile, parse_cluster
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Lora, Reward, Workload
from rlhfsim.trace import WAIT
from rlhfsim.what_if.design import design
from tests.frameworks.drawn import drawn_plans
from tests.frameworks.log_forms import logged, nemo_head, nemo_step, nested
from tests.frameworks.test_accepted import plan, workload
from tests.frameworks.test_export import known_keys
from tests.frameworks.test_round_trip import check, differences, read_back

WORK = Workload(
    algorithm="distillation",
    model="qwen3-1.7b",
    reference="qwen3-4b",
    teacher_top=64,
    reward=Reward(model=None),
    prompts=128,
    mini_batches=2,
    prompt_len=Fixed(value=512),
    response_len=LogNormal(mean=900, max=4096),
)
BASES: dict[Backend, str] = {"fsdp2": "distillation_math", "megatron": "distillation_math_megatron"}


def designed(backend: Backend, architecture: str | None = None) -> Plan:
    request = Request(
        cluster=parse_cluster(8, "h100"),
        workload=WORK,
        backend=backend,
        framework="nemo-rl",
        architecture=architecture,
    )
    found = design(request, explain=False, rivals=False, simplest_s=None).chosen
    assert found is not None
    return found


def taught(**fields: Any) -> Plan:
    """Student on ZeRO-3, teacher with TP 4, both packed."""
    made = plan(
        workload("distillation", model="qwen3-1.7b", reference="qwen3-4b", **{"teacher_top": 64} | fields),
        "fsdp2",
        {"dp": 8, "zero": 3, "pack_tokens": 4096},
        {"tp": 2, "dp": 4},
    )
    assert made.placement.role("reference") is not None
    layout = Layout(tp=4, dp=2, zero=3, pack_tokens=8192)
    return with_placement(made, reference=replace(made.placement.role("reference"), layout=layout))


@pytest.mark.parametrize("backend", BASES)
@pytest.mark.parametrize("architecture", [None, "disaggregated"])
def test_a_designed_plan_of_distillation_reads_back_as_it_was(
    backend: Backend, architecture: str | None, tmp_path: Path
) -> None:
    found = designed(backend, architecture)
    exported = export(found, "nemo-rl", frozenset())
    assert (
        f"run_distillation.py --config examples/configs/{BASES[backend]}.yaml" in exported.files["launch.sh"]
    )
    assert {key for key in exported.written.values if not key.startswith("++")} <= known_keys(
        "nemo_rl_distillation"
    )
    work, placed = read_back(found, "nemo-rl", tmp_path)
    named = {field for entry in exported.written.unsaid for field in entry.of}
    assert {line.split(": ")[0] for line in differences(found, work, placed)} <= named
    again = estimate(placed, work, cluster_of(found))
    assert again.prediction.step_s == pytest.approx(found.prediction.step_s, rel=0.01)


def test_drawn_plans_of_distillation_read_back_as_they_were_but_for_what_is_named(tmp_path: Path) -> None:
    for i, drawn in enumerate(drawn_plans("nemo-rl", 40, kind="distils")):
        (tmp_path / str(i)).mkdir()
        check(drawn, "nemo-rl", tmp_path / str(i))


def test_the_keys_of_a_plan_of_distillation() -> None:
    """Values by hand from examples/configs/distillation_math.yaml and algorithms/distillation.py at 7ea279a."""
    values = export(taught(), "nemo-rl", frozenset()).written.values
    assert {
        key: value for key, value in values.items() if key.startswith(("distillation.num", "distillation.t"))
    } == {
        "distillation.num_prompts_per_step": 128,
        "distillation.num_generations_per_prompt": 8,
        "distillation.topk_logits_k": 64,
    }
    assert {key: value for key, value in values.items() if key.startswith("teacher.")} == {
        "teacher.model_name": "${TEACHER}",
        "teacher.megatron_cfg.enabled": False,
        "teacher.dtensor_cfg.enabled": True,
        "teacher.dtensor_cfg.tensor_parallel_size": 4,
        "teacher.dtensor_cfg.context_parallel_size": 1,
        "teacher.dtensor_cfg.sequence_parallel": False,
        "teacher.dtensor_cfg.cpu_offload": False,
        "teacher.sequence_packing.enabled": True,
        "teacher.dynamic_batching.enabled": False,
        "teacher.sequence_packing.train_mb_tokens": 8192,
        "teacher.sequence_packing.logprob_mb_tokens": 8192,
        "teacher.max_total_sequence_length": 3072,
    }
    assert values["policy.train_global_batch_size"] == 512
    assert values["policy.make_sequence_length_divisible_by"] == 8, (
        "2 x the teacher's TP 4; the student's 2 x 1"
    )


def test_what_distillation_cannot_be_told_is_named_with_what_is_run() -> None:
    asked = taught(teacher_top=0, epochs=2)
    assert asked.placement.role("reference") is not None
    said = {entry.what: entry for entry in export(asked, "nemo-rl", frozenset()).written.unsaid}
    assert {
        "the teacher's log-probs of the tokens drawn alone",
        "sequence parallelism of the reference in packed micro-batches",
        "a teacher that is resident",
        "a policy that stays on the GPUs during a rollout",
        "2 epochs on a batch",
    } <= said.keys()
    nearest = said["the teacher's log-probs of the tokens drawn alone"].nearest
    assert isinstance(nearest, Plan)
    assert nearest.workload.teacher_top == 64


@pytest.mark.parametrize(
    ("fields", "what"),
    [({"lora": Lora(rank=8)}, "LoRA"), ({"dynamic_sampling": DynamicSampling(kept=0.5)}, "dynamic sampling")],
)
def test_what_distillation_has_no_key_for_is_not_run(fields: dict[str, Any], what: str) -> None:
    runs, asked = framework("nemo-rl"), taught(**fields)
    assert [lacks.what for lacks in lacks_of(asked, runs, frozenset())] == [what]
    grpo = workload("grpo", **fields)
    assert runs.of(grpo).lacks_workload(grpo) is None


def test_a_teacher_of_another_backend_is_refused() -> None:
    s = FrameworkSettings(
        {
            "distillation.topk_logits_k": 64,
            "policy.model_name": "qwen3-1.7b",
            "teacher.model_name": "qwen3-4b",
            "cluster.gpus_per_node": 8,
            "policy.megatron_cfg.enabled": False,
            "teacher.megatron_cfg.enabled": True,
        },
        "said",
    )
    with pytest.raises(RlhfsimError, match="a plan has one training backend"):
        TABLE.describe(s)


def test_sequence_parallelism_in_packs_is_found_in_a_configuration(tmp_path: Path) -> None:
    launch = export(taught(), "nemo-rl", frozenset()).files["launch.sh"]
    split = "teacher.dtensor_cfg.sequence_parallel="
    (tmp_path / "launch.sh").write_text(launch.replace(f"{split}false", f"{split}true"))
    configuration, settings = read_configuration([tmp_path], {"MODEL": "qwen3-1.7b", "TEACHER": "qwen3-4b"})
    found = list(configuration.findings(settings, configuration.run(settings)))
    assert [(entry.remedy, entry.stops) for entry in found] == [(f"{split}false", True)]


def test_a_recipe_of_theirs_is_read_over_its_base(tmp_path: Path) -> None:
    """examples/configs/recipes/llm/distillation-qwen3-32b-to-4b-base-2n8g-fsdp2tp8-noncolocated.v1.yaml, 7ea279a."""
    own = "policy.generation.colocated"
    said = {
        "defaults": "../../distillation_math.yaml",
        "distillation.num_prompts_per_step": 64,
        "policy.model_name": "Qwen/Qwen3-4B-Base",
        "policy.dtensor_cfg.tensor_parallel_size": 8,
        "policy.dtensor_cfg.context_parallel_size": 1,
        f"{own}.enabled": False,
        f"{own}.resources.gpus_per_node": 8,
        f"{own}.resources.num_nodes": 1,
        "teacher.model_name": "Qwen/Qwen3-32B",
        "teacher.dtensor_cfg.tensor_parallel_size": 8,
        "teacher.dtensor_cfg.context_parallel_size": 1,
        "teacher.generation.colocated.enabled": False,
        "distillation.max_num_steps": 20,
        "cluster.num_nodes": 2,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(said))
    configuration, settings = read_configuration([tmp_path / "recipe.yaml"], {})
    run = configuration.run(settings)
    assert (run.algorithm, run.model, run.teacher, run.teacher_top) == (
        "distillation",
        "Qwen/Qwen3-4B-Base",
        "Qwen/Qwen3-32B",
        64,
    )
    assert (run.prompts, run.samples, run.mini_batches, run.gpus, run.rollout_gpus) == (64, 1, 1, 8, 8)
    assert (run.actor_residency, run.optimizer_leaves) == ("resident", True), "`offload_before_refit`"
    teacher = run.roles["reference"]
    assert (teacher.residency, teacher.layout.tp, teacher.layout.dp) == ("offloaded", 8, 1)
    assert teacher.layout.pack(scoring=True) == 8192
    assert [key.key for key in unread("nemo-rl", None, settings) if key.matters] == []


OF_GRPO_ALONE = ("policy_and_reference_logprobs", "advantage_calculation", "value_inference")
"""Timers that distillation.py has not."""


def test_a_log_of_distillation_is_read_with_its_teachers_times(tmp_path: Path) -> None:
    """The log of a simulated run, in the form of distillation.py: `Step`, `Timing`, its timers."""
    found = designed("fsdp2")
    written = export(found, "nemo-rl", frozenset()).written.values
    filled = {"${MODEL}": "Qwen/Qwen3-1.7B", "${TEACHER}": "Qwen/Qwen3-4B"}
    settings = {key.lstrip("+-"): filled.get(value, value) for key, value in written.items()}
    trace = planted_trace(found, load_profile("h100-sxm"), {}, np.random.default_rng(0), steps=4)
    log, out = tmp_path / "job.log", tmp_path / "run"
    printed = [x for x in FRAMEWORK.timers if x.metric.rpartition("/")[2] not in OF_GRPO_ALONE]
    rows = list(logged(replace(FRAMEWORK, timers=tuple(printed)), found, trace))
    lines = [*nemo_head(nested(settings))]
    for number, row in enumerate(rows, start=1):
        lines += nemo_step(number, len(rows), row)
    log.write_text("\n".join(lines) + "\n")
    assert "teacher_logprob_inference: " in log.read_text()
    assert "teacher_logprob_inference_prep: " in log.read_text()
    words = ["import-run", log, "--gpu", "h100", "--prompt-len", 512, "--out", out]
    done = CliRunner().invoke(cli, [*map(str, words)])
    assert done.exit_code == 0, f"{done.output[-2000:]} {done.exception!r}"
    seen, ran = read_run(out), read_plan(out / "plan.json")
    assert ran.workload.algorithm == "distillation"
    assert ran.prediction.step_s == pytest.approx(found.prediction.step_s, rel=0.02)
    work = phase_seconds([span for span in trace.spans if span.step and span.kind != WAIT])
    for name in ("actor.generate", "reference.logprob", "actor.train"):
        covers = seen.covers.get(name, (name,))
        told = sum(sum(work.get(phase, ())) for phase in covers)
        assert sum(seen.phases[name]) == pytest.approx(told, rel=0.01, abs=0.1), name
