"""What OpenRLHF's workers do with logits, gradients and the models that score."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.memory.role_bytes import software_of
from rlhfsim.search.options import role_variants
from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks.files import heads_of
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.layout import Layout
from tests.frameworks.test_accepted import workload

HELD, SCALED, DROPPED = (heads_of("openrlhf")[name] for name in ("held", "scaled", "dropped"))
RUN = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path qwen2.5-7b --actor.num_nodes 1 "
    "--actor.num_gpus_per_node 8 --train.colocate_all --vllm.num_engines 8 --reward.remote_url x "
    "--algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 --data.max_len 4096 "
)


def _run(text: str, **values: Any):
    configuration, settings = read_configuration(text, values, framework="openrlhf")
    run = configuration.run(settings)
    return run, {finding.what: finding.stops for finding in configuration.findings(settings, run)}


@pytest.mark.parametrize(
    ("known", "temperature", "held"), [(HELD, 1.0, True), (SCALED, 0.9, True), (DROPPED, 1.0, False)]
)
def test_heads_are_what_torch_keeps_of_the_logits(known: Any, temperature: float, held: bool) -> None:
    """Logits of 256 tokens, 4,096 entries and 4 hidden elements; cross-entropy as flash-attn allocates it."""
    torch = pytest.importorskip("torch")
    live_bytes = pytest.importorskip("lab.oracle.live_bytes").LiveBytes
    tokens, vocab = 256, 4096

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any) -> Any:
            ctx.save_for_backward(logits)
            return logits.new_zeros(tokens)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return torch.empty_like(ctx.saved_tensors[0])

    def log_probs(hidden: Any, head: Any) -> tuple[Any, dict[str, Any]]:
        output = {"logits": torch.nn.functional.linear(hidden, head)}
        output["logits"] = output["logits"].to(torch.float32)
        if temperature != 1.0:
            output["logits"].div_(temperature)
        return CrossEntropy.apply(output["logits"].reshape(-1, vocab)), output

    for train, expected in ((True, known.train_bytes), (False, known.score_bytes)):
        hidden = torch.randn(1, tokens, 4, dtype=torch.bfloat16, requires_grad=train)
        head = torch.randn(vocab, 4, dtype=torch.bfloat16, requires_grad=train)
        with torch.set_grad_enabled(train), live_bytes() as live:
            found, output = log_probs(hidden, head)
            if not held:
                del output
            if train:
                found.sum().backward()
        assert live.peak / (tokens * vocab) == pytest.approx(expected, abs=0.1)


def test_logits_are_priced_by_temperature_and_trainer() -> None:
    assert software_of(None, "openrlhf", "deepspeed").head is HELD
    assert software_of(None, "openrlhf", "deepspeed", algorithm="dpo").head is DROPPED
    for keys, head in (("", HELD), ("--rollout.temperature 0.9", SCALED), ("--rollout.temperature 1", HELD)):
        run, _ = _run(RUN + keys)
        assert software_of(run.software, "openrlhf", run.backend).head == head
    old, _ = _run(RUN, temperature=0.6)
    assert software_of(old.software, "openrlhf", old.backend).head == SCALED


@pytest.mark.parametrize(
    ("keys", "overlaps", "told"),
    [
        ("", False, "ZeRO-2 reduces all gradients of every micro-batch"),
        ("--ds.zero_stage 1", False, "ZeRO-1 reduces all gradients of every update"),
        ("--ds.zero_stage 3", False, None),
        ("--ds.overlap_comm", True, None),
        ("--overlap_comm", True, None),
    ],
)
def test_reductions_overlap_where_the_command_says_so(keys: str, overlaps: bool, told: str | None) -> None:
    run, found = _run(RUN + keys)
    assert software_of(run.software, "openrlhf", run.backend).overlaps_reduction == overlaps
    stops = [stops for what, stops in found.items() if told and told in what]
    assert stops == [False] * (told is not None)
    assert told is not None or not any("reduces all gradients" in what for what in found)


def test_trainers_of_given_data_overlap_as_those_on_ray() -> None:
    sft = "python3 -m openrlhf.cli.train_sft --model.model_name_or_path qwen2.5-7b --nproc_per_node 8 "
    for keys, overlaps in (("", False), ("--ds.overlap_comm", True)):
        run, _ = _run(sft + keys)
        assert software_of(run.software, "openrlhf", run.backend).overlaps_reduction == overlaps


@pytest.mark.parametrize(("zero", "away"), [(2, False), (3, True)])
@pytest.mark.parametrize("key", ["--ref.offload", "--ref_reward_offload"])
def test_models_that_score_leave_the_gpus_under_zero_3_alone(zero: int, away: bool, key: str) -> None:
    run, found = _run(f"{RUN} --ds.zero_stage {zero} {key}")
    assert run.roles["reference"].residency == ("offloaded" if away else "resident")
    assert any("leaves models that only score" in what for what in found) == (not away)


@pytest.mark.parametrize(("zero", "away"), [(2, False), (3, True)])
def test_no_search_for_openrlhf_sends_a_reference_to_the_host_below_zero_3(zero: int, away: bool) -> None:
    asked = Request(
        cluster=parse_cluster(8), workload=workload("grpo"), backend="deepspeed", framework="openrlhf"
    )
    offered = [placed.residency for placed in role_variants(asked, "reference", Layout(dp=8, zero=zero))]
    assert offered == ["resident", *["offloaded"] * away]
