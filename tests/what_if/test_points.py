"""From patches to questions: grids, relative values, and errors with their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from small_scenarios import SMALL, small

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward
from rlhfsim.what_if.scenarios.answer import ScenarioQuestions, asked


def cases(**more: Any) -> ScenarioQuestions:
    return asked(small(**more))


def test_a_grid_is_every_combination_in_order() -> None:
    found = cases(grid={"cluster.node_groups.0.gpus": [2, 4], "workload.samples": [2, 4]})
    assert [p.name for p in found.points] == [
        "gpus 2, samples 2",
        "gpus 2, samples 4",
        "gpus 4, samples 2",
        "gpus 4, samples 4",
    ]
    last = found.points[-1]
    assert (last.request.cluster.gpus, last.request.workload.samples) == (4, 4)
    assert dict(last.before) == {"cluster.node_groups.0.gpus": 2, "workload.samples": 2}


def test_names_of_a_grid_tell_paths_with_the_same_end_apart() -> None:
    found = cases(
        grid={
            "workload.response_len.mean": [100],
            "workload.response_len.max": [3000],
            "workload.reward.rules.workers": [8],
        }
    )
    assert found.points[0].name == "response_len.mean 100, response_len.max 3,000, workers 8"
    both = cases(grid={"request.fix.actor.tp": [1], "request.fix.rollout.tp": [1]})
    assert both.points[0].name == "actor.tp 1, rollout.tp 1"


def test_so_many_times_multiplies_what_the_base_or_its_profile_has() -> None:
    [point] = cases(
        points=[
            {
                "name": "p",
                "set": {
                    "workload.prompts": "2x",
                    "cluster.node_groups.0.nic": "0.5x",
                    "cluster.node_groups.0.price": "0.5x",
                    "cluster.node_groups.0.storage": "2x",
                },
            }
        ]
    ).points
    pool = point.request.cluster.node_group.profile
    base = cases(grid={"run.steps": [1]}).cases.base.request.cluster.node_group.profile
    assert point.request.workload.prompts == 32
    assert pool.nic.value == base.nic.value / 2
    assert pool.node.shared_storage.value == 2 * base.node.shared_storage.value
    assert pool.price is not None
    assert base.price is not None
    assert pool.price.value == base.price.value / 2


def test_a_second_pool_serves_the_rollout_alone_unless_any_role_may_use_it() -> None:
    second = {"cluster.node_groups.1": {"gpu": "l40s", "gpus": 8}}
    alone, free = cases(
        points=[
            {"name": "alone", "set": second},
            {"name": "free", "set": {**second, "request.second_pool": "any"}},
        ]
    ).points
    assert {(x.role, x.value) for x in alone.request.hardware_limits} >= {("rollout", 1), ("actor", 0)}
    assert free.request.hardware_limits == ()


def test_roles_are_fixed_and_bounded() -> None:
    [point] = cases(
        points=[
            {
                "name": "p",
                "set": {"request.fix": {"actor": {"tp": 1, "micro_batch": "<=4"}, "rollout": {"gpus": 1}}},
            }
        ]
    ).points
    assert point.request.fix == {"actor": {"tp": 1}}
    assert sorted(x.text for x in point.request.limits) == ["actor.micro_batch<=4", "rollout.gpus=1"]


def test_a_setting_changes_the_base_and_with_it_every_point() -> None:
    found = asked(small(points=[{"name": "p", "set": {"workload.prompts": "2x"}}]), {"workload.prompts": 64})
    assert found.cases.base.request.workload.prompts == 64
    assert found.points[0].request.workload.prompts == 128


def test_only_keeps_points_by_name_and_drops_what_is_not_about_them() -> None:
    found = asked(
        small(
            points=[{"name": "spot a", "set": {"run.steps": 1}}, {"name": "b", "set": {"run.steps": 2}}],
            break_even=[
                {"vary": "run.steps", "between": [1, 9], "of": "time_of_run", "point": "b", "target": "1 h"}
            ],
            tornado={"vary": {"run.steps": [1, 2]}},
        ),
        only=["spot*"],
    )
    assert [p.name for p in found.points] == ["spot a"]
    assert (found.break_evens, found.inputs) == ((), {})


BAD: list[tuple[dict[str, Any], str, str, str]] = [
    (
        {"points": [{"name": "p", "set": {"workload.respons_len.mean": 1}}]},
        "unknown-path",
        "workload.respons_len.mean",
        "workload.response_len.mean",
    ),
    (
        {"points": [{"name": "p", "set": {"cluster.node_groups.0.price": "4 GB"}}]},
        "unknown-unit",
        "cluster.node_groups.0.price",
        "USD/h",
    ),
    (
        {"points": [{"name": "p", "set": {"cluster.node_groups.0.gpus": 0}}]},
        "bad-value",
        "cluster.node_groups.0.gpus",
        "",
    ),
    (
        {"points": [{"name": "p", "set": {"cluster.node_groups.0.gpus": "0.3x"}}]},
        "bad-value",
        "cluster.node_groups.0.gpus",
        "",
    ),
    (
        {"points": [{"name": "p", "set": {"workload.model": "llama-99b"}}]},
        "unknown-model",
        "workload.model",
        "",
    ),
    (
        {"points": [{"name": "p", "set": {"workload.model": "2x"}}]},
        "no-number",
        "workload.model",
        "give the value itself",
    ),
    (
        {"points": [{"name": "p", "set": {"workload.mini_batches": 7}}]},
        "uneven-mini-batches",
        "workload.mini_batches",
        "",
    ),
    (
        {"points": [{"name": "p", "set": {"request.fix": {"critic": {"tp": 1}}}}]},
        "role-without-role",
        "request.fix",
        "leave it out",
    ),
    (
        {"points": [{"name": "p", "set": {"request.fix": {"actor": {"tp": "many"}}}}]},
        "bad-value",
        "request.fix",
        "give a whole number from 1 to",
    ),
    (
        {"points": [{"name": "p", "set": {"cluster.node_groups.2": {"gpu": "h100", "gpus": 8}}}]},
        "no-such-item",
        "cluster.node_groups.2",
        "count from 0",
    ),
    ({"points": [{"name": "p", "set": {"run.curve": "a.csv"}}]}, "two-lengths", "run.curve", "null"),
    ({"points": [{"name": "base", "set": {"run.steps": 1}}]}, "name-twice", "name", ""),
    ({"points": [{"name": "p", "set": {}}]}, "bad-value", "set", ""),
    ({"grid": {"run.steps": []}}, "bad-value", "run.steps", ""),
    (
        {"grid": {"run.steps": list(range(1, 50)), "workload.seed": list(range(50))}},
        "many-points",
        "grid",
        "--csv",
    ),
    ({}, "nothing-varied", "title", "give points"),
    ({"tornado": {"vary": {"run.stepz": [1, 2]}}}, "unknown-path", "run.stepz", "run.steps"),
    (
        {"break_even": [{"vary": "run.steps", "between": [9, 1], "of": "time_of_run", "target": "1 h"}]},
        "empty-range",
        "between",
        "low end first",
    ),
    (
        {"break_even": [{"vary": "run.steps", "between": [1, 9], "of": "time_of_run", "target": "1 GB"}]},
        "unknown-unit",
        "target",
        "",
    ),
    (
        {
            "break_even": [
                {"vary": "run.steps", "between": [1, 9], "of": "time_of_run", "point": "q", "target": "1 h"}
            ]
        },
        "unknown-point",
        "point",
        "base",
    ),
    (
        {
            "break_even": [
                {"vary": "workload.model", "among": ["1b", "3b"], "of": "time_of_run", "target": "1 h"}
            ]
        },
        "no-number",
        "among",
        "",
    ),
    (
        {"break_even": [{"vary": "run.steps", "between": [1, 9], "of": "time_of_run"}]},
        "against-or-target",
        "vary",
        "",
    ),
    (
        {"break_even": [{"vary": "run.steps", "of": "time_of_run", "target": "1 h"}]},
        "between-or-among",
        "vary",
        "",
    ),
]


@pytest.mark.parametrize(("more", "code", "line", "remedy"), BAD, ids=[f"{b[1]}-{b[2]}" for b in BAD])
def test_bad_input_is_one_error_with_line_and_remedy(
    more: dict[str, Any], code: str, line: str, remedy: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(small(**more), sort_keys=False))
    with pytest.raises(RlhfsimError) as caught:
        asked(path)
    error = caught.value
    assert error.code == code, error
    assert error.place is not None
    assert error.place.file == str(path)
    assert line in (error.place.text or "")
    assert error.help
    assert remedy in error.help


@pytest.mark.parametrize(
    ("role", "field", "value", "code"),
    [
        *(
            ("actor", field, 0, "bad-value")
            for field in ("micro_batch", "tp", "pp", "cp", "ep", "vp", "gpus")
        ),
        *(("actor", field, 0, "bad-value") for field in ("pack_tokens", "score_pack_tokens")),
        *(("rollout", "tp", value, "bad-value") for value in (0, "<=0", -1, "4.5", "nan", 10**9)),
        ("actor", "zero", 4, "bad-value"),
        ("rollout", "sleep", 3, "bad-value"),
        ("actor", "residency", "<=resident", "bad-value"),
        ("actor", "offload_between", "maybe", "unknown-offload-between"),
        ("rollout", "zero", 1, "unknown-layout-field"),
        ("rollout", "micro_batch", 1, "unknown-layout-field"),
        ("actor", "sleep", 1, "unknown-layout-field"),
    ],
)
def test_a_value_that_a_field_cannot_have_is_refused(
    role: str, field: str, value: int | str, code: str
) -> None:
    with pytest.raises(RlhfsimError) as caught:
        asked(small(points=[{"name": "p", "set": {"request.fix": {role: {field: value}}}}]))
    assert caught.value.code == code
    assert caught.value.place is not None
    assert "request.fix" in (caught.value.place.text or "")


def test_a_wrong_base_is_told_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    text = yaml.safe_dump(small(grid={"run.steps": [1]}), sort_keys=False).replace(
        "prompts: 16", "prompts: many"
    )
    path.write_text(text)
    with pytest.raises(RlhfsimError) as caught:
        asked(path)
    assert caught.value.place is not None
    assert "prompts: many" in (caught.value.place.text or "")


def test_a_run_length_is_needed_for_the_time_of_a_run() -> None:
    even = {"vary": "workload.samples", "between": [1, 9], "of": "time_of_run", "target": "1 h"}
    base = {**SMALL["base"], "run": {}}
    with pytest.raises(RlhfsimError, match="needs the length of the run"):
        asked({"title": "t", "base": base, "break_even": [even]})


def test_an_unknown_name_offers_the_shipped_ones() -> None:
    with pytest.raises(RlhfsimError, match="unknown scenario 'half-the-gpu'") as caught:
        asked("half-the-gpu")
    assert "half-the-gpus" in str(caught.value)


def test_a_file_of_another_kind_is_not_taken_for_a_name(tmp_path: Path) -> None:
    table = tmp_path / "points.csv"
    table.write_text("a,b\n")
    with pytest.raises(RlhfsimError, match=r"points.csv is no scenario") as caught:
        asked(str(table))
    assert ".yaml" in str(caught.value)


def test_a_patch_below_a_default_keeps_the_rest_of_the_default() -> None:
    base = {"cluster": {"node_groups": [{"gpu": "h100", "gpus": 2}]}, "workload": {"model": "1b"}}
    [point] = asked(
        {"title": "t", "base": base, "points": [{"name": "p", "set": {"workload.response_len.value": 512}}]}
    ).points
    assert point.request.workload.response_len == Fixed(value=512)
    assert dict(point.before) == {"workload.response_len.value": 1024}
    [point] = asked(
        {"title": "t", "base": base, "points": [{"name": "p", "set": {"workload.reward.overlapped": False}}]}
    ).points
    assert point.request.workload.reward == Reward(model="same", overlapped=False)
