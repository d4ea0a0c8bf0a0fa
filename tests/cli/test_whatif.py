"""`rlhfsim whatif` as a user runs it: text, JSON, files, exit codes, interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result
from small_scenarios import small

import rlhfsim
from rlhfsim.cli import main as entry
from rlhfsim.cli.whatif import whatif
from rlhfsim.errors import RlhfsimError
from rlhfsim.present.terminal.page import MOST
from rlhfsim.specs.hardware.clusters import NodeGroupText
from rlhfsim.what_if.scenarios.document import (
    Base,
    BreakEvenText,
    Document,
    FaultsText,
    PointText,
    RequestText,
    RunText,
    scenario_names,
)
from rlhfsim.what_if.scenarios.result import (
    PointBreakEven,
    PointResult,
    PointTarget,
    TornadoBar,
    Tried,
    WhatIf,
    WhatIfProvenance,
    read_whatif,
)

DOCS = Path(__file__).parents[2] / "docs"
MANY: dict[str, Any] = small(
    question="What if it were larger?",
    assumptions=["steps stay"],
    points=[
        {"name": "four GPUs", "set": {"cluster.node_groups.0.gpus": 4}},
        {"name": "cheap", "set": {"cluster.node_groups.0.price": "0.5x"}},
        {"name": "405B", "set": {"workload.model": "405b"}},
        {"name": "one pool", "set": {"request.forbid": ["disaggregated"]}},
    ],
    break_even=[
        {
            "question": "Which price?",
            "vary": "cluster.node_groups.0.price",
            "between": [1, 6],
            "of": "cost_of_run",
            "point": "four GPUs",
            "against": "base",
            "vary_in": "point",
        }
    ],
    tornado={"vary": {"workload.samples": ["0.5x", "2x"], "cluster.node_groups.0.price": ["0.5x", "2x"]}},
)


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scenario in a folder, with a store beside it that fills once."""
    path = tmp_path_factory.mktemp("whatif") / "many.yaml"
    path.write_text(yaml.safe_dump(MANY, sort_keys=False))
    return path


def run(scenario: Path, *more: str, **env: str) -> Result:
    words = [str(scenario), "--cache", str(scenario.parent / "kept"), "--jobs", "1", *more]
    return CliRunner().invoke(whatif, words, env=env)


@pytest.mark.parametrize("width", [80, 100])
def test_the_answer_is_no_wider_than_the_terminal_and_holds_every_part(scenario: Path, width: int) -> None:
    result = run(scenario, "--detail", "all", COLUMNS=str(width))
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= width
    assert len(run(scenario, COLUMNS="100").output.splitlines()) <= MOST
    for word in (
        "small",
        "What if it were larger?",
        "four GPUs",
        "nothing fits",
        "Break-evens",
        "Which price?",
        "What moves the answer",
        "assumed: steps stay",
        "Price of h100_sxm: 3 USD/h",
        "given by the scenario",
        "--out whatif.json",
    ):
        assert word in result.output


def test_changes_show_only_what_is_another_and_mark_another_architecture(scenario: Path) -> None:
    assert "~ cheap" not in run(scenario).output
    text = run(scenario, "--detail", "changes").output
    cheap = text[text.index("~ cheap") :]
    cheap = cheap[: cheap.index("\n\n")] if "\n\n" in cheap else cheap.split("405B")[0]
    assert "price of a GPU-hour" in cheap
    assert "(-50 %)" in cheap
    assert "actor" not in cheap
    found = json.loads(run(scenario, "--json").output)
    other = found["points"][3]["plan"]["architecture"] != found["base"]["plan"]["architecture"]
    assert ("! one pool" in text) == other


def test_json_files_and_text_hold_the_same(scenario: Path, tmp_path: Path) -> None:
    out, table = tmp_path / "w.json", tmp_path / "w.csv"
    files = ("--out", str(out), "--csv", str(table), "--parquet", str(tmp_path / "w.parquet"))
    assert run(scenario, *files).exit_code == 0
    result = run(scenario, "--json", *files)  # earlier results may be replaced
    assert result.exit_code == 0
    data, kept = json.loads(result.output), read_whatif(out)
    assert data["schema"] == "rlhfsim.whatif/1"
    assert data["points"] == kept.to_dict()["points"]
    assert len(table.read_text().splitlines()) == 6


def test_every_point_has_the_probability_of_what_is_required(scenario: Path, tmp_path: Path) -> None:
    asked = ["--require", "time_of_run<30min", "--require", "oom<50%"]
    table = tmp_path / "w.csv"
    result = run(scenario, *asked, "--json", "--csv", str(table))
    points = json.loads(result.output)["points"]
    fitting = [p for p in points if p["plan"]]
    assert [t["text"] for p in fitting for t in p["targets"]] == asked[1::2] * len(fitting)
    chances = {p["name"]: p["targets"][0]["probability"] for p in fitting}
    assert 0.02 < chances["cheap"] < 0.98
    assert all(p["targets"][1]["probability"] is None for p in fitting)
    assert [p["targets"] for p in points if not p["plan"]] == [[]]
    assert "P(time_of_run<30min)" in table.read_text().splitlines()[0]
    text = run(scenario, *asked, COLUMNS="100").output
    assert f"percentages: probability of {asked[1]}" in text
    assert f"{100 * chances['cheap']:.0f} %" in text
    never = run(scenario, "--require", "step_time<1ms")
    assert never.exit_code == 1
    endless = small(points=[{"name": "half", "set": {"workload.prompts": 8}}])
    with pytest.raises(RlhfsimError, match="length of the run"):
        rlhfsim.whatif(endless, settings={"run.steps": None}, require=["time_of_run<1h"])


def test_a_second_run_searches_nothing(scenario: Path) -> None:
    run(scenario)
    data = json.loads(run(scenario, "--json").output)
    assert data["provenance"]["searched"] == 0
    assert data["provenance"]["from_cache"] > 0


def test_settings_and_only(scenario: Path) -> None:
    data = json.loads(
        run(
            scenario,
            "--json",
            "--only",
            "chea*",
            "--set",
            "run.steps=7",
            "--set",
            "cluster.node_groups.0.price=4 USD/h",
        ).output
    )
    assert [p["name"] for p in data["points"]] == ["cheap"]
    assert data["base"]["steps"] == 7
    assert data["points"][0]["changes"] == {"cluster.node_groups.0.price": 2}


def test_a_base_that_does_not_fit_ends_with_1(scenario: Path) -> None:
    result = run(scenario, "--set", "workload.model=405b", "--only", "cheap")
    assert result.exit_code == 1
    assert "The base does not fit" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "workload.modell=8b"], "unknown path 'workload.modell'"),
        (["--set", "run.steps"], "is not PATH=VALUE"),
        (["--set", "run.steps=1", "--set", "run.steps=2"], "is given twice"),
        (["--set", "cluster.node_groups.0.price=4 GB"], "unknown unit"),
        (["--only", "nobody"], "unknown point 'nobody'"),
        (["--csv", "points.txt"], "does not end in .csv"),
        (["--no-cache"], "drop one"),
        (["--jobs", "0"], "out of range"),
    ],
)
def test_bad_options_are_one_message(scenario: Path, words: list[str], message: str) -> None:
    result = run(scenario, *words)
    assert isinstance(result.exception, RlhfsimError)
    assert message in str(result.exception)


def test_without_a_scenario_the_shipped_ones_are_named() -> None:
    result = CliRunner().invoke(whatif, [])
    assert isinstance(result.exception, RlhfsimError)
    assert "half-the-gpus" in str(result.exception)


def test_bad_input_ends_with_2_and_names_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        yaml.safe_dump(small(points=[{"name": "p", "set": {"workload.promts": 1}}]), sort_keys=False)
    )
    monkeypatch.setattr(sys, "argv", ["rlhfsim", "whatif", str(path), "--no-cache"])
    with pytest.raises(SystemExit) as caught:
        entry.main()
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert f"{path}:" in told
    assert "workload.promts: 1" in told
    assert "did you mean workload.prompts" in told


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_interrupted_run_goes_on_where_it_was(how: signal.Signals, code: int, tmp_path: Path) -> None:
    path, kept = tmp_path / "long.yaml", tmp_path / "kept"
    path.write_text(yaml.safe_dump(small(grid={"workload.seed": list(range(20))})))
    words = [
        sys.executable,
        "-m",
        "rlhfsim.cli.main",
        "whatif",
        str(path),
        "--cache",
        str(kept),
        "--jobs",
        "2",
        "--json",
    ]
    first = subprocess.Popen(
        words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ}
    )
    while first.poll() is None and len(list(kept.glob("*.json"))) < 3:
        time.sleep(0.01)
    first.send_signal(how)
    told = first.communicate(timeout=60)[1]  # a process that stayed behind would hold the pipe
    assert first.returncode == code, told
    done = len(list(kept.glob("*.json")))
    if how == signal.SIGINT:
        assert f"{done} of 20 designs are kept in" in told
    found = json.loads(run_again(words))["provenance"]
    assert (found["from_cache"], found["searched"]) == (done, 20 - done)
    assert 3 <= done < 20


def run_again(words: list[str]) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


# --- the documents ----------------------------------------------------------------------------------


def test_every_option_is_documented() -> None:
    text = (DOCS / "cli.md").read_text()
    section = text[text.index("## `rlhfsim whatif SCENARIO`") :]
    section = section[: section.index("\n## ", 5)]
    for param in whatif.params:
        if isinstance(param, click.Option):
            assert param.opts[0] in section


@pytest.mark.parametrize(
    "kind",
    [
        Document,
        Base,
        NodeGroupText,
        RequestText,
        RunText,
        FaultsText,
        PointText,
        BreakEvenText,
        WhatIf,
        PointResult,
        PointTarget,
        TornadoBar,
        PointBreakEven,
        Tried,
        WhatIfProvenance,
    ],
    ids=lambda k: str(k.__name__),
)
def test_every_key_of_the_file_and_of_the_result_is_documented(kind: type) -> None:
    import re
    from dataclasses import fields

    text = (DOCS / "whatif.md").read_text()
    words = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`([^`]*)`", text))))
    assert {f.name for f in fields(kind)} - words == set()


def test_every_shipped_scenario_is_named() -> None:
    text = (DOCS / "whatif.md").read_text()
    assert [name for name in scenario_names() if f"`{name}`" not in text] == []


def test_the_example_of_the_document_is_a_scenario(tmp_path: Path) -> None:
    import re

    from rlhfsim.what_if.scenarios.answer import asked

    found = re.search(r"```yaml\n(.*?)```", (DOCS / "whatif.md").read_text(), re.S)
    assert found is not None
    path = tmp_path / "example.yaml"
    path.write_text(found[1])
    example = asked(path)
    assert [p.name for p in example.points] == ["half", "samples 8", "samples 16"]
    assert (len(example.break_evens), len(example.inputs)) == (1, 1)
