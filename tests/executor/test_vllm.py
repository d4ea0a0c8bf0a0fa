"""What a real vLLM engine does: log-probs, weight syncs by every transport, partial and overlapped updates.

One process (`vllm_facts.py`) runs everything once; each test asserts some of what it saw. Models are random,
in
fp32; the judge of log-probs is a Hugging Face forward.
"""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fork_server import run

from executor.engines.protocols import RolloutSpec
from executor.engines.vllm.engine import VllmEngine
from executor.engines.vllm.start import arguments, environment
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.layout import RolloutLayout

HERE = Path(__file__).resolve().parent
EXACT = 1e-5
"""Rounding of fp32 forwards in two libraries."""
SEEN = 0.1
"""Any change of weights shows at least this much."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, fork_server: str) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("vllm")
    run(fork_server, [["vllm_facts.py", str(folder)]], PYTHONPATH=str(HERE.parents[1]))
    seen: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return seen


@pytest.mark.slow
def test_logprobs_are_those_of_the_full_temperature_scaled_distribution(facts: Any) -> None:
    assert facts["sampling"]["initial"] < EXACT, "greedy, temperatures 0.7 and 1, top-p 0.6 and 1"


@pytest.mark.slow
def test_seeds_repeat_and_tell_requests_of_one_prompt_apart(facts: Any) -> None:
    assert facts["sampling"]["repeats"]
    assert facts["sampling"]["distinct"] == 6
    assert facts["sampling"]["greedy"]


@pytest.mark.slow
def test_a_response_ends_with_its_end_token_or_at_its_length(facts: Any) -> None:
    sampling = facts["sampling"]
    assert sampling["ended"], "both ways of ending must occur"
    assert sampling["eos_included"]
    assert not sampling["eos_inside"]
    assert sampling["lengths"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "ipc", "host", "disk"])
def test_sync_brings_the_trainers_weights_and_their_version(facts: Any, transport: str) -> None:
    seen = facts["transports"][transport]
    assert min(seen["stale"]) > SEEN, "an engine that was not synced must be noticed"
    assert max(seen["synced"]) < EXACT
    assert seen["versions"] == seen["expected_versions"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sync_reaches_the_head_of_models_with_tied_embeddings(facts: Any, family: str) -> None:
    seen = facts["families"][family]
    assert min(seen["stale"]) > SEEN
    assert max(seen["synced"]) < EXACT


@pytest.mark.slow
def test_adapters_alone_are_merged_at_the_engine(facts: Any) -> None:
    seen = facts["adapters"]
    assert seen["stale"] > SEEN
    assert seen["synced"] < EXACT
    assert seen["bytes"] < 100_000, "the model has 2.4 MB"


@pytest.mark.slow
def test_update_in_the_middle_of_a_response_switches_weights_at_the_right_token(facts: Any) -> None:
    seen = facts["partial"]
    assert seen["switches"] == [8, 8, 8, 8, 0, 0], "eight steps ran before; two were still queued"
    assert seen["monotone"]
    assert seen["disagreement"] < EXACT, "forward with the old KV cache and the new weights"
    assert seen["ignoring_the_switch"] > SEEN


@pytest.mark.slow
def test_weights_are_staged_while_generation_goes_on(facts: Any) -> None:
    seen = facts["overlapped"]
    assert seen["steps_while_staging"] >= 3
    assert seen["running_at_commit"] > 0
    assert seen["checksums_equal"]
    assert seen["both_versions"]
    assert seen["finite"]
    assert seen["synced"] < EXACT


@pytest.mark.slow
def test_workers_of_a_replica_stage_one_copy_together(facts: Any) -> None:
    seen = facts["tp2_overlapped"]
    assert seen["checksums_equal"]
    assert seen["synced"] < EXACT
    assert 0.9 < sum(seen["staged_bytes"]) / seen["model_bytes"] < 1.1
    assert min(seen["staged_bytes"]) > 0.2 * seen["model_bytes"]


@pytest.mark.slow
def test_failures_are_named_and_only_a_half_loaded_engine_is_lost(facts: Any) -> None:
    seen = facts["failures"]
    assert seen["absent"] == "weight-sync-timeout"
    assert seen["survives"] < EXACT
    assert seen["too_long"] == "request-too-long"
    assert (seen["aborted"], seen["unfinished"]) == ([0, 1, 2], 0)
    assert min(seen["moved"]["begun"]) > 0
    assert max(seen["moved"]["begun"]) > 3
    assert seen["moved"]["disagreement"] < EXACT
    assert seen["moved"]["lengths"]
    assert seen["moved"]["versions"]
    assert seen["incomplete"] == "weight-sync-incomplete"
    assert seen["broken"] == "engine-broken"


@pytest.mark.slow
def test_memory_counts_the_kv_cache_that_was_asked_for(facts: Any) -> None:
    assert facts["memory"]["kv"] == pytest.approx(32 * 2**20, rel=0.02)
    assert facts["memory"]["allocated"] > facts["memory"]["kv"]


@pytest.mark.slow
def test_closed_engines_leave_no_process_and_no_shared_memory(facts: Any) -> None:
    before = set(facts["before"]["shared"])
    ours = ("rlhfsim-", "vllm_", "psm_", "sem.")
    for moment in ("closed", "tp2_closed"):
        left = set(facts[moment]["shared"]) - before
        assert not [name for name in left if name.startswith(ours)]
        assert not [name for name in facts[moment]["children"] if "Worker" in name]


@pytest.mark.slow
def test_both_workers_of_tensor_parallelism_receive_the_weights(facts: Any) -> None:
    assert sum("Worker" in name for name in facts["tp2_start"]["children"]) == 2
    assert min(facts["tp2"]["stale"]) > SEEN
    assert max(facts["tp2"]["synced"]) < EXACT


def test_a_stage_that_the_host_has_no_room_for_is_refused() -> None:
    from executor.engines.vllm import worker

    worker.check_room(2**20)
    free = shutil.disk_usage("/dev/shm").free
    with pytest.raises(RlhfsimError, match="GiB left") as caught:
        worker.check_room(free + 2**20)
    assert caught.value.code == "no-room-to-stage"


def rollout(**changes: Any) -> RolloutSpec:
    fields = {"layout": RolloutLayout(), "max_model_len": 64, "max_num_seqs": 4, "kv_bytes": 2**20}
    return RolloutSpec(model="nowhere", **(fields | changes))


def test_what_a_cpu_cannot_run_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.engines.vllm.start.current_device", lambda: "cpu")
    with pytest.raises(RlhfsimError) as caught:
        VllmEngine(rollout(quantised=True))
    assert caught.value.code == "rollout-quantised-cpu"
    with pytest.raises(RlhfsimError) as caught:
        VllmEngine(rollout(layout=RolloutLayout(attention_dp=2)))
    assert caught.value.code == "rollout-attention-dp"


def test_environment_keeps_compilation_on_gpus_only() -> None:
    assert environment("cpu")["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in environment("cuda")
    assert environment("cuda")["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_log_probs_of_model_runner_v2_are_those_before_the_nucleus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.v1.worker.gpu.sample import sampler as v2

    from executor.engines.vllm.api import use_full_logprobs

    def cut(logits: torch.Tensor, k: Any, p: Any) -> torch.Tensor:
        return logits.masked_fill_(logits < 1.0, -torch.inf)  # vLLM's works in place too

    monkeypatch.setattr(
        v2, "apply_top_k_top_p", lambda x, k, p: x if k is None and p is None else cut(x, k, p)
    )
    monkeypatch.setattr(v2, "gumbel_sample", lambda logits, *args, **options: logits.isfinite().sum(-1))
    sampler = object.__new__(v2.Sampler)
    states = SimpleNamespace(temperature=SimpleNamespace(gpu=None), seeds=SimpleNamespace(gpu=None))
    sampler.sampling_states, sampler.use_fp64_gumbel = states, False
    use_full_logprobs(SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler)))
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    for nucleus, choices in ((None, 3), (torch.tensor([0.9]), 2)):
        sampled, reported = sampler._sample_random(logits, None, None, None, None, nucleus, False)
        assert sampled.item() == choices, "sampling sees the cut"
        assert reported.tolist() == [[0.0, 1.0, 2.0]], "log-probs do not"


def test_model_runner_v2_reports_what_sampling_returns_and_keeps_seeds_in_a_tensor() -> None:
    from vllm.v1.worker.gpu.sample import sampler as v2

    call, sample = inspect.getsource(v2.Sampler.__call__), inspect.getsource(v2.Sampler.sample)
    assert "logits = processed_logits" in call
    assert "sampled, processed_logits = self.sample(" in call
    assert "return self._sample_random(" in sample
    assert "self.sampling_states.seeds.gpu" in inspect.getsource(v2.Sampler._sample_random), (
        "no loop over seeds"
    )


@pytest.mark.parametrize(("interrupted", "scheduling"), [(False, None), (True, False)])
def test_scheduling_runs_ahead_only_where_no_weights_arrive_in_between(
    interrupted: bool, scheduling: bool | None
) -> None:
    given = arguments(rollout(interrupted=interrupted), "cuda")
    assert given["async_scheduling"] is scheduling
    assert given["enable_prefix_caching"]
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environment("cuda")


@pytest.mark.slow
def test_responses_of_a_prompt_share_its_prefill_until_new_weights_arrive(facts: Any) -> None:
    assert facts["prefix"]["first"] == [0, 128, 128]
    assert facts["prefix"]["synced"] == [0, 128, 128]
    assert facts["prefix"]["disagreement"] < EXACT


@pytest.mark.parametrize(
    ("found", "known"),
    [("0.32.0+cpu", True), ("0.29.1", True), ("0.28.9", False), ("0.34.0", False), ("1.0", False)],
)
def test_unknown_versions_of_vllm_are_refused_with_both_names(
    monkeypatch: pytest.MonkeyPatch, found: str, known: bool
) -> None:
    from executor.engines.vllm import api as vllm_api

    monkeypatch.setattr(vllm_api, "_installed", lambda: found)
    if known:
        assert vllm_api.check_version() == found
        return
    with pytest.raises(RlhfsimError, match=r"from 0\.29 up to, without, 0\.34") as caught:
        vllm_api.check_version()
    assert found in caught.value.message
