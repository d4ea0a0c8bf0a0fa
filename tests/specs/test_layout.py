"""Layouts: GPUs they fill, labels, and rules that hold on every cluster."""

from __future__ import annotations

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.specs.placement.layout import Layout, RolloutLayout


def test_a_layout_fills_tp_pp_cp_dp() -> None:
    assert Layout(tp=8, pp=2, cp=3, dp=4, ep=8).gpus == 192


def test_a_rollout_fills_its_replicas() -> None:
    layout = RolloutLayout(tp=4, pp=2, attention_dp=3, dp=5)
    assert (layout.replica_gpus, layout.gpus) == (24, 120)


def test_labels_name_only_what_is_used() -> None:
    assert Layout(tp=8, pp=2, dp=4).label == "TP8 PP2 DP4 ZeRO-1"
    assert Layout(dp=8, zero=0).label == "TP1 DP8"
    assert Layout(tp=4, cp=2, ep=8, dp=4, zero=3).label == "TP4 CP2 EP8 DP4 ZeRO-3"
    assert RolloutLayout(tp=4, dp=8).label == "TP4 x8"
    assert RolloutLayout(tp=8, ep=8, pp=2, dp=2).label == "TP8 PP2 EP8 x2"


def test_experts_cannot_spread_over_more_ranks_than_there_are() -> None:
    Layout(tp=2, dp=4, ep=8)
    with pytest.raises(RlhfsimError, match="expert parallelism 16 exceeds"):
        Layout(tp=2, dp=4, ep=16)


def test_virtual_stages_need_a_pipeline() -> None:
    with pytest.raises(RlhfsimError, match="need pipeline parallelism"):
        Layout(vp=2)


@pytest.mark.parametrize(
    "text",
    [
        "{tp: 0}",
        "{zero: 4}",
        "{dp: 70000}",
        "{tp: two}",
        "{recompute: some}",
        "{offload_params: disk}",
        "{tp: 1, xp: 2}",
        "[1]",
        "3",
    ],
)
def test_wrong_layouts_are_refused_with_their_line(text: str) -> None:
    with pytest.raises(RlhfsimError) as error:
        convert(Layout, parse_yaml(text, "l.yaml"))
    assert error.value.place is not None
    assert error.value.place.line == 1


@pytest.mark.parametrize(
    "text", ["{memory_utilization: 0}", "{memory_utilization: 1.1}", "{max_num_seqs: 0}", "{precision: int3}"]
)
def test_wrong_rollout_layouts_are_refused(text: str) -> None:
    with pytest.raises(RlhfsimError, match=f"'{text[1:].split(':')[0]}': input should be") as error:
        convert(RolloutLayout, parse_yaml(text, "r.yaml"))
    assert error.value.code == "bad-value"
