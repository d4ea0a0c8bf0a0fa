"""SkyRL's trainer of given data, as its arguments are read."""

from __future__ import annotations

import pytest

from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.recognise import read_configuration

START = "uv run --isolated python -m skyrl.train.main_sft model.path=Qwen/Qwen3-8B "
CALLBACKS = (
    "uv run -m examples.train.callbacks.main_sft_with_callbacks strategy=fsdp model.path=Qwen/Qwen3-8B"
)


def read(text: str) -> tuple[RunDescription, list[Finding]]:
    configuration, settings = read_configuration(text, {})
    assert configuration.name == "skyrl"
    run = configuration.run(settings)
    return run, list(configuration.findings(settings, run))


def test_what_is_not_said_is_as_in_skyrls_own_classes() -> None:
    run, found = read(START)
    layout = run.layout
    assert (run.algorithm, run.prompts, run.gpus, run.backend) == ("sft", 4, 4, "megatron")
    assert (layout.tp, layout.pp, layout.dp, layout.micro_batch, layout.recompute) == (2, 2, 1, 2, "full")
    assert (run.packing, run.max_response, run.kl, run.actor_residency) == (True, None, False, "resident")
    assert not found


def test_bins_are_packs_and_take_the_place_of_micro_batches() -> None:
    run, found = read(
        f"{START} use_sequence_packing=true max_length=2048 max_tokens_per_microbatch=8192 batch_size=64 "
        "megatron_config.tensor_model_parallel_size=1 megatron_config.pipeline_model_parallel_size=1 "
        "megatron_config.context_parallel_size=2 remove_microbatch_padding=false"
    )
    assert (run.layout.pack_tokens, run.layout.cp, run.packing, run.max_response) == (4096, 2, True, 2048)
    assert not found
    alone, _ = read(f"{START} use_sequence_packing=true max_length=2048")
    assert alone.layout.pack_tokens == 2048


def test_fsdp_and_its_states() -> None:
    run, _ = read(
        f"{START} strategy=fsdp placement.num_gpus_per_node=8 fsdp_config.cpu_offload=true model.lora.rank=8 "
        "sequence_parallel_size=2 fsdp_config.reshard_after_forward=false batch_size=16"
    )
    layout = run.layout
    assert (run.backend, layout.cp, layout.dp, layout.zero, run.lora_rank) == ("fsdp2", 2, 4, 2, 8)
    assert (layout.offload_optimizer, layout.offload_params) == ("cpu", "cpu")


def test_a_dummy_run_has_full_sequences() -> None:
    run, _ = read(f"{START} dummy_run_full_ctx=true max_length=2048")
    assert run.full
    assert run.max_response == run.max_tokens == 2048


def test_an_example_of_sft_beside_those_of_rl_is_sft() -> None:
    """It was read as GRPO, whose examples have such names."""
    assert read(CALLBACKS)[0].algorithm == "sft"


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("strategy=fsdp batch_size=6", "no multiple of micro-batches of 2 on 4 ranks"),
        ("strategy=fsdp batch_size=12 micro_train_batch_size_per_gpu=2", "no multiple"),
        (
            "use_sequence_packing=true max_length=4096 max_tokens_per_microbatch=2048",
            "bins of 2,048 tokens below the longest sample",
        ),
        (
            "use_sequence_packing=true max_length=4096 batch_size=1 megatron_config.tensor_model_parallel_size=1",
            "a rank without a bin",
        ),
    ],
)
def test_what_skyrl_refuses_is_found(said: str, what: str) -> None:
    found = read(f"{START} {said}")[1]
    assert [what in finding.what and finding.stops for finding in found] == [True]
    assert not read(f"{START} {said} {found[0].remedy}")[1]
