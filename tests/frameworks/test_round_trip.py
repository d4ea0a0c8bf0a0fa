"""A plan that is exported, read back from its files and priced is the same plan, but for what the export says."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from rlhfsim.api import cluster_of, design, estimate, estimate_file
from rlhfsim.interchange.configuration.described import Lengths, placement_of, workload_of
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.export import AS_READ, export, exporters
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Lora, Reward, Workload
from tests.frameworks.test_accepted import (
    ASYNC,
    PACKS,
    ROOT,
    RULES,
    for_openrlhf,
    for_trl,
    for_verl,
    plan,
    workload,
)

SCORING_KEEPS = ("recompute", "offload_optimizer", "offload_fraction", "vp")
"""Of a layout: what a role that is never trained does not use."""
NOT_IN_A_CONFIGURATION = (
    "seed",
    "prompt_len",
    "response_len",
    "reward",
    "environment",
    "custom",
    "oversampling",
    "speculation",
)
"""Of a workload: what no framework's keys hold."""


def given(drawn: Plan) -> dict[str, str]:
    """What a user sets beside the files: variables of the script, shares that no configuration holds."""
    work = drawn.workload
    reward = work.reward.model
    values: dict[str, Any] = {"MODEL": work.model, "REWARD_MODEL": reward, "REWARD": reward}
    values["TEACHER"] = work.reference if work.distils else None
    rollout = drawn.placement.rollout
    drafts = rollout.layout.speculation if rollout else None
    if drafts is not None:
        values |= {"speculation.acceptance": drafts.acceptance, "DRAFT_MODEL": drafts.model}
    if work.dynamic_sampling is not None:
        values["dynamic_sampling.kept"] = work.dynamic_sampling.kept
    return {key: str(value) for key, value in values.items() if value is not None}


def read_back(drawn: Plan, name: str, folder: Path) -> tuple[Workload, Placement]:
    """Workload and placement of the files of an export; lengths as in the plan."""
    exported = export(drawn, name, frozenset())
    for file, text in exported.files.items():
        (folder / file).write_text(text)
    configuration, settings = read_configuration([folder], given(drawn))
    assert configuration.name == name
    run = configuration.run(settings)
    stops = [found.what for found in configuration.findings(settings, run) if found.stops]
    assert not stops, "the framework accepts what is exported"
    lengths = Lengths(prompt=1.0, response=1.0, longest=None)
    work = replace(
        workload_of(run, lengths), **{name: getattr(drawn.workload, name) for name in NOT_IN_A_CONFIGURATION}
    )
    return work, placement_of(run, work)


def differences(drawn: Plan, work: Workload, placed: Placement) -> Iterator[str]:
    """Fields that are not the same, by name."""
    for field in fields(Workload):
        if field.name == "reference" and not (drawn.workload.has_reference or work.has_reference):
            continue
        ours, theirs = getattr(drawn.workload, field.name), getattr(work, field.name)
        if (ours, theirs) == ("dapo", "grpo"):
            continue  # elsewhere it is GRPO with another clip range, which changes no step
        if ours != theirs:
            yield f"workload.{field.name}: {ours} -> {theirs}"
    old = drawn.placement
    for name in ("backend", "weight_path", "schedule"):
        if getattr(old, name) != getattr(placed, name):
            yield f"{name}: {getattr(old, name)} -> {getattr(placed, name)}"
    if set(old.roles) != set(placed.roles):
        yield f"roles: {set(old.roles)} -> {set(placed.roles)}"
    for name, role in old.roles.items():
        if (other := placed.roles.get(name)) is not None:
            yield from _role(name, old, role, placed, other)


def _role(name: str, old: Placement, role: Any, placed: Placement, other: Any) -> Iterator[str]:
    if old.pool(role.pool).gpus != placed.pool(other.pool).gpus:
        yield f"{name}.gpus: {old.pool(role.pool).gpus} -> {placed.pool(other.pool).gpus}"
    both = old.roles.keys() & placed.roles.keys()
    if any((old.roles[n].pool == role.pool) != (placed.roles[n].pool == other.pool) for n in both):
        yield f"{name}.pool: shared with others"
    for field in fields(type(role)):
        ours, theirs = getattr(role, field.name), getattr(other, field.name)
        if field.name == "layout":
            scoring = name in ("reference", "reward")
            yield from _layout(name, _used(ours, scoring), _used(theirs, scoring))
        elif field.name == "offload_between" and role.residency == other.residency == "offloaded":
            continue  # all leaves
        elif field.name != "pool" and ours != theirs:
            yield f"{name}.{field.name}: {ours} -> {theirs}"


def _used(layout: Any, scoring: bool) -> dict[str, Any]:
    values = {field.name: getattr(layout, field.name) for field in fields(type(layout)) if field.init}
    if isinstance(layout, Layout):
        values["score_pack_tokens"] = layout.pack(scoring=True)
        values["pack_tokens"] = None if scoring else layout.pack_tokens
        values["score_micro_batch"] = layout.sequences(scoring=True)
        values["micro_batch"] = None if scoring else layout.micro_batch
        if layout.tp == 1:
            values["sequence_parallel"] = True
        values["zero"] = layout.zero == 3 if scoring else layout.zero
        values = {k: v for k, v in values.items() if not (scoring and k in SCORING_KEEPS)}
    return values


def _layout(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    for field, value in ours.items():
        if theirs[field] != value:
            yield f"{name}.layout.{field}: {value} -> {theirs[field]}"


def check(drawn: Plan, framework: str, folder: Path) -> None:
    """Nothing reads back differently but what the export names, and what it does not name costs nothing."""
    work, placed = read_back(drawn, framework, folder)
    unsaid = export(drawn, framework, frozenset()).written.unsaid
    named = {field for u in unsaid for field in u.of}
    found = {line.split(": ")[0]: line for line in differences(drawn, work, placed)}
    assert [line for field, line in found.items() if field not in named] == []
    assert [u.sentence for u in unsaid if u.instead.endswith(AS_READ)] == []
    if not found:
        again = estimate(placed, work, cluster_of(drawn))
        assert again.prediction.step_s == pytest.approx(drawn.prediction.step_s, rel=1e-9)


# --- designed plans -----------------------------------------------------------------------------------------

BASE = Workload(
    model="qwen2.5-7b",
    prompts=64,
    reward=RULES,
    prompt_len=Fixed(value=512),
    response_len=LogNormal(mean=800, max=2048),
)
NOT_SAID = {
    ("nemo-rl", "a reward model"): "it is an environment; a comment holds it",
    ("skyrl", "a reward model"): "rewards come from the environment; a comment holds it",
    ("areal", "a reward model"): "rewards come from a function of the script; a comment holds it",
    ("slime", "a reward model"): "it is served elsewhere; a comment holds it",
    (
        "trl",
        "old log-probs of the rollout",
    ): "asked for; TRL takes those of the training pass, or computes them",
    ("nemo-rl", "old log-probs of the rollout"): "asked for; NeMo-RL takes those of the training pass",
    ("slime", "vLLM, whose speed is priced"): "SGLang has no curves here",
    ("slime", "memory_utilization"): "SGLang counts graphs and activations beside its share",
    ("slime", "old log-probs"): "a question asks for a pass of their own, which slime leaves out",
    ("slime", "a limit of"): "slime keeps no limit of policy versions",
    ("trl", "prompts of at most"): "TRL cuts no prompts: the data set is filtered",
}
"""(framework, how an entry of `unsaid` begins) -> why a design may have what cannot be said."""


def question(name: str, seed: int) -> Request:
    """A small design question that a framework answers."""
    rng, runs = random.Random(f"{name} {seed}"), framework(name)
    backend = rng.choice(list(runs.trainers))
    changes: dict[str, Any] = {
        "algorithm": rng.choice(("ppo", "grpo", "grpo", "dr-grpo", "rloo", "reinforce++")),
        "model": rng.choice(("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-7b", "olmoe-1b-7b")),
        "samples": rng.choice((4, 8)),
        "mini_batches": rng.choice((1, 2)),
        "kl": rng.random() < 0.7,
        "lora": rng.choice((None, None, Lora(rank=16))),
        "old_logprobs": rng.choice(("recompute", "recompute", "rollout")),
        "packing": not runs.pads and (name in ALWAYS_PACK or rng.random() < 0.7),
        "response_len": rng.choice((BASE.response_len, Fixed(value=1024))),
        "reward": rng.choice((RULES, RULES, Reward(model="qwen2.5-1.5b"))),
    }
    work = replace(BASE, **changes)
    for field, plain in (("algorithm", "grpo"), ("lora", None), ("old_logprobs", "recompute")):
        if runs.lacks_workload(work, backend) is not None:
            work = replace(work, **{field: plain})
    more = rng.choice(({}, {}, {"forbid": frozenset({"hybrid", "naive", "smart"})}, OFF_POLICY))
    gpus = rng.choice((2, 4, 8, 8, 16))
    return Request(
        cluster=parse_cluster(gpus, "h100"), workload=work, backend=backend, framework=name, **more
    )


ALWAYS_PACK = ("slime", "areal")
OFF_POLICY: Any = {"architecture": "async", "allow": frozenset({"async"}), "max_staleness": 2}
SEEDS = 5


@pytest.mark.parametrize("name", exporters())
def test_a_designed_plan_is_what_its_export_says(name: str, tmp_path: Path) -> None:
    """Nothing of it reads back differently, and the step is the same, but for `NOT_SAID`."""
    designed = 0
    for seed in range(SEEDS):
        asked = question(name, seed)
        drawn = design(asked, explain=False, rivals=False, simplest_s=None).chosen
        if drawn is None:
            continue
        designed += 1
        (tmp_path / str(seed)).mkdir()
        work, placed = read_back(drawn, name, tmp_path / str(seed))
        unsaid = export(drawn, name, frozenset()).written.unsaid
        whats = [u.what for u in unsaid]
        assert [w for w in whats if not any(n == name and w.startswith(x) for n, x in NOT_SAID)] == [], seed
        named = {field for u in unsaid for field in u.of}
        found = list(differences(drawn, work, placed))
        rest = [line for line in found if line.split(": ")[0] not in named]
        assert rest == [], seed
        if not found:
            again = estimate(placed, work, cluster_of(drawn))
            assert again.prediction.step_s == pytest.approx(drawn.prediction.step_s, rel=1e-9), seed
    assert designed > SEEDS // 2


RECIPES = [
    (framework, path.name)
    for framework in ("verl", "openrlhf", "nemo-rl", "trl")
    for path in sorted((ROOT / "scenarios/recipes").glob(f"{framework}-*.yaml"))
]


def same_recipe(framework: str, name: str, folder: Path) -> None:
    recipe = estimate_file(ROOT / "scenarios/recipes" / name)
    check(recipe, framework, folder)


@pytest.mark.parametrize(("framework", "name"), RECIPES[::4], ids=[name for _, name in RECIPES[::4]])
def test_a_recipe_is_the_same_after_export_and_reading(framework: str, name: str, tmp_path: Path) -> None:
    same_recipe(framework, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize(("framework", "name"), RECIPES, ids=[name for _, name in RECIPES])
def test_every_recipe_is_the_same_after_export_and_reading(framework: str, name: str, tmp_path: Path) -> None:
    same_recipe(framework, name, tmp_path)


MOE = workload("grpo", model="qwen3-30b-a3b")
DYNAMIC = workload(
    "grpo", mini_batches=4, dynamic_sampling=DynamicSampling(kept=0.6, gen_prompts=256, max_gen_batches=10)
)
FP8 = workload("gspo", rollout_precision="fp8")
HOST = {"offload_optimizer": "cpu", "offload_params": "cpu"}
NGRAM = {"method": "ngram", "draft_tokens": 4, "acceptance": 0.5}
DRAWN: dict[str, tuple[str, Workload, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "verl HSDP, dynamic sampling": (
        "verl",
        DYNAMIC,
        "fsdp2",
        {"dp": 16, "zero": 3, "shards": 8} | PACKS,
        {"tp": 2, "dp": 8, "max_num_seqs": 512, "cuda_graphs": False},
        {},
    ),
    "verl PPO, ZeRO-2": (
        "verl",
        workload("ppo", epochs=2),
        "fsdp2",
        {"dp": 8, "zero": 2, "micro_batch": 2, "recompute": "none"},
        {"tp": 2, "dp": 4, "max_batched_tokens": 16384},
        {"residency": "offloaded"},
    ),
    "verl PPO, Megatron": (
        "verl",
        workload("ppo", gradients="bf16"),
        "megatron",
        {"tp": 2, "pp": 2, "cp": 2, "dp": 2, "vp": 2, "zero": 1, "recompute": "full"} | PACKS,
        {"tp": 4, "dp": 4},
        {},
    ),
    "verl experts, optimizer on the host": (
        "verl",
        MOE,
        "megatron",
        {"tp": 2, "dp": 8, "ep": 8, "etp": 1, "zero": 1, "offload_optimizer": "cpu", "offload_fraction": 0.5},
        {"tp": 2, "attention_dp": 4, "ep": 8, "dp": 2},
        {},
    ),
    "verl FP8 and n-grams": (
        "verl",
        FP8,
        "fsdp2",
        {"dp": 8, "zero": 3, **HOST} | PACKS,
        {"tp": 2, "dp": 4, "precision": "fp8", "speculation": NGRAM},
        {},
    ),
    "verl adapters, merged": (
        "verl",
        workload("grpo", lora=Lora(rank=32)),
        "fsdp2",
        {"dp": 8, "zero": 3},
        {"dp": 8},
        {},
    ),
    "verl asynchronous": (
        "verl",
        workload("grpo", kl=False, old_logprobs="rollout"),
        "fsdp2",
        {"dp": 8, "zero": 3} | PACKS,
        {"tp": 2, "dp": 4},
        {"apart": 8, "schedule": {"staleness": 4, "partial_rollout": True, "lend": True}},
    ),
    "openrlhf PPO, ring attention": (
        "openrlhf",
        workload("ppo", gradients="fp32"),
        "deepspeed",
        {"dp": 4, "cp": 2, "zero": 3, "micro_batch": 2, "offload_optimizer": "cpu"},
        {"tp": 2, "dp": 4, "max_num_seqs": 256},
        {},
    ),
    "openrlhf QLoRA, packs": (
        "openrlhf",
        workload("grpo", lora=Lora(rank=16, base="nf4")),
        "deepspeed",
        {"dp": 8, "zero": 2, "recompute": "none"} | PACKS,
        {"dp": 8, "max_num_seqs": 256, "cuda_graphs": False},
        {},
    ),
    "openrlhf asynchronous": (
        "openrlhf",
        workload("rloo"),
        "deepspeed",
        {"dp": 8, "zero": 3} | PACKS,
        {"dp": 8, "max_num_seqs": 256},
        {"apart": 8, "schedule": {"staleness": 2, "partial_rollout": True}},
    ),
    "nemo-rl DTensor": (
        "nemo-rl",
        workload("rloo", lora=Lora(rank=32)),
        "fsdp2",
        {"dp": 4, "cp": 2, "zero": 3, "recompute": "none", **HOST} | PACKS,
        {"tp": 2, "dp": 4},
        {},
    ),
    "nemo-rl Megatron, FP32 sums": (
        "nemo-rl",
        workload("dr-grpo", dynamic_sampling=DynamicSampling(kept=0.5, gen_prompts=256, max_gen_batches=10)),
        "megatron",
        {"tp": 2, "pp": 2, "cp": 2, "dp": 2, "zero": 1, "recompute": "selective"} | PACKS,
        {"tp": 4, "dp": 4, "max_num_seqs": 128, "max_batched_tokens": 16384},
        {},
    ),
    "nemo-rl experts, asynchronous": (
        "nemo-rl",
        workload("grpo", model="qwen3-30b-a3b", kl=False, kv_precision="fp8", gradients="bf16"),
        "megatron",
        {"tp": 2, "dp": 8, "ep": 8, "zero": 1} | PACKS,
        {"tp": 4, "dp": 4, "ep": 4, "kv_precision": "fp8", "speculation": NGRAM},
        {"apart": 16, "schedule": ASYNC},
    ),
    "trl server, 8-bit Adam": (
        "trl",
        workload("rloo", optimizer="adam8bit", mini_batches=1, packing=False),
        "deepspeed",
        {"dp": 8, "zero": 2, "micro_batch": 4},
        {"tp": 4, "dp": 2, "cuda_graphs": False, "memory_utilization": 0.8},
        {"apart": 8},
    ),
    "trl FSDP2": (
        "trl",
        workload("cispo", packing=False),
        "fsdp2",
        {"dp": 8, "zero": 3, "micro_batch": 4, "recompute": "none"},
        {"tp": 2, "dp": 4},
        {},
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_plan_of_every_field_is_the_same_after_export_and_reading(name: str, tmp_path: Path) -> None:
    framework, work, backend, layout, rollout, more = DRAWN[name]
    check(plan(work, backend, layout, rollout, **more), framework, tmp_path)


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize(
    ("framework", "plans"),
    [("verl", for_verl), ("openrlhf", for_openrlhf), ("trl", for_trl)],
    ids=["verl", "openrlhf", "trl"],
)
def test_plans_whose_export_is_accepted_are_the_same_after_reading(
    framework: str, plans: Any, tmp_path: Path
) -> None:
    for i, drawn in enumerate(plans()):
        (tmp_path / str(i)).mkdir()
        check(drawn, framework, tmp_path / str(i))
