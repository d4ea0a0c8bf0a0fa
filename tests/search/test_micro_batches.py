"""Sizes of a micro-batch that compete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.search.layouts import role_layouts
from rlhfsim.search.micro_batches import has_work, sizes
from rlhfsim.search.request import Limit, Request
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.micro_batch import batch_lengths
from rlhfsim.specs.workload.workload import Workload

UNEVEN = Workload(
    prompts=512, prompt_len=Fixed(value=1000), response_len=LogNormal(mean=1000, sigma=0.8, max=3096)
)


def request(workload: Workload = UNEVEN, **more: Any) -> Request:
    return Request(cluster=parse_cluster(8, "h100"), workload=workload, **more)


def tokens(asked: Request, layout: Layout) -> list[int | None]:
    return [fields.get("pack_tokens") for fields in sizes(asked, "actor", layout.cp)]


def test_packs_double_from_the_longest_sequence_on() -> None:
    assert tokens(request(), Layout(dp=8)) == [4096, 8192, 16384, 32768]
    assert tokens(request(), Layout(dp=4, cp=2)) == [2048, 4096, 8192, 16384]


def test_small_sequences_double_on_until_weights_hide() -> None:
    short = replace(UNEVEN, prompt_len=Fixed(value=256), response_len=Fixed(value=256))
    found = [fields["micro_batch"] for fields in sizes(request(short), "actor", 1)]
    assert found == [1, 2, 4, 8, 16, 32]  # 32 x 512 = 16,384 tokens


def test_sequences_compete_where_all_are_alike_or_the_framework_does_not_pack() -> None:
    alike = replace(UNEVEN, response_len=Fixed(value=1000))
    padded = replace(UNEVEN, packing=False)
    asked = (request(alike), request(padded), request(framework="trl"))
    for one in asked:
        assert set(tokens(one, Layout(dp=8))) == {None}


@pytest.mark.parametrize(
    ("fix", "packs", "sequences"),
    [({"micro_batch": 4}, None, 4), ({"pack_tokens": 6000}, 6000, 1), ({}, 4096, 1)],
)
def test_what_is_fixed_competes_alone(fix: dict[str, int], packs: int | None, sequences: int) -> None:
    first = Layout(dp=8, **sizes(request(fix={"actor": fix}), "actor", 1)[0])
    assert (first.pack_tokens, first.micro_batch) == (packs, sequences)


def test_a_bound_on_sequences_asks_for_sequences() -> None:
    limit = Limit(role="actor", field="micro_batch", relation="<=", value=2)
    assert set(tokens(request(limits=(limit,)), Layout(dp=8))) == {None}
    assert tokens(request(limits=(limit,)), Layout(dp=8)) != tokens(request(), Layout(dp=8))


def test_every_rank_has_work() -> None:
    few = replace(UNEVEN, prompts=8)
    assert has_work(Layout(dp=8, pack_tokens=4096), batch_lengths(few))  # one sequence each
    assert not has_work(Layout(dp=8, pack_tokens=8192), batch_lengths(few))
    assert not has_work(Layout(dp=16, pack_tokens=4096), batch_lengths(few))


def test_context_parallelism_competes_at_any_length_with_whole_chunks() -> None:
    model = resolve_model("8b")

    def degrees(length: float) -> set[int]:
        work = replace(UNEVEN, prompt_len=Fixed(value=length / 2), response_len=Fixed(value=length / 2))
        asked = request(work, backend="megatron")
        space = role_layouts(asked, "actor", model, 8, 8)
        return {x.cp for x in space.layouts}

    assert degrees(2048) == {1, 2, 4, 8}
    assert degrees(512) == {1, 2}
    assert degrees(200) == {1}
