"""slime on given responses, as its flags are read."""

from __future__ import annotations

import pytest

from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.recognise import read_configuration

START = (
    "ray job submit -- python3 train_async.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 --loss-type sft_loss "
    "--hf-checkpoint Qwen/Qwen3-8B --rollout-batch-size 128 --global-batch-size 64 --use-dynamic-batch-size "
    "--max-tokens-per-gpu 9216 --tensor-model-parallel-size 2 --recompute-granularity full "
    "--ref-load Qwen/Qwen3-8B_torch_dist --rollout-function-path slime.rollout.sft_rollout.generate_rollout "
)


def read(text: str) -> tuple[RunDescription, list[Finding]]:
    configuration, settings = read_configuration(text, {})
    assert configuration.name == "slime"
    run = configuration.run(settings)
    return run, list(configuration.findings(settings, run))


def test_a_step_is_one_update_of_given_responses() -> None:
    run, found = read(f"{START} --debug-train-only")
    layout = run.layout
    assert (run.algorithm, run.prompts, run.samples, run.mini_batches) == ("sft", 64, 1, 1)
    assert (run.gpus, run.kl, run.packing, run.rollout_gpus) == (16, False, True, None)
    assert (layout.tp, layout.dp, layout.pack_tokens, layout.recompute) == (2, 8, 9216, "full")
    assert not found


def test_updates_by_their_number_are_as_large() -> None:
    text = START.replace("--global-batch-size 64", "--num-steps-per-rollout 4")
    assert read(text)[0].prompts == 32


@pytest.mark.parametrize(
    ("said", "what", "stops"),
    [
        ("--global-batch-size 48 --debug-train-only", "updates of 48 out of a batch of 128", True),
        ("--rollout-batch-size 96 --global-batch-size 12 --debug-train-only", "do not split over 8", True),
        ("", "without --debug-train-only", False),
    ],
)
def test_what_does_not_split_or_is_held_for_nothing_is_found(said: str, what: str, stops: bool) -> None:
    found = read(f"{START} {said}")[1]
    assert [(what in finding.what, finding.stops) for finding in found] == [(True, stops)]


def test_reinforcement_learning_is_read_as_before() -> None:
    text = START.replace("--loss-type sft_loss", "--advantage-estimator grpo --rollout-max-response-len 512")
    assert read(f"{text} --colocate --n-samples-per-prompt 8")[0].algorithm == "grpo"
