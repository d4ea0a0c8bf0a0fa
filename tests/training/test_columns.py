"""Many layouts priced at once cost what each costs alone, to the last digit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhfsim import elementwise
from rlhfsim.elementwise import (
    by_word,
    ceil,
    each,
    either,
    given,
    kept,
    least,
    most,
    remembered,
    some,
    together,
    unsaid,
    where,
)
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.sequences import Sequences, uniform
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.mixers import EXPERTS
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.layout_columns import columns_of
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.lengths import LogNormal
from rlhfsim.specs.workload.workload import Lora, Workload
from rlhfsim.training import training
from rlhfsim.training.forward import ScoredModel, forward
from rlhfsim.training.layer_time import layer
from rlhfsim.training.packing import pack_len, sequences_of
from rlhfsim.training.passes import Passes, passes
from rlhfsim.training.training import Passing, TrainedModel, micro_batches
from rlhfsim.training.work import Work

DEVICE = device_of(NodeGroup(profile=load_profile("h100_sxm"), gpus=32, gpus_per_node=8))
UNEQUAL = Sequences(count=512, mean=900.0, mean_square=1.3e6, maximum=4000.0)
STACKS: tuple[dict[str, Any], ...] = (
    {"backend": "megatron", "software": Software()},
    {"backend": "fsdp2", "software": Software(stack="eager", fused=False, plain_bytes=4.0)},
    {"backend": "fsdp2", "software": Software(sums_whole=True, copies_each=True, fp32_sums=True)},
    {"backend": "deepspeed", "software": Software(overlaps_reduction=False, fp32_sums=True)},
    {"backend": "deepspeed", "software": Software(plain_bytes=2.0), "lora": Lora(rank=16, base="nf4")},
    {"backend": "megatron", "software": Software(recomputed=("moe", "layernorm")), "precision": "fp8"},
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
                    ep=random_.choice((1, 2, 4, 8, 16)),
                    etp=random_.choice((1, 1, 2)),
                    vp=random_.choice((1, 2)),
                    zero=random_.choice((0, 1, 2, 3)),
                    shards=random_.choice((None, None, 2, 4)),
                    recompute=random_.choice(("none", "selective", "full")),
                    sequence_parallel=random_.random() < 0.5,
                    dispatcher=random_.choice((None, "alltoall", "deepep", "hybridep", "allgather")),
                    ep_overlap=random_.choice((None, True, False)),
                    offload_params=offload,
                    offload_optimizer=random_.choice(("none", "cpu", "nvme")),
                    offload_fraction=random_.choice((0.5, 1.0)),
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
    training._known.cache_clear()  # else the column is told what was worked out for each
    assert trained.passes(column, sizes).seconds.tolist() == alone
    updates = trained.updates(column).seconds
    assert updates.tolist() == [trained.updates(layout).seconds for layout in layouts]
    assert len(set(updates.tolist())) > 20
    read = [forward(scored, layout, pack).seconds for layout, pack in pairs]
    training._known.cache_clear()
    assert forward(scored, column, sizes).seconds.tolist() == read
    assert len(set(alone)) > 20


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp4"])
def test_experts_alone_on_a_gpu_and_grouped_ones_stand_in_one_column(precision: str) -> None:
    """128 experts: one each on 128 ranks, which FP4 speeds up, two each on 64, which run as in FP8."""
    work = Work(tokens=4096.0, length=1024.0, ep=np.array([64, 128]), precision=precision, skew=1.25)
    column = layer(DEVICE, preset("qwen3-30b-a3b"), work, kind=EXPERTS)
    alone = [layer(DEVICE, preset("qwen3-30b-a3b"), replace(work, ep=ep), kind=EXPERTS) for ep in (64, 128)]
    for way in ("forward", "backward"):
        found = np.array(np.broadcast_arrays(*getattr(column, way))).T.tolist()
        assert found == [list(getattr(one, way)) for one in alone]
    assert column.weight_gradient.tolist() == [one.weight_gradient for one in alone]


def test_what_stays_inside_a_domain_is_priced_once_for_every_network(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def counted(device: Device, model: ModelSpec, work: Work, *rest: Any, **named: Any) -> Passes:
        asked.extend(work.tp.tolist() if isinstance(work.tp, np.ndarray) else [work.tp])
        return passes(device, model, work, *rest, **named)

    monkeypatch.setattr(training, "passes", counted)
    training._known.cache_clear()
    pool = NodeGroup(profile=load_profile("h100_sxm"), gpus=32, gpus_per_node=8)
    one, two = (device_of(pool, oversubscription) for oversubscription in (1.0, 2.0))
    near, wide, ring = Layout(tp=8, dp=4), Layout(tp=16, dp=2), Layout(tp=4, cp=4, dp=2)
    on = [
        Passing(device, preset("llama-3.1-8b"), UNEQUAL, "bf16", Software(), frozen=False)
        for device in (one, two)
    ]
    all_three = columns_of([near, wide, ring])
    first, second = (passing.of(all_three, 4096.0).passes.sent[0] for passing in on)
    assert sorted(asked) == [4, 4, 8, 16, 16]
    assert (second.tp > first.tp).tolist() == [False, True, False]
    assert (second.cp > first.cp).tolist() == [False, False, True]
    assert second.tp[0] == first.tp[0] == on[1].of(near, 4096.0).passes.sent[0].tp
    assert sorted(asked) == [4, 4, 8, 16, 16]
    experts = Layout(dp=32, ep=8, etp=2)
    one_of, two_of = (
        passing._replace(model=preset("qwen3-30b-a3b")).of(experts, 4096.0).passes.sent[0].ep
        for passing in on
    )
    assert two_of > one_of
    larger = on[0]._replace(model=preset("llama-3.1-70b"))
    assert larger.of(near, 4096.0).passes.layer > on[0].of(near, 4096.0).passes.layer


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


def test_what_no_layout_reads_is_not_worked_out() -> None:
    two = np.array([True, False])
    assert either(two, lambda: 1.0, lambda: 2.0).tolist() == [1, 2]
    assert [either(holds, lambda: 1.0, _fails) for holds in (True, two | True)] == [1, 1]
    assert [either(holds, _fails, lambda: 2.0) for holds in (False, two & False)] == [2, 2]
    words = np.array(["a", None, "b", "a"], dtype=object)
    assert by_word(words, {"a": 1.0, "b": 2.0, None: np.arange(4)}.__getitem__).tolist() == [1, 1, 2, 1]
    assert by_word("b", {"b": 2.0}.__getitem__) == 2
    assert (unsaid(words).tolist(), unsaid(None), unsaid("a")) == ([False, True, False, False], True, False)


def _fails() -> float:
    raise AssertionError


def test_rows_of_arrays_are_asked_once_for_each_word() -> None:
    asked: list[str] = []

    def total(word: str, first: Any, second: Any) -> Any:
        asked.append(word)
        return first + second

    two = np.array([1.0, 2.0])
    found = together(total, [("x", two, 1.0), ("y", 5.0, two), ("x", 2.0, 3.0)])
    assert [one.tolist() for one in found] == [[2, 3], [6, 7], [5, 5]]
    assert sorted(asked) == ["x", "y"]
    assert together(total, [("x", 1.0, 2.0), ("x", 3.0, 4.0)]) == [3, 7]
    assert asked[2:] == ["x", "x"]


def test_rows_that_are_known_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    known = dict[Any, Any]()

    def price(number: Any, word: Any) -> tuple[Any, ...]:
        asked.append(np.broadcast_arrays(number, word)[0].tolist())
        return 2 * number, 7.0

    words = np.array(["a", None, "a"], dtype=object)
    double, seven = remembered(known, price, np.array([1.0, 2.0, 1.0]), words)
    assert (double.tolist(), seven.tolist()) == ([2, 4, 2], [7, 7, 7])
    assert remembered(known, price, 2.0, None) == [4, 7]
    assert remembered(known, price, 3.0, "a") == [6, 7]
    assert remembered(known, price, np.array([3.0, 4.0]), np.array(["a", "a"]))[0].tolist() == [6, 8]
    assert [sorted(np.atleast_1d(numbers).tolist()) for numbers in asked] == [[1, 2], [3], [4]]
    monkeypatch.setattr(elementwise, "MOST_KNOWN", 4)
    remembered(known, price, 1.0, "a")
    assert list(known) == [(1.0, "a")]


def test_answers_for_plain_arguments_are_kept() -> None:
    asked: list[Any] = []

    @kept(4)
    def double(number: Any) -> Any:
        asked.append(number)
        return 2 * number

    assert (double(1), double(1), double(np.array([1, 2])).tolist()) == (2, 2, [2, 4])
    assert len(asked) == 2


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
