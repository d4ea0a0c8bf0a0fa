"""Scenario files: what they hold, what is refused with its line, and that no text crashes the reader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfsim import estimate, resources
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.scenario import load_scenario, system_names

FILES = sorted((resources.shipped("scenarios") / "systems").glob("*.yaml"))
TEXTS = [path.read_text() for path in FILES]
MINIMAL = """\
cluster: {node_groups: [{gpu: h100, gpus: 8}]}
workload: {algorithm: grpo, model: qwen3-8b, kl: false}
placement:
  pools: [{name: all, gpus: 8}]
  actor: {pool: all, layout: {dp: 8}}
  rollout: {pool: all, layout: {dp: 8}}
  weight_path: ipc
"""
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def load(tmp_path: Path, text: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    load_scenario(file)


def refused(tmp_path: Path, text: str) -> RlhfsimError:
    with pytest.raises(RlhfsimError) as error:
        load(tmp_path, text)
    return error.value


def test_a_minimal_scenario_loads_and_is_titled_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINIMAL)
    found = load_scenario(file)
    assert found.title == str(file)
    assert found.cluster.gpus == 8
    assert found.placement.architecture == "hybrid"


def test_shipped_systems_load_by_name_with_or_without_folder() -> None:
    assert load_scenario("verl") == load_scenario("systems/verl")
    assert set(system_names()) == {path.stem for path in FILES}


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(RlhfsimError) as error:
        load_scenario("openrlf")
    assert "openrlhf" in str(error.value.help)


@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        ("placement:", "placment:", "unknown-key", 3),
        ("workload: {algorithm: grpo, model: qwen3-8b, kl: false}\n", "", "missing-key", 1),
        ("gpu: h100", "gpu: h1000", "unknown-", 1),
        ("algorithm: grpo", "algorithm: gpro", "bad-value", 2),
        ("layout: {dp: 8}}\n  w", "layout: {dp: 16}}\n  w", "layout-exceeds-pool", 3),
        ("pool: all, layout: {dp: 8}}\n  r", "pool: al, layout: {dp: 8}}\n  r", "unknown-pool", 3),
        ("weight_path: ipc", "weight_path: telepathy", "bad-value", 7),
        ("{dp: 8}}\n  w", "{dp: 8, tq: 1}}\n  w", "unknown-key", 6),
        ("gpus: 8}]\n", "gpus: 0}]\n", "bad-value", 4),
        ("cluster: {", "cluster: {{", "malformed-yaml", None),
    ],
)
def test_a_wrong_scenario_is_refused_with_its_line(
    tmp_path: Path, old: str, new: str, code: str, line: int | None
) -> None:
    assert MINIMAL.count(old) == 1
    error = refused(tmp_path, MINIMAL.replace(old, new))
    assert error.code.startswith(code)
    assert error.place is not None
    assert line is None or error.place.line == line


@pytest.mark.parametrize(
    "schedule", ["{staleness: 1}", "{staleness: 2, partial_rollout: true}", "{streaming: true}"]
)
def test_a_schedule_without_a_rollout_is_refused(tmp_path: Path, schedule: str) -> None:
    text = MINIMAL.replace("grpo", "sft").replace(", kl: false", "").replace("ipc", "none")
    text = text.replace("  rollout: {pool: all, layout: {dp: 8}}\n", f"  schedule: {schedule}\n")
    (tmp_path / "s.yaml").write_text(text)
    scenario = load_scenario(tmp_path / "s.yaml")
    with pytest.raises(RlhfsimError) as error:
        estimate(scenario.placement, scenario.workload, scenario.cluster)
    assert error.value.code == "schedule-without-rollout"


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "a: &x 1\nb: *x\n", "? [a]\n: b\n", "\x00"])
def test_documents_that_are_no_scenario_are_refused(tmp_path: Path, text: str) -> None:
    refused(tmp_path, text)


def loads_or_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "fuzz.yaml"
    file.write_bytes(content)
    try:
        load_scenario(file)
    except RlhfsimError as error:
        str(error)


@FUZZ
@given(content=st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    loads_or_is_refused(tmp_path, content)


@FUZZ
@given(text=st.sampled_from(TEXTS), cut=st.floats(0, 1))
def test_truncated_files_load_or_are_refused(tmp_path: Path, text: str, cut: float) -> None:
    loads_or_is_refused(tmp_path, text.encode()[: int(len(text.encode()) * cut)])


ODD = st.sampled_from(
    [
        "-1",
        "0",
        "1e308",
        ".inf",
        ".nan",
        "99999999999999999999",
        "null",
        "true",
        "''",
        "[]",
        "{}",
        "2026-13-45",
        "0x",
        "!!python/object:os.system",
        "&a",
        "*a",
        "\t",
        "\n",
        "}",
        "[",
        "\u2028",
        "\ud800",
        "12 parsecs",
        "1:2:3",
    ]
)


@FUZZ
@given(
    text=st.sampled_from(TEXTS),
    where=st.floats(0, 1),
    length=st.integers(0, 12),
    odd=st.one_of(ODD, st.text(max_size=6)),
)
def test_files_with_a_piece_replaced_load_or_are_refused(
    tmp_path: Path, text: str, where: float, length: int, odd: str
) -> None:
    at = int(where * len(text))
    mutated = text[:at] + odd + text[at + length :]
    loads_or_is_refused(tmp_path, mutated.encode("utf-8", "surrogatepass"))


@FUZZ
@given(text=st.sampled_from(TEXTS), which=st.integers(0, 200), odd=ODD)
def test_files_with_an_odd_value_load_or_are_refused(tmp_path: Path, text: str, which: int, odd: str) -> None:
    values = list(re.finditer(r": ([\w.\-]+)(?=[,}\n\]])", text))
    hit = values[which % len(values)]
    mutated = text[: hit.start(1)] + odd + text[hit.end(1) :]
    loads_or_is_refused(tmp_path, mutated.encode("utf-8", "surrogatepass"))
