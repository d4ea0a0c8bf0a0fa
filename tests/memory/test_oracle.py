"""The ledger's activations against transformers' own modules, run on fake tensors (lab/oracle)."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from lab.oracle.step import scoring_pass, training_step
from rlhfsim.memory import activations
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import Layout, Recompute

SHAPES = (
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-7b",
    "qwen2.5-32b",
    "qwen2.5-72b",
    "llama-3.2-1b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "qwen3-4b",
    "qwen3-8b",
    "mistral-7b-v0.3",
    "gemma-2-2b",
    "gemma-3-1b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "olmoe-1b-7b",
)


def _ledger(name: str, layers: int | None, recompute: Recompute, tokens: int) -> activations.Activations:
    model = resolve_model(name)
    return activations.training_activations(
        model.scaled(layers) if layers else model,
        Layout(recompute=recompute),
        "deepspeed",
        activations.MicroBatches(tokens=tokens, count=1),
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_peak_of_a_step_is_that_of_the_modules(name: str, recompute: Recompute) -> None:
    run = training_step(name, rows=1, length=8192, recompute=recompute == "full", layers=4)
    priced = _ledger(name, 4, recompute, 8192)
    assert priced.peak == pytest.approx(run.peak, rel=0.05)
    assert priced.saved + priced.working == pytest.approx(run.layers, rel=0.05)


QUICK = ("qwen2.5-0.5b", "llama-3.2-1b")
"""Whole models that the test command has time for."""


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tokens", [4096, 16384])
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in SHAPES]
)
def test_the_peak_of_a_step_of_the_whole_model_is_that_of_the_modules(
    name: str, tokens: int, recompute: Recompute
) -> None:
    run = training_step(name, rows=1, length=tokens, recompute=recompute == "full")
    assert _ledger(name, None, recompute, tokens).peak == pytest.approx(run.peak, rel=0.05)


@pytest.mark.parametrize(
    "name", ["qwen2.5-7b", "llama-3.2-1b", "mixtral-8x7b", "qwen3-30b-a3b", "gemma-3-1b"]
)
def test_a_scoring_pass_needs_what_the_modules_need(name: str) -> None:
    run = scoring_pass(name, rows=1, length=16384, layers=2)
    priced = activations.forward_activations(resolve_model(name), Layout(), "deepspeed", tokens=16384)
    assert priced.peak == pytest.approx(run, rel=0.05)


def test_rows_of_padded_sequences_keep_what_a_packed_row_of_as_many_tokens_keeps() -> None:
    padded, packed = (
        training_step("qwen2.5-1.5b", rows=rows, length=4096 // rows, recompute=False, layers=2)
        for rows in (4, 1)
    )
    assert padded.peak == pytest.approx(packed.peak, rel=1e-3)


def test_what_gradients_wait_for_is_in_the_peak_of_tied_models() -> None:
    tied = training_step("llama-3.2-1b", rows=1, length=1024, recompute=True, layers=2)
    embedding = 2 * 128256 * 2048
    assert tied.layers > embedding
