"""AReaL on given responses, as its configuration is read."""

from __future__ import annotations

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.recognise import read_configuration

TEXT = """\
cluster: {n_nodes: 1, n_gpus_per_node: 8}
actor:
  backend: "fsdp:d8p1t1"
  path: Qwen/Qwen3-1.7B
  gradient_checkpointing: true
  mb_spec: {max_tokens_per_mb: 4096}
train_dataset:
  batch_size: 128
  path: openai/gsm8k
  type: sft
"""


def read(text: str, **given: str) -> tuple[RunDescription, list[Finding]]:
    configuration, settings = read_configuration(text, {k.replace("__", "."): v for k, v in given.items()})
    assert configuration.name == "areal"
    run = configuration.run(settings)
    return run, list(configuration.findings(settings, run))


def test_a_batch_of_the_data_set_is_one_update() -> None:
    run, found = read(TEXT)
    layout = run.layout
    assert (run.algorithm, run.prompts, run.samples, run.mini_batches, run.kl) == ("sft", 128, 1, 1, False)
    assert (run.backend, run.gpus, layout.zero, layout.pack_tokens) == ("fsdp2", 8, 3, 4096)
    assert (layout.recompute, run.max_response, run.actor_residency) == ("full", None, "resident")
    assert not found


def test_without_a_budget_a_batch_is_cut_into_a_number_of_micro_batches() -> None:
    run, _ = read(TEXT.replace("{max_tokens_per_mb: 4096}", "{n_mbs: 4}"))
    assert (run.layout.pack_tokens, run.layout.micro_batch) == (None, 4)


def test_megatron_and_adapters() -> None:
    run, _ = read(TEXT, actor__backend="megatron:d2p2t2", actor__use_lora="true", actor__lora_rank="8")
    assert (run.backend, run.layout.tp, run.layout.pp, run.layout.zero) == ("megatron", 2, 2, 1)
    assert run.lora_rank == 8


def test_an_allocation_without_an_engine_is_fsdps() -> None:
    run, _ = read(TEXT.replace('backend: "fsdp:d8p1t1"', "dtype: bfloat16") + "allocation_mode: d4t2\n")
    assert (run.backend, run.layout.dp, run.layout.tp) == ("fsdp2", 4, 2)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"train_dataset__max_length": "8192"}, "exceeds the budget of 4,096 tokens"),
        ({"train_dataset__batch_size": "100"}, "do not split over 8 data-parallel ranks"),
        ({"actor__backend": "fsdp:d16"}, "the backends take 16 GPUs, the cluster has 8"),
    ],
)
def test_what_areal_stops_at_is_found(given: dict[str, str], what: str) -> None:
    found = read(TEXT, **given)[1]
    assert [(what in finding.what, finding.stops) for finding in found] == [(True, True)]


def test_its_script_alone_asks_for_what_its_configuration_says() -> None:
    with pytest.raises(RlhfsimError, match=r"actor\.backend"):
        read("python3 examples/math/gsm8k_sft.py --config gsm8k_sft.yaml actor.path=Qwen/Qwen3-8B")


def test_other_trainers_of_given_data_are_refused_still() -> None:
    with pytest.raises(RlhfsimError, match="trains on given data"):
        read(TEXT.replace("type: sft", "type: dpo"))
