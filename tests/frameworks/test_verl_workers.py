"""What verl's workers do with keys that its parser takes, release by release."""

from __future__ import annotations

import pytest

from rlhfsim.api import estimate_file
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.export import in_keys
from rlhfsim.memory.role_bytes import role_memory
from rlhfsim.memory.states import gathered_bytes, shard
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.placement.software import Software
from tests.frameworks.test_accepted import workload

ROLL, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
BATCHED, CHUNKED = f"{ROLL}.max_num_batched_tokens", f"{ROLL}.enable_chunked_prefill"
RUN = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=qwen2.5-7b "
    f"{ROLL}.n=8 {ACTOR}.use_dynamic_bsz=True data.max_prompt_length=2048 data.max_response_length=8192"
)
ASYNCHRONOUS = RUN.replace("trainer.main_ppo", "experimental.fully_async_policy.fully_async_main")
DEFERS = f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation"
PSI = preset("qwen2.5-7b").num_params


def _found(text: str, **values: object):
    said = {key.replace("__", "."): value for key, value in values.items()}
    configuration, settings = read_configuration(text, said)
    run = configuration.run(settings)
    return run, {finding.what: finding.stops for finding in configuration.findings(settings, run)}


def _said(found: dict[str, bool], part: str) -> bool | None:
    """Whether the finding with these words stops the run; None: there is none."""
    return next((stops for what, stops in found.items() if part in what), None)


@pytest.mark.parametrize(
    ("version", "keys", "whole"),
    [
        ("0.8", "", False),
        ("0.9.0", "", True),
        ("0.9.1", "", False),
        ("0.9.1", f" {DEFERS}=True", True),
        ("0.8", f" {DEFERS}=True", False),
    ],
)
def test_whole_gradients_are_summed_in_0_9_0_and_on_request_after_it(
    version: str, keys: str, whole: bool
) -> None:
    run, found = _found(RUN + keys, verl_version=version)
    assert (run.software is not None and run.software.sums_whole) == whole
    assert (_said(found, "whole gradients in BF16, 15.2 GB") is False) == whole


@pytest.mark.parametrize(("flat", "width"), [(True, 2), (False, 4)])
def test_whole_gradients_stand_beside_what_a_further_micro_batch_computes(flat: bool, width: int) -> None:
    layout, model = Layout(dp=8, zero=3, micro_batch=1), preset("qwen2.5-7b")

    def held(whole: bool) -> float:
        software = Software(stack="eager", fused=False, flat_parameters=flat, sums_whole=whole)
        memory = role_memory(
            Models(actor=model),
            "actor",
            workload("grpo", prompts=64, samples=8, mini_batches=1),
            backend="fsdp2",
            profile=load_profile("h100_sxm"),
            software=software,
        )
        return float(memory.of(RolePlacement(pool="all", layout=layout)).train.buffers)

    added = held(True) - held(False)
    assert (width - 4 / 8) * PSI * 0.85 < added < (width - 4 / 8) * PSI


@pytest.mark.parametrize(
    ("version", "stops", "tokens"), [("0.6", True, 8192), ("0.8", True, 8192), ("0.9.1", False, 32768)]
)
def test_a_prefill_budget_below_the_context_is_refused_or_raised(
    version: str, stops: bool, tokens: int
) -> None:
    run, found = _found(f"{RUN} {CHUNKED}=False", verl_version=version)
    assert _said(found, "prefills 8,192 tokens at once") is stops
    assert run.rollout.max_batched_tokens == tokens
    told, quiet = _found(f"{RUN} {CHUNKED}=False {ROLL}.max_model_len=10240", verl_version="0.9.1")
    assert told.rollout.max_batched_tokens == 10240
    assert _said(quiet, "up to 10,240") is False


def test_until_0_6_the_engine_in_the_trainer_refuses_a_budget_below_a_sample() -> None:
    assert _said(_found(RUN, verl_version="0.6")[1], "up to 10,240: verl refuses it") is True
    assert _said(_found(f"{RUN} {ROLL}.mode=async", verl_version="0.6")[1], "prefills") is None
    assert _said(_found(RUN, verl_version="0.8")[1], "prefills") is None


@pytest.mark.parametrize(("version", "stops"), [("0.7", False), ("0.8", True), ("0.9.1", True)])
def test_log_probs_on_other_micro_batches_than_training_stop_a_run_since_0_8(
    version: str, stops: bool
) -> None:
    found = _found(f"{RUN} {ROLL}.log_prob_use_dynamic_bsz=False", verl_version=version)[1]
    assert _said(found, "log_prob_use_dynamic_bsz is False") is stops
    assert _said(_found(RUN, verl_version=version)[1], "log_prob_use_dynamic_bsz") is None


def test_engines_on_gpus_of_their_own_have_their_share_of_memory_in_one_trainer() -> None:
    keys = f" rollout.nnodes=1 rollout.n_gpus_per_node=8 {ROLL}.standalone_gpu_memory_utilization=0.85"
    assert _found(ASYNCHRONOUS + keys)[0].rollout.memory_utilization == 0.85
    assert _found(ASYNCHRONOUS)[0].rollout.memory_utilization == 0.5
    assert _found(RUN + keys)[0].rollout.memory_utilization == 0.5


@pytest.mark.parametrize(
    ("word", "bytes_"), [("", 16), ("fp32", 16), ("bf16", 8), ("bfloat16", 8), ("torch.bfloat16", 8)]
)
def test_shards_in_bf16_have_gradients_and_moments_of_their_type_and_no_master(
    word: str, bytes_: int
) -> None:
    run, _ = _found(RUN + (f" {ACTOR}.fsdp_config.model_dtype={word}" if word else ""))
    layout = Layout(dp=8, zero=3, micro_batch=1)
    memory = role_memory(
        Models(actor=preset("qwen2.5-7b")),
        "actor",
        workload("grpo", prompts=64, samples=8, mini_batches=1),
        backend="fsdp2",
        profile=load_profile("h100_sxm"),
        software=run.software,
    )
    states = memory.of(RolePlacement(pool="all", layout=layout)).states
    assert states.total == pytest.approx(bytes_ * PSI / 8, rel=1e-3)


def test_shards_in_bf16_are_gathered_as_they_are() -> None:
    layout, model = Layout(dp=8, zero=3, micro_batch=1), preset("qwen2.5-7b")
    part = shard(model, layout, "fsdp2", 0)
    cast, own = (gathered_bytes(part, layout, "fsdp2", cast=cast) for cast in (True, False))
    assert cast - own == pytest.approx(2 * part.layer / 8)


@pytest.mark.parametrize(("word", "width"), [("", 4.0), (f" {ACTOR}.fsdp_config.model_dtype=bf16", 2.0)])
def test_the_base_of_adapters_is_fp32_unless_told(word: str, width: float) -> None:
    run, _ = _found(f"{RUN} actor_rollout_ref.model.lora_rank=32{word}")
    assert run.software is not None
    assert run.software.base_bytes == width
    assert run.software.weight_bytes is None


@pytest.mark.parametrize(
    ("recipe", "adapters"), [("verl-qwen2.5-7b-lora-1-h100", True), ("verl-grpo-deepseek-7b", False)]
)
def test_an_export_loads_what_is_not_trained_in_bf16(recipe: str, adapters: bool) -> None:
    told = in_keys(estimate_file(f"scenarios/recipes/{recipe}.yaml"), "verl").values
    assert told.get(f"{ACTOR}.fsdp_config.model_dtype") == ("bf16" if adapters else None)
    assert told["actor_rollout_ref.ref.fsdp_config.model_dtype"] == "bf16"
