"""TRL's trainers of given data: read as what they are, written, and read back; logits as each trainer holds them."""

from __future__ import annotations

import pytest

from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.trl.heads import head_of
from rlhfsim.memory.logits import head_peak, logits_bytes
from rlhfsim.memory.role_bytes import software_of
from rlhfsim.specs.frameworks.files import heads_of
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.placement.heads import UNFUSED
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.workload import Algorithm

WHOLE, TILED, LIGER = (heads_of("trl")[name] for name in ("whole", "tiled", "liger"))
SAID = (
    "--model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 4 --gradient_accumulation_steps 8 "
    "--max_length 2048 --num_processes 8 --accelerate_config zero3"
)


def described(text: str, **given: str) -> RunDescription:
    configuration, settings = read_configuration(text, given)
    assert configuration.name == "trl"
    return configuration.run(settings)


@pytest.mark.parametrize(
    ("starts", "algorithm"),
    [
        ("trl sft", "sft"),
        ("trl dpo", "dpo"),
        ("trl kto", "kto"),
        ("trl reward", "reward_model"),
        ("accelerate launch trl/scripts/sft.py", "sft"),
        ("accelerate launch examples/scripts/dpo_vlm.py", "dpo"),
        ("accelerate launch examples/scripts/reward_modeling.py", "reward_model"),
        ("python train.py  # uses DPOConfig(...)", "dpo"),
        ("trl grpo", "grpo"),
        ("trl rloo", "rloo"),
    ],
)
def test_a_launch_is_read_as_what_it_trains(starts: str, algorithm: Algorithm) -> None:
    run = described(f"{starts} {SAID}" if "#" not in starts else f"{SAID}\n{starts}")
    assert run.algorithm == algorithm
    if algorithm in ("grpo", "rloo"):
        return
    assert (run.prompts, run.samples, run.mini_batches) == (256, 1, 1)
    assert run.layout.micro_batch == (8 if algorithm in ("dpo", "reward_model") else 4), (
        "pairs are two sequences"
    )
    assert run.kl == (algorithm in ("dpo", "kto"))
    assert (run.max_tokens, run.layout.recompute, run.layout.zero) == (2048, "full", 3)


def test_log_probs_of_the_reference_may_be_there_already() -> None:
    assert not described(f"trl dpo {SAID} --precompute_ref_log_probs").kl


def test_packed_rows_are_full() -> None:
    run = described(f"trl sft {SAID} --packing")
    assert run.full
    assert run.packing
    assert not described(f"trl sft {SAID}").full


@pytest.mark.parametrize(
    ("trainer", "version", "head"),
    [
        ("GRPOTrainer", None, TILED),
        ("GRPOTrainer", "1.15.0", TILED),
        ("GRPOTrainer", "1.14.0", WHOLE),
        ("SFTTrainer", "1.14.0", TILED),
        ("SFTTrainer", "1.13.0", UNFUSED),
        ("DPOTrainer", None, WHOLE),
        ("KTOTrainer", "1.16.0", TILED),
    ],
)
def test_logits_stand_as_each_release_of_a_trainer_holds_them(
    trainer: str, version: str | None, head: object
) -> None:
    assert head_of(trainer, version) is head


def test_a_plan_of_dpo_holds_its_logits_whole_and_one_of_grpo_in_tiles() -> None:
    runs = framework("trl")
    for backend in ("deepspeed", "fsdp2"):
        assert runs.by("dpo").heads[backend] is WHOLE
        assert software_of(None, "trl", backend, algorithm="dpo").head is WHOLE
        assert software_of(None, "trl", backend, algorithm="grpo").head is TILED


def test_liger_counts_where_a_release_still_has_its_loss() -> None:
    grpo = f"trl grpo {SAID} --use_liger_kernel true --use_vllm true --vllm_mode colocate"
    older = described(grpo, trl_version="1.10.0").software
    assert older is not None
    assert older.head is not None
    assert older.head.source == LIGER.source
    newest = described(grpo, trl_version="1.16.0").software
    assert newest is None or newest.head is None, "as the table of the newest release"


def test_a_tile_and_the_sums_of_its_gradients_are_counted_by_hand() -> None:
    """One tile of 4,096 x 32,768 in BF16; FP32 sums and BF16 copies of both gradients."""
    model, layout, tokens = preset("qwen3-8b"), Layout(dp=8), 8192.0
    tile = 2 * 4096 * 32_768
    scored = head_peak(model, layout, "deepspeed", tokens, TILED)
    assert scored == tile
    trained = head_peak(model, layout, "deepspeed", tokens, TILED, norm=2.0)
    assert trained == tile + 6 * model.vocab * model.hidden + 6 * tokens * model.hidden
    frozen = head_peak(model, layout, "deepspeed", tokens, TILED, norm=2.0, frozen=True)
    assert frozen == tile + 6 * tokens * model.hidden
    assert logits_bytes(model, layout, tokens, WHOLE, training=True) == 4 * tokens * model.vocab
