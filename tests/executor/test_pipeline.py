"""One start of four ranks runs every case; the checks compare with a plain torch model on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fork_server import run_ranks

from executor.algorithms.losses import collate, compute
from executor.engines.mesh import coordinates
from executor.engines.protocols import EngineSpec
from executor.samples import Sample
from executor.tasks import tiny
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.layout import Layout
from tests.executor.pipeline_ranks import (
    CASES,
    LEARN,
    POLICY,
    REWARD,
    TEMPERATURE,
    VALUE,
    WORLD,
    make_samples,
    shares,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    for model in {case[0] for case in CASES.values()}:
        family: Any = model.split("-")[0]
        tiny.build(folder / model, family=family, hidden=32, tied=model.endswith("tied"))
    return folder


@pytest.fixture(scope="module")
def found(fork_server: str, folder: Path) -> list[dict[str, dict[str, Any]]]:
    """What each rank found, by case."""
    run_ranks(fork_server, "pipeline_ranks.py", WORLD, str(folder))
    return [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(WORLD)]


class Reference:
    """The same model and samples in plain torch, one sequence at a time, without any engine."""

    def __init__(self, folder: Path, name: str) -> None:
        from transformers import AutoModelForCausalLM

        model, _, extra = CASES[name]
        self.value = extra.get("head") == "value"
        self.net: Any = AutoModelForCausalLM.from_pretrained(folder / model, dtype=torch.float32)
        hidden = self.net.config.hidden_size
        draw = torch.Generator().manual_seed(extra.get("seed", 0))
        spread = self.net.config.initializer_range
        self.head = torch.nn.Parameter(torch.randn(1, hidden, generator=draw) * spread)
        trained = [*self.net.model.parameters(), self.head] if self.value else self.net.parameters()
        self.trained = list(trained)
        self.adam = torch.optim.AdamW(
            self.trained, lr=1e-3, betas=LEARN.betas, eps=LEARN.eps, weight_decay=0.0
        )

    def outputs(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs or values, entropies), (R,) each."""
        ids = torch.from_numpy(np.concatenate([sample.prompt, sample.response]))[None]
        before = len(sample.prompt) - 1 + torch.arange(sample.num_tokens)
        if self.value:
            values = self.net.model(ids).last_hidden_state[0, before] @ self.head[0]
            return values, values
        distribution = torch.log_softmax(self.net(ids).logits[0, before] / TEMPERATURE, dim=-1)
        chosen = distribution.gather(-1, torch.from_numpy(sample.response)[:, None])[:, 0]
        return chosen, -(distribution.exp() * distribution).sum(-1)

    def step(self, samples: list[Sample]) -> dict[str, float]:
        outputs, entropy = zip(*map(self.outputs, samples), strict=True)
        padded = torch.nn.utils.rnn.pad_sequence(list(outputs), batch_first=True)
        rows = {"values": padded} if self.value else {"logprobs": padded}
        rows["entropy"] = torch.nn.utils.rnn.pad_sequence(list(entropy), batch_first=True)
        tokens = sum(sample.num_tokens for sample in samples)
        batch = collate(samples, num_tokens=tokens, num_sequences=len(samples), **rows)
        loss, _ = compute(VALUE if self.value else POLICY, batch)
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.trained, LEARN.max_grad_norm)
        self.adam.step()
        return {"loss": loss.item(), "grad_norm": norm.item()}

    def weights(self) -> dict[str, torch.Tensor]:
        named = dict(self.net.named_parameters())
        if self.value:
            del named["lm_head.weight"]
            named["score.weight"] = self.head
        return named


FP32 = [name for name, case in CASES.items() if case[2].get("precision") != "bf16"]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_of_a_replica_gets_the_outputs_of_the_uncut_model(
    found: list[Any], folder: Path, name: str
) -> None:
    reference, layout = Reference(folder, name), CASES[name][1]
    limit = 1e-5 if name in FP32 else 0.05
    for rank, seen in enumerate(found):
        mine = shares(make_samples(), layout)[coordinates(rank, layout).dp]
        assert len(seen[name]["before"]) == len(mine)
        for sample, numbers in zip(mine, seen[name]["before"], strict=True):
            wanted = reference.outputs(sample)[0].detach().numpy()
            np.testing.assert_allclose(numbers, wanted, atol=limit)


@pytest.mark.parametrize("name", CASES)
def test_two_steps_change_weights_as_on_one_process(found: list[Any], folder: Path, name: str) -> None:
    reference = Reference(folder, name)
    reference.step(make_samples())
    metrics = reference.step(make_samples())
    weights, trained = found[0][name]["weights"], reference.weights()
    assert weights.keys() == trained.keys()
    # one step moves a weight by at most about the learning rate, 1e-3
    limit = 1e-5 if name in FP32 else 6e-3
    for key, value in trained.items():
        torch.testing.assert_close(weights[key].float(), value.detach(), atol=limit, rtol=0)
    if name in FP32:
        for key, number in metrics.items():
            assert all(seen[name]["metrics"][key] == pytest.approx(number, rel=1e-4) for seen in found)


@pytest.mark.parametrize("name", CASES)
def test_only_rank_0_sees_weights_and_all_ranks_see_as_many_buckets(found: list[Any], name: str) -> None:
    first, *others = [seen[name] for seen in found]
    assert min(first["bucket sizes"]) > 0
    assert first["buckets"] > 1
    assert all(other["bucket sizes"] == [0] * first["buckets"] for other in others)


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_bit_for_bit_after_load_and_after_offload(found: list[Any], name: str) -> None:
    assert [seen[name]["unlike"] for seen in found] == [0] * WORLD


@pytest.mark.parametrize("name", [name for name in CASES if name != "critic"])
def test_a_gradient_that_is_no_number_changes_nothing(found: list[Any], name: str) -> None:
    assert [seen[name]["poisoned"] for seen in found] == [(1.0, 0)] * WORLD


def test_scores_are_read_at_the_last_token_on_every_rank(found: list[Any], folder: Path) -> None:
    from transformers import AutoModel

    net: Any = AutoModel.from_pretrained(folder / "llama", dtype=torch.float32)
    draw = torch.Generator().manual_seed(REWARD.seed)
    head = torch.randn(1, net.config.hidden_size, generator=draw) * net.config.initializer_range
    rows = [torch.from_numpy(np.concatenate([s.prompt, s.response])) for s in make_samples()]
    wanted = [float(net(row[None]).last_hidden_state[0, -1].detach() @ head[0]) for row in rows]
    for seen in found:
        before, after = seen["scores"]
        assert before == pytest.approx(wanted, abs=1e-5)
        assert after == before


def test_a_checkpoint_holds_a_model_that_transformers_loads(found: list[Any], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "pp2 tp2")
    weights = dict(model.named_parameters())
    for name, value in found[0]["pp2 tp2"]["weights"].items():
        torch.testing.assert_close(weights[name].detach(), value, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("layout", "extra", "code"),
    [
        (Layout(pp=2, zero=2), {}, "deepspeed-layout"),
        (Layout(pp=8, zero=1), {}, "pipeline-too-deep"),
        (Layout(pp=2, zero=1), {"lora_rank": 4}, "pipeline-lora"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_by_name(
    folder: Path, layout: Layout, extra: dict[str, Any], code: str
) -> None:
    from executor.engines.pipeline.build import check
    from executor.engines.pipeline.layers import decoder

    model = str(folder / "llama")
    spec = EngineSpec(role="actor", model=model, layout=layout, **extra)
    with pytest.raises(RlhfsimError, match=code):
        check(spec, decoder(model, torch.float32))


def test_shards_that_do_not_divide_heads_are_refused_by_name(folder: Path) -> None:
    from executor.engines.pipeline.layers import decoder
    from executor.engines.pipeline.shards import shard

    layer = decoder(str(folder / "llama"), torch.float32).layers[0]
    with pytest.raises(RlhfsimError, match="tp-does-not-divide"):
        shard(layer, 4)
