"""SkyRL: entry points, sharing, what it refuses, and its configuration read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhfsim.api import estimate_file
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.keys import unread
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.export import export, exporter
from rlhfsim.interchange.nearest import with_placement, with_roles, with_schedule
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.placement import ResourcePool

RECIPES = Path(__file__).parents[2] / "scenarios/recipes"


def planned(stem: str) -> Plan:
    return estimate_file(RECIPES / f"{stem}.yaml")


def test_skyrl_takes_the_entry_point_of_the_schedule() -> None:
    drains = planned("skyrl-async-1.5b")
    step_by_step = export(drains, "skyrl", frozenset())
    assert "-m examples.train.async.main_async" in step_by_step.files["launch.sh"]
    ppo = export(planned("skyrl-ppo-1.5b"), "skyrl", frozenset())
    assert "-m skyrl.train.entrypoints.main_base" in ppo.files["launch.sh"]
    never = with_schedule(drains, staleness=2, partial_rollout=True)
    found = export(never, "skyrl", frozenset())
    assert "-m examples.train.fully_async.main_fully_async" in found.files["launch.sh"]
    values = found.written.values
    assert values["trainer.train_batch_size"] == values["trainer.policy_mini_batch_size"] == 256
    assert values["trainer.fully_async.max_staleness_steps"] == 8  # updates of 256 prompts, 4 a batch
    assert values["trainer.fully_async.num_parallel_generation_workers"] == 256 * 9


def test_skyrl_refuses_what_it_cannot_share_and_a_critic_on_megatron() -> None:
    ppo = planned("skyrl-ppo-1.5b")
    pools = (ResourcePool(name="all", gpus=2), ResourcePool(name="own", start=2, gpus=2))
    layout = replace(ppo.placement.actor.layout, dp=2, micro_batch=1)
    halved = with_roles(ppo, lambda _, role: replace(role, layout=layout))
    assert halved.placement.rollout is not None
    rollout = replace(halved.placement.rollout, pool="own", layout=RolloutLayout(dp=2), sleep=0)
    apart = with_placement(halved, pools=pools, rollout=rollout, weight_path="broadcast")
    with pytest.raises(RlhfsimError, match="actor and critic share GPUs apart"):
        exporter("skyrl").write(apart)
    with pytest.raises(RlhfsimError, match="a critic with Megatron-Core"):
        export(with_placement(ppo, backend="megatron"), "skyrl", frozenset())


def test_skyrl_sends_changes_through_a_folder_and_they_are_read_back(tmp_path: Path) -> None:
    plan = with_placement(planned("skyrl-async-1.5b"), weight_path="delta-disk")
    exported = export(plan, "skyrl", frozenset())
    engine = "generator.inference_engine"
    assert exported.written.values[f"{engine}.weight_sync_backend"] == "delta"
    assert exported.written.values[f"{engine}.delta_weight_sync.sync_dir"] == "${SYNC_DIR}"
    script = tmp_path / "launch.sh"
    script.write_text(exported.files["launch.sh"])
    configuration, settings = read_configuration([script], {"trainer.policy.model.path": "qwen2.5-1.5b"})
    assert configuration.run(settings).weight_path == "delta-disk"


@pytest.mark.parametrize("stem", [path.stem for path in sorted(RECIPES.glob("skyrl-*.yaml"))])
def test_what_is_written_is_read_as_the_same_run(stem: str, tmp_path: Path) -> None:
    plan = planned(stem)
    script = tmp_path / "launch.sh"
    script.write_text(export(plan, "skyrl", frozenset()).files["launch.sh"])
    given = {"trainer.policy.model.path": plan.workload.model}
    configuration, settings = read_configuration([script], given)
    assert configuration.name == "skyrl"
    run = configuration.run(settings)
    placement, work = plan.placement, plan.workload
    assert placement.rollout is not None
    assert (run.layout, run.rollout) == (placement.actor.layout, placement.rollout.layout)
    assert (run.algorithm, run.prompts, run.samples) == (work.algorithm, work.prompts, work.samples)
    assert (run.mini_batches, run.kl, run.staleness) == (
        work.mini_batches,
        work.has_reference,
        placement.schedule.staleness,
    )
    assert (run.weight_path, run.sleep) == (placement.weight_path, placement.rollout.sleep)
    assert run.backend == placement.backend
    assert run.gpus == placement.pool(placement.actor.pool).gpus


def test_options_of_uv_before_an_entry_point_of_the_examples_are_no_keys() -> None:
    keys = (
        "trainer.policy.model.path=Qwen/Qwen2.5-7B trainer.placement.policy_num_gpus_per_node=8 trainer.fo=1"
    )
    program = "python examples/train/geometry3k/geometry3k_entrypoint.py"
    configuration, settings = read_configuration(f"uv run --isolated --extra fsdp {program} {keys}", {})
    configuration.run(settings)
    assert configuration.name == "skyrl"
    assert {u.key for u in unread("skyrl", None, settings) if u.kind == "no such key"} == {"trainer.fo"}


@pytest.mark.parametrize(
    ("more", "remedies"),
    [
        ("trainer.strategy=megatron", []),
        ("trainer.strategy=fsdp", ["trainer.strategy=megatron"]),
        (
            "trainer.strategy=megatron generator.inference_engine.fp8_weight_sync_mode=blockwise",
            ["trainer.mtp.enabled=false"],
        ),
    ],
)
def test_a_draft_that_cannot_be_sent_is_refused(more: str, remedies: list[str]) -> None:
    """`_validate_draft_weight_sync_cfg` of skyrl/train/utils/utils.py; a drawn plan was refused by it."""
    keys = "trainer.policy.model.path=Qwen/Qwen2.5-7B trainer.placement.policy_num_gpus_per_node=8"
    start = "python -m skyrl.train.entrypoints.main_base"
    configuration, settings = read_configuration(f"{start} {keys} trainer.mtp.enabled=true {more}", {})
    found = configuration.findings(settings, configuration.run(settings))
    assert [finding.remedy for finding in found if "MTP" in finding.what] == remedies
