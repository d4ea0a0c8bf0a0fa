"""plan.json: round trip, whole files only, and no text that crashes the reader."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfsim.api import estimate_file
from rlhfsim.cli.planned import profile_notes
from rlhfsim.errors import RlhfsimError
from rlhfsim.outputs import write_atomically
from rlhfsim.plan import SCHEMA, Plan, plan_text, read_plan, write_plan
from rlhfsim.provenance import content_hash

FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

VERSION_1 = Path(__file__).parents[1] / "data" / "plan_version_1.json"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return estimate_file("xtuner-rlhf")


@pytest.fixture(scope="module")
def text(plan: Plan) -> str:
    return plan_text(plan)


def test_a_plan_comes_back_equal_and_writes_the_same_bytes(plan: Plan, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    write_plan(first, plan)
    again = read_plan(first)
    assert again == plan
    write_plan(second, again)
    assert first.read_bytes() == second.read_bytes()


def test_a_plan_can_be_priced_again(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_plan(file, plan)
    again = estimate_file(file)
    assert again.prediction.step_s == pytest.approx(plan.prediction.step_s)
    assert again.input_hash == plan.input_hash


def test_a_plan_says_where_every_rank_runs(plan: Plan) -> None:
    roles = {entry.role: entry for entry in plan.gpu_map}
    assert set(roles) == {"rollout", "actor", "critic", "reference", "reward"}
    assert set(roles["actor"].nodes) == {0}
    assert set(roles["critic"].nodes) == {1}
    assert roles["critic"].gpus == tuple(range(8))


def test_a_failing_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RlhfsimError, match="no space left on device"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_an_interrupted_write_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "plan.json", "new")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(RlhfsimError) as error:
        write_atomically(tmp_path / "none" / "plan.json", "x")
    assert error.value.code == "unwritable-file"
    assert str(tmp_path / "none") in str(error.value.place)


@pytest.mark.parametrize("schema", ["rlhfsim.plan/3", "rlhfsim.estimate/1", None, 1])
def test_another_schema_is_not_a_plan(text: str, tmp_path: Path, schema: object) -> None:
    data = json.loads(text) | {"schema": schema}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    with pytest.raises(RlhfsimError) as error:
        read_plan(file)
    assert error.value.code == "not-a-plan"
    assert SCHEMA in error.value.message


def test_a_wrong_value_is_refused_with_its_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text.replace('"algorithm": "ppo"', '"algorithm": "ppi"'))
    with pytest.raises(RlhfsimError) as error:
        read_plan(file)
    assert error.value.place is not None
    assert "ppi" in str(error.value.place.text)


@pytest.mark.parametrize(
    ("pool", "code"),
    [
        ({"hardware": 1}, "unknown-hardware"),
        ({"start": 10**6}, "pool-exceeds-cluster"),
        ({"gpus": 10**6}, "pool-exceeds-cluster"),
    ],
)
def test_a_pool_outside_the_hardware_of_its_plan_is_refused(
    text: str, tmp_path: Path, pool: dict[str, int], code: str
) -> None:
    data = json.loads(text)
    data["placement"]["pools"][0] |= pool
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    with pytest.raises(RlhfsimError) as error:
        read_plan(file)
    assert error.value.code == code
    assert error.value.place is not None
    assert error.value.place.file == str(file)


def test_equal_inputs_have_equal_hashes(plan: Plan) -> None:
    assert content_hash(plan.workload) == content_hash(plan.workload)
    assert content_hash(plan.workload) != content_hash(plan.placement)


def reads_or_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "fuzz.json"
    file.write_bytes(content)
    try:
        read_plan(file)
    except RlhfsimError as error:
        str(error)


@FUZZ
@given(content=st.binary(max_size=100))
def test_random_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    reads_or_is_refused(tmp_path, content)


ODD = st.sampled_from(
    [
        "-1",
        "1e999",
        "NaN",
        "-Infinity",
        "null",
        "[]",
        "{}",
        '""',
        "9" * 400,
        '"\\ud800"',
        '"\\u0000"',
        "true",
        "}",
        "\ud800",
        "1" * 5000,
    ]
)


@FUZZ
@given(where=st.floats(0, 1), length=st.integers(0, 40), odd=st.one_of(ODD, st.text(max_size=5)))
def test_plans_with_a_piece_replaced_load_or_are_refused(
    text: str, tmp_path: Path, where: float, length: int, odd: str
) -> None:
    at = int(where * len(text))
    mutated = text[:at] + odd + text[at + length :]
    reads_or_is_refused(tmp_path, mutated.encode("utf-8", "surrogatepass"))


@FUZZ
@given(data=st.data(), odd=ODD)
def test_plans_with_an_odd_value_load_or_are_refused(
    text: str, tmp_path: Path, data: st.DataObject, odd: str
) -> None:
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if '"prediction"' in line)
    i = data.draw(st.integers(1, head))  # the long ledger says nothing new
    key, colon, _ = lines[i].partition(": ")
    comma = "," if lines[i].endswith(",") else ""
    lines[i] = f"{key}{colon}{odd}{comma}" if colon else lines[i]
    reads_or_is_refused(tmp_path, "\n".join(lines).encode("utf-8", "surrogatepass"))


def test_a_plan_of_version_1_is_read_and_written_as_the_present_one(tmp_path: Path) -> None:
    old = json.loads(VERSION_1.read_text())
    read = read_plan(VERSION_1)
    assert [g.role for g in read.gpu_map] == [g["seat"] for g in old["gpu_map"]]
    assert read.choice is not None
    assert [b.change for b in read.choice.break_evens] == [b["change"] for b in old["choice"]["flips"]] != []
    assert [limit.role for limit in read.choice.asked.limits] == ["actor"]
    write_plan(tmp_path / "plan.json", read)
    assert json.loads((tmp_path / "plan.json").read_text())["schema"] == SCHEMA
    assert read_plan(tmp_path / "plan.json") == read


@pytest.mark.parametrize(
    ("kind", "key"), [("runners_up", "step_s"), ("runners_up", "capacity_bytes"), ("flips", "factor")]
)
def test_what_a_choice_was_made_from_is_above_zero(kind: str, key: str, tmp_path: Path) -> None:
    data = json.loads(VERSION_1.read_text())
    data["choice"][kind][0][key] = 0
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(RlhfsimError, match=f"{kind}.0.{key}"):
        read_plan(tmp_path / "plan.json")


def test_an_edited_plan_is_never_shown_as_it_was_priced(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for source in (text, VERSION_1.read_text()):
        file.write_text(source)
        assert read_plan(file, as_priced=True) == read_plan(file)
        assert not any("edited" in note for note in profile_notes(str(file)))
        data = json.loads(source)
        if "prediction_hash" in data:
            figures = json.loads(source)
            figures["prediction"]["step_s"] /= 2
            file.write_text(json.dumps(figures))
            with pytest.raises(RlhfsimError, match="a hash in it no longer fits"):
                read_plan(file, as_priced=True)
        data["workload"]["prompts"] *= 2
        file.write_text(json.dumps(data))
        with pytest.raises(RlhfsimError) as error:
            read_plan(file, as_priced=True)
        assert error.value.code == "edited-plan"
        assert any("edited" in note for note in profile_notes(str(file)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("prediction", "probability_out_of_memory"), 7),
        (("prediction", "usd_per_step"), -3),
        (("prediction", "step_s"), -5),
        (("prediction", "step_s"), True),
        (("prediction", "step_s"), 0),
        (("prediction", "capacity_bytes"), 0),
        (("prediction", "phases", 0, "seconds"), 1e30),
        (("prediction", "ledger", 0, "bytes"), -1),
        (("prediction", "capacity_bytes"), -8e10),
        (("models", 0, "params"), -7e9),
        (("hardware", 0, "gpus"), 0),
        (("gpu_map", 0, "nodes"), []),
        (("gpu_map", 0, "role"), "REWARD"),
        (("gpu_map",), []),
        (("models",), []),
        (("models", 0, "role"), "x"),
        (("oversubscription",), 0.5),
        (("workload", "prompts"), 10_000_000),
        (("placement", "schedule", "staleness"), -1),
    ],
)
def test_a_plan_of_numbers_that_cannot_be_is_refused(
    path: tuple[str | int, ...], value: object, text: str, tmp_path: Path
) -> None:
    data = at = json.loads(text)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(RlhfsimError) as caught:
        read_plan(tmp_path / "plan.json")
    assert "plan.json" in str(caught.value)
