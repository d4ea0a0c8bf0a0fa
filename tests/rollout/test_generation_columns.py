"""Engines that are priced together cost what each costs alone, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_of
from rlhfsim.memory.kv_cache import engine_bytes
from rlhfsim.rollout.continuous_batching import stacked
from rlhfsim.rollout.generation import (
    DecodeSteps,
    Engines,
    Requests,
    generate,
    generations,
    step_table,
    step_tables,
)
from rlhfsim.rollout.prefill import prefill
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.layout_columns import RolloutRoles, kind_of, rollout_columns_of
from rlhfsim.specs.placement.placement import RolloutPlacement
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.workload import Environment

EAGLE = Speculation(method="eagle", draft_tokens=3, acceptance=0.7)
DENSE = [
    *(RolloutLayout(tp=tp, dp=32 // tp, max_num_seqs=limit) for tp in (1, 2, 8, 16) for limit in (64, 256)),
    RolloutLayout(tp=8, pp=2, dp=2),
    RolloutLayout(tp=8, pp=4),
    RolloutLayout(tp=2, dp=16, max_batched_tokens=2048, speculation=EAGLE),
    RolloutLayout(tp=4, dp=8, speculation=EAGLE),
]
SPARSE = [
    RolloutLayout(tp=2, dp=16),
    RolloutLayout(tp=8, ep=8, dp=4),
    RolloutLayout(tp=2, attention_dp=8, ep=16, dp=2),
    RolloutLayout(tp=2, attention_dp=2, ep=2, dp=8),
    RolloutLayout(tp=1, attention_dp=32, ep=32),
    RolloutLayout(tp=1, attention_dp=16, ep=16, dp=2, dispatcher="deepep"),
    RolloutLayout(tp=1, attention_dp=8, ep=8, dp=4, dispatcher="deepep-ll"),
    RolloutLayout(tp=2, attention_dp=8, ep=16, dp=2, dispatcher="allgather"),
]
CASES = {
    "qwen2.5-7b": DENSE,
    "qwen3-30b-a3b": SPARSE,
    "qwen3-next-80b-a3b": SPARSE[:2],
    "deepseek-v3": SPARSE,
    "gpt-oss-20b": [replace(layout, precision="mxfp4") for layout in SPARSE[:5]],
    "llama-3.1-70b": [
        replace(layout, precision="fp8", bf16_layers=4, kv_precision="fp8") for layout in DENSE[:10]
    ],
}
AGENTS = Environment(turns=4, seconds_per_turn=0.5, workers=64, answer_tokens=100, prefix_reuse=0.5)


def device() -> Device:
    return device_of(parse_cluster(32, "h100").node_group)


def asked(**more: object) -> Requests:
    known = {
        "prompts": 48,
        "samples": 8,
        "prompt_lengths": Fixed(value=600),
        "response_lengths": LogNormal(mean=900, max=8000),
    }
    return Requests(**(known | more))  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [2e5, 3e4])
@pytest.mark.parametrize("name", CASES)
def test_a_stage_costs_the_same_alone_and_among_others(name: str, capacity: float) -> None:
    model, layouts, requests = resolve_model(name), CASES[name], asked()
    held = [capacity * (1 + i / 7) for i in range(len(layouts))]
    together = generations(Engines(DecodeSteps(device(), model, worker=True), requests), layouts, held)
    other = replace(device())  # nothing is known of it yet
    for layout, kv_tokens, found in zip(layouts, held, together, strict=True):
        assert found == generate(other, model, layout, requests, kv_tokens=kv_tokens, worker=True), layout


@pytest.mark.parametrize(
    "more",
    [
        {"wanted": 32},
        {"environment": replace(AGENTS, answer_tokens=0, prefix_reuse=1)},
        {"environment": AGENTS, "answered": AGENTS},
        {"adapters": True},
    ],
)
def test_so_do_stages_that_are_cut_off_that_wait_and_whose_prompts_are_prefilled_elsewhere(
    more: dict[str, object],
) -> None:
    model, requests = resolve_model("qwen2.5-7b"), asked(**more)
    layouts = [*DENSE, *(replace(layout, prefill=1) for layout in DENSE[:6] if layout.dp > 1)]
    engines = Engines(DecodeSteps(device(), model, adapters=requests.adapters), requests)
    together = generations(engines, layouts, [2e5] * len(layouts))
    other = replace(device())
    assert together == [generate(other, model, layout, requests, kv_tokens=2e5) for layout in layouts]


def test_a_table_holds_what_runs_at_a_time_where_an_environment_makes_lengths_more_even() -> None:
    slow = Environment(turns=4, seconds_per_turn=5, workers=1000, sigma=1.0)
    requests = replace(asked(environment=slow), prompts=96)
    requests = replace(requests, prompt_lengths=Fixed(value=512), response_lengths=Fixed(value=500))
    model, layouts = resolve_model("qwen2.5-7b"), [RolloutLayout(tp=tp, dp=16) for tp in (1, 2)]
    engines, held = Engines(DecodeSteps(device(), model), requests), [15050.0, 2e5]
    even = engines.schedule(layouts[0], held[0])
    [table] = step_tables(engines.steps, layouts[:1], [float(even.slots)], even.prompt + even.longest)
    late, _ = engines.waiting(layouts[0], held[0], even, table)
    assert late.slots > table.sequences[-1] >= even.slots
    together, other = generations(engines, layouts, held), replace(device())
    for layout, kv_tokens, found in zip(layouts, held, together, strict=True):
        assert found == generate(other, model, layout, requests, kv_tokens=kv_tokens)


def test_a_table_of_several_replicas_reads_as_each_of_theirs() -> None:
    model, layouts = resolve_model("qwen3-30b-a3b"), SPARSE[:4]
    tables = step_tables(DecodeSteps(device(), model), layouts, [40.0, 300.0, 20.0, 64.0], 5000.0)
    every, firsts = stacked(tables)
    n, start = np.array([1.0, 2.0, 3.0, 16.0, 20.0]), np.array([100.0, 64.0, 1.0, 2000.0, 4999.0])
    for layout, first in zip(layouts, firsts, strict=True):
        alone = step_table(replace(device()), model, layout, 20.0, 5000.0)
        assert alone.sequences[-1] == 32
        assert (
            every.between(n, start, start + 50, first).tolist()
            == alone.between(n, start, start + 50).tolist()
        )


def test_prompts_of_columns_take_as_long_as_each() -> None:
    model, counts = resolve_model("llama-3.1-70b"), np.array([0.5, 3.0, 700.0])
    layouts = [RolloutLayout(tp=tp, pp=pp) for tp, pp in ((8, 1), (4, 2), (8, 4))]
    together = prefill(device(), model, rollout_columns_of(layouts), counts, 700.0)
    alone = [
        prefill(replace(device()), model, layout, n, 700.0)
        for layout, n in zip(layouts, counts.tolist(), strict=True)
    ]
    assert together.seconds.tolist() == [float(step.seconds) for step in alone]


@pytest.mark.parametrize("name", CASES)
def test_memory_of_engines_is_the_same_alone_and_among_others(name: str) -> None:
    model, profile, layouts = resolve_model(name), device().profile, CASES[name]
    layouts = [layout for layout in layouts if kind_of(layout) == kind_of(layouts[0])]
    levels = [i % 3 for i in range(len(layouts))]
    residency = np.array(["resident"] * len(layouts))
    columns = RolloutRoles(rollout_columns_of(layouts), np.array(levels), residency)
    together = engine_bytes(model, columns, profile=profile)
    for i, (layout, sleep) in enumerate(zip(layouts, levels, strict=True)):
        alone = engine_bytes(model, RolloutPlacement(pool="a", layout=layout, sleep=sleep), profile=profile)
        assert [float(np.broadcast_to(size, len(layouts))[i]) for size in together] == [
            float(x) for x in alone
        ]
