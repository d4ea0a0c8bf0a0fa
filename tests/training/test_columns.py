"""Many layouts priced at once cost what each costs alone, to the last digit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhfsim.elementwise import ceil, each, given, least, most, some, where
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.sequences import Sequences, uniform
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.layout_columns import columns_of
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.lengths import LogNormal
from rlhfsim.specs.workload.workload import Lora, Workload
from rlhfsim.training.forward import ScoredModel, forward
from rlhfsim.training.packing import pack_len, sequences_of
from rlhfsim.training.training import TrainedModel, micro_batches

DEVICE = device_of(NodeGroup(profile=load_profile("h100_sxm"), gpus=32, gpus_per_node=8))
UNEQUAL = Sequences(count=512, mean=900.0, mean_square=1.3e6, maximum=4000.0)
STACKS: tuple[dict[str, Any], ...] = (
    {"backend": "megatron", "software": Software()},
    {"backend": "fsdp2", "software": Software(stack="eager", fused=False, plain_bytes=4.0)},
    {"backend": "fsdp2", "software": Software(sums_whole=True, copies_each=True, fp32_sums=True)},
    {"backend": "deepspeed", "software": Software(overlaps_reduction=False, fp32_sums=True)},
    {"backend": "deepspeed", "software": Software(plain_bytes=2.0), "lora": Lora(rank=16, base="nf4")},
)


def _drawn(seed: int, count: int = 60) -> list[Layout]:
    """Layouts of 4 to 32 GPUs."""
    random_, found = random.Random(seed), list[Layout]()
    while len(found) < count:
        tp, pp, cp = (random_.choice((1, 2, 4)) for _ in range(3))
        gpus = random_.choice((4, 8, 16, 32))
        dp, offload = gpus // (tp * pp * cp), random_.choice(("none", "none", "cpu"))
        if tp * pp * cp > gpus:
            continue
        sizes: dict[str, Any] = random_.choice(
            (
                {"micro_batch": random_.choice((1, 2, 3, 8))},
                {"pack_tokens": random_.choice((4096, 16384))},
                {"micro_batch": 2, "score_micro_batch": 4},
                {"pack_tokens": 4096, "score_pack_tokens": 8192},
            )
        )
        try:
            found.append(
                Layout(
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    dp=dp,
                    ep=random_.choice((1, 2, 4, 8)),
                    vp=random_.choice((1, 2)),
                    zero=random_.choice((0, 1, 2, 3)),
                    shards=random_.choice((None, None, 2, 4)),
                    recompute=random_.choice(("none", "selective", "full")),
                    sequence_parallel=random_.random() < 0.5,
                    dispatcher=random_.choice((None, "alltoall", "deepep")),
                    ep_overlap=random_.choice((None, True, False)),
                    offload_params=offload,
                    **sizes,
                )
            )
        except RlhfsimError:  # more experts than ranks, shards that do not divide
            continue
    return found


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("stack", range(len(STACKS)))
@pytest.mark.parametrize("sequences", [UNEQUAL, uniform(512, 1500)], ids=["unequal", "uniform"])
def test_columns_of_layouts_cost_what_each_costs_alone(model: str, stack: int, sequences: Sequences) -> None:
    layouts, given = _drawn(stack), STACKS[stack]
    packs = [layout.pack_tokens and 0.9 * layout.pack_tokens for layout in layouts]
    column, sizes = columns_of(layouts), np.array([pack or 0.0 for pack in packs])
    trained = TrainedModel(DEVICE, preset(model), sequences, steps=2, **given)
    scored = ScoredModel(DEVICE, preset(model), sequences, trained=True, **given)
    pairs = list(zip(layouts, packs, strict=True))
    alone = [trained.passes(layout, pack).seconds for layout, pack in pairs]
    assert trained.passes(column, sizes).seconds.tolist() == alone
    read = [forward(scored, layout, pack).seconds for layout, pack in pairs]
    assert forward(scored, column, sizes).seconds.tolist() == read
    assert len(set(alone)) > 20


def test_packs_and_micro_batches_of_columns() -> None:
    work = Workload(
        model="8b", prompts=64, samples=4, response_len=LogNormal(mean=700, sigma=0.6, max=3000), packing=True
    )
    layouts = _drawn(7)
    sequences = sequences_of(work)
    for scoring in (False, True):
        alone = [pack_len(work, layout, scoring=scoring) for layout in layouts]
        packs = pack_len(work, columns_of(layouts), scoring=scoring)
        assert packs.tolist() == [pack or 0.0 for pack in alone]
        counted = micro_batches(columns_of(layouts), sequences, 1, packs, scoring=scoring)
        each_alone = [
            micro_batches(x, sequences, 1, pack, scoring=scoring)
            for x, pack in zip(layouts, alone, strict=True)
        ]
        assert list(zip(*(c.tolist() for c in counted), strict=True)) == each_alone


def test_columns_hold_layouts_of_several_pools() -> None:
    column = columns_of([Layout(dp=4), replace(Layout(dp=8), zero=3, micro_batch=2)])
    assert (column.gpus.tolist(), column.zero.tolist(), column.shards.tolist()) == (
        [4, 8],
        [1, 3],
        [None, None],
    )
    assert (column.dp.tolist(), column.micro_batch.tolist()) == ([4, 8], [1, 2])
    assert column.only(np.array([1])).dp.tolist() == [8]


def test_numbers_stay_numbers_and_arrays_are_taken_entry_by_entry() -> None:
    two = np.array([1.0, 4.0])
    assert (where(True, 1, 2), most(1, 3), least(1, 3), ceil(1.2), some(False), given(None)) == (
        *(1, 3, 1, 2),
        *(False, False),
    )
    assert where(two > 2, two, 0.0).tolist() == [0, 4]
    assert (most(two, 2.0).tolist(), least(two, 2.0).tolist()) == ([2, 4], [1, 2])
    assert (ceil(two / 3).tolist(), some(two > 3), given(np.array([0.0, 2.0])).tolist()) == (
        [1, 2],
        True,
        [False, True],
    )


def test_a_function_is_asked_once_for_equal_rows() -> None:
    asked: list[tuple[float, str]] = []

    def pair(number: float, word: str) -> tuple[float, float]:
        asked.append((number, word))
        return number, 2 * number

    first, second = each(pair, np.array([3.0, 1.0, 3.0]), "x")
    assert (first.tolist(), second.tolist()) == ([3, 1, 3], [6, 2, 6])
    assert sorted(asked) == [(1.0, "x"), (3.0, "x")]
    assert each(pair, 5.0, "y") == (5.0, 10.0)


@pytest.mark.parametrize("spread", [3, 10**12])
def test_rows_of_columns_of_any_kind_are_asked_for_once_each(spread: int) -> None:
    rng = np.random.default_rng(spread)
    names = np.array(["none", "full", None], dtype=object)[rng.integers(3, size=500)]
    columns = [
        rng.integers(-spread, spread, 500),
        rng.random(500) < 0.5,
        rng.choice([0.0, 0.5, 2.0], 500),
        names,
    ]
    asked: list[tuple[Any, ...]] = []

    def number(whole: int, flag: bool, share: float, name: str | None, last: int) -> float:
        asked.append((whole, flag, share, name, last))
        return whole * 4 + flag + share + len(name or "") + last

    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    assert each(number, *columns, 7).tolist() == [w * 4 + f + s + len(n or "") + 7 for w, f, s, n in rows]
    assert len(asked) == len({*rows})
    assert {row[:-1] for row in asked} == {*rows}
