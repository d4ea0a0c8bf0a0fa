"""Plans that train on given pairs, labels or responses: written for a framework, and read back as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhfsim.api import estimate
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.described import Lengths, placement_of, workload_of
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.export import export
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Algorithm, Workload
from tests.frameworks.silent import silent

WRITTEN: dict[str, dict[Algorithm, str]] = {
    "nemo-rl": {
        "sft": "run_sft.py --config examples/configs/sft.yaml",
        "reward_model": "run_rm.py --config examples/configs/rm.yaml",
        "dpo": "run_dpo.py --config examples/configs/dpo.yaml",
    },
    "openrlhf": {
        "sft": "openrlhf.cli.train_sft",
        "reward_model": "openrlhf.cli.train_rm",
        "dpo": "openrlhf.cli.train_dpo",
    },
    "verl": {"sft": "torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer"},
    "trl": {"sft": "trl sft", "reward_model": "trl reward", "dpo": "trl dpo", "kto": "trl kto"},
}
"""Framework -> algorithm -> what starts it."""
CASES = [(name, algorithm) for name, starts in WRITTEN.items() for algorithm in starts]


def planned(name: str, algorithm: Algorithm, backend: Backend = "deepspeed", **layout: Any) -> Plan:
    cut = {"dp": 8, "zero": 3, "micro_batch": 4, "recompute": "full", **layout}
    role = RolePlacement(pool="all", layout=Layout(**cut))
    work = Workload(
        algorithm=algorithm,
        model="llama-3.1-8b",
        prompts=256,
        packing=not framework(name).pads and name != "nemo-rl",  # whose packs are of tokens
        prompt_len=Fixed(value=512),
        response_len=Fixed(value=512),
    )
    placement = Placement(
        pools=(ResourcePool(name="all", gpus=8),),
        actor=role,
        reference=replace(role, residency="swapped" if framework(name).always_swaps else "resident")
        if work.has_reference
        else None,
        backend=backend,
    )
    return replace(estimate(placement, work, parse_cluster(8, "h100")), framework=name)


@pytest.mark.parametrize(("name", "algorithm"), CASES)
def test_a_plan_reads_back_as_it_was(name: str, algorithm: Algorithm, tmp_path: Path) -> None:
    backend = next(iter(framework(name).trainers))
    plan = planned(
        name, algorithm, backend, **({"zero": 1, "tp": 2, "dp": 4} if backend == "megatron" else {})
    )
    found = export(plan, name, frozenset())
    assert WRITTEN[name][algorithm] in found.files["launch.sh"]
    assert not found.written.unsaid
    for file, text in found.files.items():
        (tmp_path / file).write_text(text)
    configuration, settings = read_configuration([tmp_path], {"MODEL": plan.workload.model})
    assert configuration.name == name
    run = configuration.run(settings)
    again = workload_of(run, Lengths(prompt=512, response=512, longest=None))
    assert again.algorithm == algorithm
    assert (again.prompts, again.samples, again.mini_batches, again.packing) == (
        *(256, 1, 1),
        plan.workload.packing,
    )
    placed = placement_of(run, again)
    assert placed.actor == plan.placement.actor
    assert placed.role("reference") == plan.placement.role("reference")
    assert placed.rollout is None
    assert run.max_tokens == 1024


@pytest.mark.parametrize(("name", "algorithm"), CASES)
def test_every_field_that_changes_the_price_is_written_or_named(name: str, algorithm: Algorithm) -> None:
    for backend in framework(name).trainers:
        plan = planned(name, algorithm, backend, zero=1 if backend == "megatron" else 3)
        assert list(silent(plan, name)) == []


@pytest.mark.parametrize(
    ("name", "algorithm", "backend"),
    [("skyrl", "sft", "fsdp2"), ("areal", "dpo", "fsdp2"), ("slime", "sft", "megatron")],
)
def test_what_is_run_and_not_written_says_who_writes_it(
    name: str, algorithm: Algorithm, backend: Backend
) -> None:
    plan = planned(name, algorithm, backend, zero=1 if backend == "megatron" else 3)
    with pytest.raises(RlhfsimError, match="is written for algorithms that generate") as refused:
        export(plan, name, frozenset())
    assert "trl" in str(refused.value.help)


@pytest.mark.parametrize(
    "starts",
    [
        "deepspeed --module openrlhf.cli.train_kto --pretrain Qwen/Qwen3-8B --micro_train_batch_size 2",
        "python3 examples/alignment/hhrlhf_rw.py --config x.yaml actor.path=Qwen/Qwen3-8B",
        "actor: {path: Qwen/Qwen3-1.7B, backend: 'fsdp:d8'}\ntrain_dataset:\n  path: openai/gsm8k\n  type: dpo\n",
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_a_trainer_that_is_not_read_is_refused_by_its_name(starts: str, *, named: bool) -> None:
    """It was read as PPO or GRPO, with a verdict."""
    name = next(n for n, marks in MARKS.items() if any(mark in starts for mark in marks))
    with pytest.raises(RlhfsimError, match="trains on given data") as refused:
        read_configuration(starts, {}, name if named else None)
    assert refused.value.code == "trainer-not-read"
    assert "estimate --algorithm" in str(refused.value.help)


def test_only_the_data_set_of_areal_says_what_it_trains() -> None:
    """Another framework's keys may have a type of the same name."""
    text = "grpo: {num_prompts_per_step: 32}\npolicy: {model_name: Qwen/Qwen3-8B}\nlogger:\n  type: sft\n"
    assert read_configuration(text, {})[0].name == "nemo-rl"


MARKS = {"openrlhf": ["openrlhf.cli"], "areal": ["hhrlhf", "type: dpo"]}


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
@pytest.mark.parametrize(("loop", "algorithm"), [("sft", "sft"), ("rm", "reward_model"), ("dpo", "dpo")])
def test_keys_of_nemo_rl_stand_in_the_file_that_they_override(
    loop: str, algorithm: Algorithm, backend: Backend
) -> None:
    """Hydra refuses others that do not begin with ++."""
    lines = (KEYS / f"nemo_rl_{loop}.txt").read_text().splitlines()
    known = {line.split()[0] for line in lines if not line.startswith("#")}
    plan = planned("nemo-rl", algorithm, backend, zero=1 if backend == "megatron" else 3)
    values = export(plan, "nemo-rl", frozenset()).written.values
    assert {key for key in values if not key.startswith("++")} - known == set()


KEYS = Path(__file__).parents[1] / "data/framework_keys"
