from __future__ import annotations

from dataclasses import replace

import pytest

from lab.scoreboard.rows import rows_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.devices import device_on
from rlhfsim.specs.workload.lengths import Fixed, cut_log_normal, stats
from rlhfsim.step.iteration import Iteration
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.rlhf import reason_incomplete, specs_of, staleness_of
from rlhfsim.validation.kinds.rlhf import job_of, priced, step_seconds
from rlhfsim.validation.rows import Row, parse_csv


def filled(line: int) -> Row:
    (row,) = [r for r in rows_of("rlhf") if (r.file, r.line) == ("rlhf.csv", line)]
    return assumptions.apply("rlhf", row)[0]


def step(line: int) -> Iteration:
    return priced(specs_of(filled(line)))


def seconds(found: Iteration, name: str) -> float:
    return sum(phase.cost.seconds for phase in found.phases if phase.name == name)


def user_row(**cells: str) -> Row:
    base = {
        "algorithm": "GRPO",
        "actor_model": "llama-3.1-8b",
        "gpus": "16",
        "gpu_type": "H100",
        "step_time_s": "90",
        "gen_tp": "1",
        "train_backend": "FSDP2",
        "sequences_per_step": "512",
        "mean_prompt_len": "100",
        "mean_response_len": "900",
        "max_response_len": "4000",
    } | cells
    text = ",".join(base) + "\n" + ",".join(base.values()) + "\n"
    return parse_csv(text.encode(), "mine.csv")[0]


def test_the_colocated_recipe_shares_one_pool_with_the_layout_of_the_table() -> None:
    it = specs_of(filled(2))  # Qwen3-235B on 128 H100: generation [16,1], training [2,2,16,8]
    layout = it.placement.actor.layout
    assert (layout.tp, layout.cp, layout.ep, layout.pp, layout.dp) == (2, 2, 16, 8, 4)
    assert it.placement.rollout is not None
    assert (it.placement.rollout.layout.tp, it.placement.rollout.layout.dp) == (16, 8)
    assert it.placement.architecture == "hybrid"


def test_an_off_policy_row_has_two_pools_and_its_staleness() -> None:
    it = specs_of(filled(7))  # 8-step off on 192 GPUs: 64 generate
    assert [pool.gpus for pool in it.placement.pools] == [128, 64]
    assert it.placement.schedule.staleness == 8
    assert it.placement.architecture == "async"


def test_mini_batches_are_sequences_over_the_training_batch() -> None:
    assert specs_of(filled(5)).workload.mini_batches == 4  # 2048 over 512
    assert specs_of(filled(2)).workload.mini_batches == 1


def test_mean_lengths_of_the_workload_are_the_published_ones() -> None:
    workload = specs_of(filled(9)).workload
    assert stats(workload.prompt_len).mean + stats(workload.response_len).mean == pytest.approx(
        1019, rel=1e-3
    )


def test_packs_of_scoring_hold_what_the_recipe_says() -> None:
    layout = specs_of(filled(9)).placement.actor.layout  # logprob_batch_size 2 times 4096 tokens
    assert (layout.pack(scoring=False), layout.pack(scoring=True)) == (4096, 8192)
    assert specs_of(user_row()).placement.actor.layout.pack_tokens is None


def test_packs_of_a_table_are_those_of_all_ranks_of_a_sequence() -> None:
    layout = specs_of(filled(2)).placement.actor.layout  # cp 2, max_total_sequence_length 8192
    assert (layout.pack_tokens, layout.pack(scoring=False)) == (4096, 8192)


def test_weights_of_a_shared_pool_leave_for_the_rollout_and_those_of_a_pool_of_its_own_stay() -> None:
    assert specs_of(filled(9)).placement.actor.residency == "offloaded"
    assert specs_of(filled(10)).placement.actor.residency == "resident"


def test_the_row_that_trained_in_fp8_is_priced_in_fp8() -> None:
    assert [specs_of(filled(line)).workload.train_precision for line in (10, 15)] == ["bf16", "fp8"]
    assert step(15).seconds < step(10).seconds


def test_larger_packs_of_scoring_save_launches_of_a_mixture_of_experts() -> None:
    it = specs_of(filled(5))
    layout = replace(it.placement.actor.layout, score_pack_tokens=None)
    actor = replace(it.placement.actor, layout=layout)
    small = priced(replace(it, placement=replace(it.placement, actor=actor)))
    assert seconds(small, "actor.logprob") > 1.5 * seconds(priced(it), "actor.logprob")


def test_plans_for_one_job_share_it_whatever_their_layout_and_release() -> None:
    jobs = {line: job_of(filled(line), specs_of(filled(line))) for line in (9, 10, 15, 16, 5)}
    assert jobs[9] == jobs[10] == jobs[15]
    assert jobs[16] == (jobs[9][0], "0.4")
    assert jobs[5][0] != jobs[9][0]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.8, 0.97])
def test_a_cut_distribution_keeps_its_mean_and_its_longest(share: float) -> None:
    lengths = cut_log_normal(4000 * share, 4000)
    assert stats(lengths).mean == pytest.approx(4000 * share, rel=1e-3)
    assert lengths.maximum == 4000


def test_without_a_longest_response_all_are_equal() -> None:
    assert cut_log_normal(500, None) == Fixed(value=500)
    assert cut_log_normal(3999, 4000) == Fixed(value=3999)


@pytest.mark.parametrize(
    ("text", "value"),
    [("On policy", 0), ("", 0), ("1-step Off", 1), ("8-step Off", 8), ("0.5 + partial rollout", 0.5)],
)
def test_staleness_is_the_number_in_the_words(text: str, value: float) -> None:
    assert staleness_of(user_row(staleness=text)) == value


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"mean_response_len": ""}, "mean lengths not published"),
        ({"sequences_per_step": ""}, "batch not published"),
        ({"gen_tp": ""}, "gen_tp not published"),
        ({"train_backend": "Megatron"}, "training layout not published"),
        ({"staleness": "1-step Off"}, "GPU split not published"),
        ({"sequences_per_step": "99999999"}, "batch above ten million"),
    ],
)
def test_an_incomplete_row_says_what_is_missing(cells: dict[str, str], reason: str) -> None:
    assert reason_incomplete(user_row(**cells)) == reason


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gpu_type": "Ascend 910B"}, "unknown hardware profile"),
        ({"actor_model": "nobody-7b"}, "unknown model"),
        ({"gen_tp": "3"}, "does not fill 16 GPUs"),
        ({"algorithm": "AIPO"}, "algorithm AIPO"),
        ({"gpus_train": "8", "gpus_gen": "0"}, "do not split 16"),
        ({"gpus_train": "16", "gpus_gen": "16"}, "do not split 16"),
        ({"train_backend": "JAX"}, "training backend JAX"),
        ({"recompute": "some"}, "recompute some"),
        ({"weight_path": "magic"}, "weight path magic"),
    ],
)
def test_what_is_not_known_here_is_a_reason_not_a_crash(cells: dict[str, str], reason: str) -> None:
    with pytest.raises(RlhfsimError, match=reason):
        priced(specs_of(user_row(**cells)))


def test_a_complete_row_of_a_user_needs_no_assumption() -> None:
    row = user_row()
    assert assumptions.apply("rlhf", row)[1] == ()
    assert reason_incomplete(row) is None
    assert specs_of(row).placement.actor.layout.zero == 3


def test_more_samples_or_mini_batches_than_sequences_are_cut_to_them() -> None:
    workload = specs_of(user_row(sequences_per_step="2", samples_per_prompt="5", mini_batches="1e9")).workload
    assert (workload.num_sequences, workload.mini_batches) == (2, 2)


def test_hours_over_steps_are_the_step_time() -> None:
    assert step_seconds(user_row(step_time_s="", total_hours="2", steps="100")) == 72
    with pytest.raises(RlhfsimError, match="not a number"):
        step_seconds(user_row(step_time_s="37-40"))
    assert step_seconds(user_row(step_time_s="", update_actor_s="3")) is None


def test_deepspeed_chat_hours_use_the_sample_count_of_its_token_count() -> None:
    row = filled(52)
    sequences, steps = row.integer("sequences_per_step"), row.integer("steps")
    assert sequences is not None
    assert steps is not None
    assert sequences * steps * 512 == pytest.approx(135_317_504, rel=0.005)


def test_stale_rows_are_simulated_in_steady_state_and_give_the_same_figure_each_time() -> None:
    one, again = step(6), step(6)
    assert one.seconds == again.seconds
    waits, trains = seconds(one, "actor.generate.wait"), seconds(one, "actor.train")
    generates = seconds(one, "actor.generate")
    assert 0 < waits < one.seconds - trains  # part of generation is hidden behind training
    assert generates + trains > one.seconds > max(generates, trains)


def test_a_synchronous_row_is_its_chain_of_phases() -> None:
    one = step(9)
    assert one.seconds == pytest.approx(sum(one.phases[i].cost.seconds for i in one.critical))


def test_deepspeed_chat_decodes_with_kernels_of_its_own() -> None:
    asked = specs_of(filled(49))  # OPT-13B on 8 A100
    assert asked.cluster.framework == "deepspeed-chat"
    own = device_on(asked.cluster, 0, "deepspeed")["eager_decode_layer_time"]
    assert (
        own < device_on(replace(asked.cluster, framework="verl"), 0, "deepspeed")["eager_decode_layer_time"]
    )


def test_where_placement_ignores_racks_two_nodes_are_joined_by_the_network() -> None:
    """Qwen3-235B at TP8 over two nodes of four GB200: a job of one rack keeps its NVLink, one of two has none."""
    rows = {r.line: assumptions.apply("rlhf", r)[0] for r in rows_of("rlhf") if r.file == "rlhf_nemo_rl.csv"}
    domains = {line: device_on(specs_of(rows[line]).cluster, 0, "megatron").domain for line in (9, 10)}
    assert domains == {9: 64, 10: 4}  # 64 and 128 GPUs
    known = rows[10].filled({"racks": "known"})
    assert device_on(specs_of(known).cluster, 0, "megatron").domain == 72
    across = seconds(priced(specs_of(rows[10])), "actor.generate")
    inside = seconds(priced(specs_of(known)), "actor.generate")
    assert 1.02 < across / inside < 1.15


def test_engine_v0_of_vllm_takes_its_own_time_of_a_sequence_in_a_decode_step() -> None:
    """GRPO of a 7B model on four replicas of TP 2: 1,280 sequences of 133 tokens each, and their prefill."""
    old, new = filled(66), filled(66).filled({"vllm_engine": "v1"})
    device = device_on(specs_of(new).cluster, 0, "fsdp2")
    v0, v1 = (device[f"decode_sequence_overhead_{name}"] for name in ("v0", "vllm"))
    assert v0 > 10 * v1
    slower = seconds(priced(specs_of(old)), "actor.generate") - seconds(
        priced(specs_of(new)), "actor.generate"
    )
    assert slower == pytest.approx(5121 / 4 * 132.959 * (v0 - v1), rel=0.04)
