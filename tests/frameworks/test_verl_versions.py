"""Defaults of verl by version, and rows and logs that are read by those of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlhfsim.cli.main import cli
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.verl.configuration import CONFIGURATION
from rlhfsim.interchange.verl.export import EXPORT, GROUPS
from rlhfsim.interchange.verl.versions import EAGER, SEQUENCES, UNPADDED, default
from rlhfsim.memory.role_bytes import software_of
from rlhfsim.plan import read_plan
from rlhfsim.validation.cases.rlhf import with_defaults
from rlhfsim.validation.rows import Row
from tests.frameworks.test_accepted import plan, workload

describe = CONFIGURATION.describe
TP = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("version", "eager", "unpadded", "sequences"),
    [
        ("0.2", True, False, 1024),
        ("v0.5.0", True, False, 1024),
        ("0.6.1", False, False, 1024),
        ("0.7.1", False, True, 1024),
        ("0.8", False, True, 1024),
        ("0.9.1", False, True, 256),
        (None, False, True, 256),
    ],
)
def test_a_version_has_the_defaults_of_its_generated_configuration(
    version: str | None, eager: bool, unpadded: bool, sequences: int
) -> None:
    assert default(EAGER, version) == eager
    assert default(UNPADDED, version) == unpadded
    assert default(SEQUENCES, version) == sequences


@pytest.mark.parametrize(
    ("version", "said", "degrees"),
    [
        ("0.7", {"actor_rollout_ref.actor.use_kl_loss": True}, {"actor": 4, "reference": 4}),
        (None, {"actor_rollout_ref.actor.use_kl_loss": True}, {"actor": 1, "reference": 1}),
        (None, {}, {"actor": 4}),
        (None, {"algorithm.adv_estimator": "gae"}, {"actor": 2, "critic": 2}),
    ],
)
def test_roles_of_a_process_have_the_groups_of_the_one_that_is_built_first(
    version: str | None, said: dict[str, object], degrees: dict[str, int]
) -> None:
    tp = "megatron.tensor_model_parallel_size"
    base = {"model_engine": "megatron", "trainer.n_gpus_per_node": 8, "algorithm.adv_estimator": "grpo"}
    keys = {f"actor_rollout_ref.actor.{tp}": 4, f"actor_rollout_ref.ref.{tp}": 1, f"critic.{tp}": 2}
    run = describe(settings(**base | keys | said | {"verl_version": version}))
    found = {"actor": run.layout.tp} | {role: placed.layout.tp for role, placed in run.roles.items()}
    assert {role: found[role] for role in degrees} == degrees


def test_experts_that_tensor_parallelism_leaves_whole_are_written_and_read() -> None:
    whole = plan(
        workload("grpo", model="qwen3-30b-a3b"), "megatron", {"tp": 4, "dp": 2, "zero": 1}, {"dp": 8}
    )
    key = "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size"
    assert EXPORT.write(whole).values[key] == 1
    base = {"model_engine": "megatron", "trainer.n_gpus_per_node": 8, TP: 4}
    assert describe(settings(**base)).layout.etp == 4
    assert describe(settings(**base, **{key: 1})).layout.etp == 1


def test_the_trainer_of_megatron_has_defaults_of_its_own() -> None:
    base = {"model_engine": "megatron", "trainer.n_gpus_per_node": 8}
    found = {v: describe(settings(verl_version=v, **base)) for v in ("0.3.0", "0.5.0", "0.7.1")}
    assert {v: (run.layout.tp, run.rollout.tp) for v, run in found.items()} == {
        "0.3.0": (4, 2),
        "0.5.0": (1, 1),
        "0.7.1": (1, 2),
    }
    assert all(run.packing for run in found.values())
    away = {"actor_rollout_ref.actor.megatron.param_offload": True}
    references = [
        describe(settings(verl_version=v, **base, **away)).roles["reference"] for v in ("0.6.1", "0.7.1")
    ]
    assert [role.residency for role in references] == ["resident", "offloaded"]


def test_the_head_follows_padding_the_entropy_in_the_loss_and_fused_kernels() -> None:
    fused = {"actor_rollout_ref.model.use_fused_kernels": True}
    entropy = {"actor_rollout_ref.actor.entropy_coeff": 0.01}
    runs = [describe(settings(verl_version=v)) for v in ("0.3.0", "0.5.0", "0.9.1")]
    runs += [describe(settings(verl_version="0.9.1", **more)) for more in (entropy, fused)]
    heads = [run.software.head if run.software else None for run in runs]
    assert [head.train_bytes if head else None for head in heads] == [14, None, None, 10, 16]
    assert heads[-1].tokens == 512
    padded, packed = (software_of(None, "verl", "fsdp2", packing=packing).head for packing in (False, True))
    assert (padded.train_bytes, packed.train_bytes) == (6, 2)


def test_the_temperature_costs_logits_by_release() -> None:
    """In place on a view until 0.8, a copy in 0.9.0, nothing at temperature 1 since 0.9.1."""
    warm = {"actor_rollout_ref.rollout.temperature": 0.6}

    def bytes_of(version: str, **more: object) -> tuple[float, float]:
        software = describe(settings(verl_version=version, **more)).software
        head = software_of(software, "verl", "fsdp2").head
        return head.train_bytes, head.score_bytes

    assert bytes_of("0.7.1") == bytes_of("0.8.0", **warm) == (8, 2)
    assert bytes_of("0.9.0") == bytes_of("0.9.1", **warm) == (4, 4)
    assert bytes_of("0.9") == bytes_of("0.9.1") == (2, 2)


def test_megatron_core_under_verl_has_a_head_of_its_own() -> None:
    megatron = {"config_name": "ppo_megatron_trainer.yaml"}
    entropy = {"actor_rollout_ref.actor.entropy_coeff": 0.01}
    more = ({}, entropy, {"actor_rollout_ref.model.use_fused_kernels": True})
    runs = [describe(settings(verl_version="0.9.1", **megatron, **one)) for one in more]
    heads = [software_of(run.software, "verl", "megatron").head for run in runs]
    assert [(head.train_bytes, head.score_bytes, head.vocab) for head in heads] == [
        (8, 12, None),
        (12, 12, None),
        (4, 2, 1024),
    ]
    assert [head.of("reference").score_bytes for head in heads] == [6, 6, 2]


def test_the_strategy_fsdp_is_fsdp1_which_gathers_in_place() -> None:
    named = {"actor_rollout_ref.actor.strategy": "fsdp2"}
    usual, second = (describe(settings(verl_version="0.9.1", **more)) for more in ({}, named))
    assert usual.software is not None
    assert usual.software.flat_parameters
    assert usual.backend == "fsdp2"
    assert second.software is None


def settings(**more: object) -> FrameworkSettings:
    keys = {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B", "algorithm.adv_estimator": "grpo"}
    return FrameworkSettings({**keys, **more}, "run")


def test_degrees_of_megatron_are_not_taken_as_read_where_fsdp_trains() -> None:
    key = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    for engine, read in (("dp", False), ("megatron", True)):
        said = settings(model_engine=engine, **{key: 4})
        assert describe(said).layout.tp == (4 if read else 1)
        groups = tuple(asked for asked in said.asked.keys if asked.endswith("."))
        assert (key in said.asked.keys or key.startswith(groups)) == read


def test_a_log_of_a_named_version_is_read_by_its_defaults() -> None:
    old, new = describe(settings(verl_version="0.4.1")), describe(settings())
    assert (old.rollout.cuda_graphs, old.packing, old.rollout.max_num_seqs) == (False, False, 1024)
    assert (new.rollout.cuda_graphs, new.packing, new.rollout.max_num_seqs) == (True, True, 256)


def test_adapters_stay_beside_the_weights_of_the_rollout_unless_they_are_merged() -> None:
    lora = {"actor_rollout_ref.model.lora_rank": 32}
    beside = describe(settings(**lora))
    merged = describe(settings(**lora, **{"actor_rollout_ref.model.lora.merge": True}))
    assert (beside.weight_path, beside.sleep) == ("lora", 1)
    assert (merged.weight_path, merged.sleep) == ("ipc", 2)


def test_blank_cells_of_a_row_take_the_defaults_of_its_version_and_filled_ones_stay() -> None:
    row = Row(table="rlhf", file="f", line=2, values={"framework": "verl v0.4", "max_num_seqs": "512"})
    filled = with_defaults(row)
    assert filled.text("cuda_graphs") == "no"
    assert filled.text("packing") == "no"
    assert filled.integer("max_num_seqs") == 512
    assert with_defaults(row.filled({"framework": "NeMo-RL v0.4"})).text("cuda_graphs") is None


def test_the_deprecated_micro_batch_counts_all_ranks() -> None:
    keys = {"actor_rollout_ref.actor.ppo_micro_batch_size": 64, "trainer.n_gpus_per_node": 8}
    ulysses = {"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2}
    own = {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2}
    found = [
        CONFIGURATION.describe(settings(verl_version="0.4.1", **keys, **more)).layout.micro_batch
        for more in ({}, ulysses, own)
    ]
    assert found == [8, 16, 2]


def test_roles_of_a_process_share_megatrons_groups(tmp_path: Path) -> None:
    # 32B: without that rule the reference gets groups of its own, which the process then gives to the actor too
    asked = ("--gpus", "16", "--model", "qwen2.5-32b", "--algorithm", "ppo", "--framework", "verl")
    out = tmp_path / "plan.json"
    found = CliRunner().invoke(
        cli, ["design", *asked, "--backend", "megatron", "--rules", "workers=64", "--out", str(out)]
    )
    assert found.exit_code == 0, found.output
    placed = read_plan(out).placement
    roles = (placed.actor, placed.role("critic"), placed.role("reference"))
    assert len({tuple(getattr(role.layout, name) for name in GROUPS) for role in roles if role}) == 1
    assert all(role is not None for role in roles)


def test_groups_of_its_own_for_a_role_are_said_not_to_be_run() -> None:
    megatron = {"tp": 4, "pp": 4, "zero": 1}
    asked = plan(workload("grpo"), "megatron", megatron, {"tp": 4, "dp": 4})
    reference = asked.placement.role("reference")
    assert reference is not None
    assert not any("process" in each.instead for each in EXPORT.write(asked).unsaid)
    apart = replace(reference, layout=replace(reference.layout, pp=1, dp=4))
    typed = replace(asked, placement=replace(asked.placement, reference=apart))
    [said] = [each for each in EXPORT.write(typed).unsaid if "process" in each.instead]
    assert said.what == "pp 1 for the reference, not the actor's"
    assert said.nearest is not None
    assert said.nearest.placement.role("reference") is not None
    assert said.nearest.placement.role("reference").layout.pp == 4


def test_virtual_stages_of_the_actor_are_those_of_the_groups_whoever_is_first() -> None:
    megatron = {"tp": 4, "pp": 2, "vp": 2, "zero": 1}
    asked = plan(workload("grpo"), "megatron", megatron, {"tp": 4, "dp": 2})
    reference = asked.placement.role("reference")
    assert reference is not None
    scoring = replace(reference, layout=replace(reference.layout, vp=1))
    written = EXPORT.write(replace(asked, placement=replace(asked.placement, reference=scoring)))
    key = "virtual_pipeline_model_parallel_size"
    assert [written.values[f"actor_rollout_ref.{role}.megatron.{key}"] for role in ("actor", "ref")] == [2, 2]
    assert not any("process" in each.instead for each in written.unsaid)
