"""Outputs of commands: whole or absent, never over an input or a foreign file; what a kill leaves is swept."""

from __future__ import annotations

import csv
import fcntl
import importlib
import io
import os
import threading
from pathlib import Path

import click
import pandas as pd
import pytest
from click.testing import CliRunner, Result
from rich.text import Text

from lab.scoreboard.text import table as markdown_table
from rlhfsim.cli.main import COMMANDS, cli
from rlhfsim.cli.params import Command, NewFolder, Output
from rlhfsim.errors import RlhfsimError
from rlhfsim.outputs import (
    MARKS,
    PREFIX,
    check_file,
    markdown_text,
    sweep,
    write_atomically,
    write_folder,
    write_new,
)
from rlhfsim.plan import plan_text, read_plan
from rlhfsim.present import chrome_trace
from rlhfsim.present.answers.validate import rows_text
from rlhfsim.present.terminal.console import console
from rlhfsim.trace import Span, Trace, dumps
from rlhfsim.validation.outcome import Outcome
from rlhfsim.what_if.scenarios.result import write_table

PLAN = Path(__file__).parents[1] / "data" / "plan_version_1.json"
MEASURED = '{\n "schema": "rlhfsim.trace/1",\n "source": "measured",\n'
CONFIG = '{"displayTimeUnit": "mine"}'
HOSTILE = "a|b`c`\n[x](javascript:alert(1))<script>alert(1)</script>\x1b[31m\udcff"
REFUSED = [  # command, files that are there, the error
    ("compare run --trace run/trace.json", {"run/trace.json": MEASURED}, "foreign-file"),
    ("compare run --trace run/plan.json", {"run/plan.json": "plan"}, "foreign-file"),
    ("validate m.csv --out m.csv", {"m.csv": "model,gpus\n"}, "output-is-input"),
    ("validate m.csv --out loop", {"m.csv": "model,gpus\n", "loop": "-> loop"}, "unwritable-file"),
    ("validate folder --out folder/m.csv", {"folder/m.csv": "model,gpus\n"}, "foreign-file"),
    ("whatif s.yaml --out s.yaml", {"s.yaml": "base: {}\n"}, "output-is-input"),
    ("whatif s.yaml --out link.yaml", {"s.yaml": "base: {}\n", "link.yaml": "-> s.yaml"}, "output-is-input"),
    ("whatif half-the-gpus --csv a.csv", {"a.csv": "name,salary\nme,1\n"}, "foreign-file"),
    ("whatif half-the-gpus --parquet a.parquet", {"a.parquet": "PAR1 x PAR1"}, "foreign-file"),
    ("whatif half-the-gpus --out a.json --set workload.model=1b", {"a.json": CONFIG}, "foreign-file"),
    ("simulate plan.json --trace plan.json", {"plan.json": "plan"}, "output-is-input"),
    ("simulate verl --trace plan.json", {"plan.json": "plan"}, "foreign-file"),
    ("simulate verl --trace run.json", {"run.json": MEASURED}, "foreign-file"),
    ("simulate verl --trace x.json", {"x.chrome.json": CONFIG}, "foreign-file"),
    ("estimate plan.json --out plan.json", {"plan.json": "plan"}, "output-is-input"),
    ("design --gpus 8 --model 8b --out run.sh", {"run.sh": "#!/bin/sh\n"}, "foreign-file"),
    ("design --gpus 8 --model 8b", {"plan.json": '{"schema": "mine"}'}, "foreign-file"),
    ("size --model 8b --require step_time<9s --out a.py", {"a.py": "x = 1\n"}, "foreign-file"),
    ("report plan.json", {"plan.json": "plan", "plan.html": "<!DOCTYPE html><p>mine"}, "foreign-file"),
    ("report plan.json --out plan.json", {"plan.json": "plan"}, "output-is-input"),
    ("export plan.json --to verl --out run", {"plan.json": "plan", "run/a": "mine"}, "folder-not-empty"),
    ("import-run job.log --out run", {"job.log": "", "run/a": "mine"}, "folder-not-empty"),
    ("import-run job.log --out job.log", {"job.log": ""}, "folder-not-empty"),
    ("calibrate run --out a.yaml", {"a.yaml": "name: mine\n"}, "file-exists"),
    ("design --gpus 8 --model 8b --out no/plan.json", {}, "unwritable-file"),
    ("whatif half-the-gpus --csv no/a.csv", {}, "unwritable-file"),
    ("calibrate run --out no/a.yaml", {}, "unwritable-file"),
    ("simulate verl --trace no/a.json", {}, "unwritable-file"),
    ("import-run job.log --out file/run", {"file": "mine"}, "unwritable-file"),
    ("validate --out a.json", {}, "bad-option"),
    (
        "estimate verl --out run/plan.json",
        {"run/plan.json": "plan", "run/trace.json": MEASURED},
        "output-in-run",
    ),
    (
        "design --gpus 8 --model 8b --out run/plan.json",
        {"run/plan.json": "plan", "run/.lock": ""},
        "output-in-run",
    ),
]


def run(words: str) -> Result:
    return CliRunner().invoke(cli, words.split(), standalone_mode=False)


@pytest.mark.parametrize(("words", "files", "code"), REFUSED, ids=[words for words, _, _ in REFUSED])
def test_an_output_replaces_neither_an_input_nor_a_foreign_file(
    words: str, files: dict[str, str], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if text.startswith("-> "):
            path.symlink_to(text.removeprefix("-> "))
        else:
            path.write_text(PLAN.read_text() if text == "plan" else text)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    error = run(words).exception
    assert isinstance(error, RlhfsimError)
    assert (error.code, bool(error.place), bool(error.help)) == (code, True, True)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def _commands() -> list[click.Command]:
    modules = {name: importlib.import_module(f"rlhfsim.cli.{name.replace('-', '_')}") for name in COMMANDS}
    found = [getattr(module, name.replace("-", "_")) for name, module in modules.items()]
    return [one for command in found for one in getattr(command, "commands", {"": command}).values()]


WRITTEN = ("out", "csv", "parquet", "trace", "report")
ELSEWHERE = {"launch": "out", "demo": "out", "measure": "out"}
"""Checked by the run folder (`run-folder-not-empty`) and by `profile measure` (`check_new`)."""


def test_every_option_that_writes_is_checked_before_the_work() -> None:
    for command in _commands():
        for param in command.params:
            if param.name in WRITTEN and ELSEWHERE.get(command.name or "") != param.name:
                assert isinstance(param.type, Output | NewFolder), (command.name, param.name)
                assert isinstance(command, Command), command.name


def test_every_kind_of_output_is_known_again(tmp_path: Path) -> None:
    plan = read_plan(PLAN)
    span = Span(
        name="x", role="actor", kind="train", pool="a", step=0, start_s=0, end_s=1, bound_by="compute"
    )
    trace = Trace(source="predicted", rlhfsim_version="1", plan_hash="x", steps=1, spans=(span,))
    row = Outcome(kind="training", file="a.csv", line=2, source="s", label="m")
    written = {
        "plan": [plan_text(plan)],
        "trace": [dumps(trace)],
        "trace for Perfetto": [chrome_trace.dumps(trace)],
        "rows": [rows_text([row], Path(name)) for name in ("a.csv", "a.json")],
        "page": [next((PLAN.parents[2] / "reports").glob("*.html")).read_text()],
    }  # tables and JSON of a what-if: tests/cli/test_whatif.py
    path = tmp_path / "out"
    for kind, texts in written.items():
        for text in texts:
            path.write_text(text)
            assert {other for other in MARKS if _accepts(path, other)} == {kind}
    path.write_text("")
    assert all(_accepts(path, kind) for kind in MARKS)


def test_a_formula_in_a_name_is_text_in_a_spreadsheet(tmp_path: Path) -> None:
    names = ["=1+1", "@SUM(A1)", "+2+cmd|' /C calc'!A0", "-2+3", "-1.5", "-", "plain"]
    rows = [Outcome(kind="training", file="a.csv", line=2, source=name, label="m") for name in names]
    write_table(pd.DataFrame({"name": names, "number": -1.0}), tmp_path / "points.csv")
    for text in (rows_text(rows, Path("rows.csv")), (tmp_path / "points.csv").read_text()):
        cells = list(csv.DictReader(io.StringIO(text)))
        shown = [row.get("source") or row["name"] for row in cells]
        assert shown == [f"'{name}" for name in names[:4]] + names[4:]
        assert all(row.get("number", "-1.0") == "-1.0" for row in cells)


def _accepts(path: Path, kind: str) -> bool:
    try:
        check_file(path, kind)
    except RlhfsimError:
        return False
    return True


def test_a_device_and_a_fifo_are_written_to_as_they_are(tmp_path: Path) -> None:
    before = os.stat("/dev/null").st_rdev
    write_atomically(Path("/dev/null"), "x")
    check_file(Path("/dev/null"), "plan")
    assert os.stat("/dev/null").st_rdev == before
    with pytest.raises(RlhfsimError, match="no space left"):
        write_atomically(Path("/dev/full"), "x")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.append(fifo.read_text()))
    reader.start()
    check_file(fifo, "plan")
    write_atomically(fifo, "whole")
    reader.join()
    assert (heard, fifo.is_fifo()) == (["whole"], True)


def test_a_link_stays_a_link_and_the_mode_of_a_file_stays(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to("file")
    write_atomically(link, "new")
    assert (link.is_symlink(), file.read_text(), file.stat().st_mode & 0o777) == (True, "new", 0o640)
    old = os.umask(0o077)
    try:
        write_atomically(tmp_path / "mine", "secret")
    finally:
        os.umask(old)
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600


def test_only_temporaries_that_nobody_holds_are_swept(tmp_path: Path) -> None:
    dead, folder, held = (tmp_path / f"{PREFIX}{i:016x}" for i in range(3))
    foreign = [tmp_path / ".rlhfsim-notes", tmp_path / ".plan.json.1234", tmp_path / f"{PREFIX}{9:016x}"]
    dead.write_text("half")
    folder.mkdir()
    (folder / "a").write_text("half")
    for path in foreign[:2]:
        path.write_text("mine")
    foreign[2].symlink_to("nowhere")
    with held.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_atomically(tmp_path / "plan.json", "x")
        names = {p.name for p in tmp_path.iterdir()}
        assert names == {"plan.json", held.name, *(p.name for p in foreign)}
    sweep(tmp_path)
    assert not held.exists()


def test_a_new_folder_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a" / "out"
    write_folder(out, {"run.sh": "#!/bin/sh\n", "a.txt": b"1"})
    assert [os.access(out / name, os.X_OK) for name in ("run.sh", "a.txt")] == [True, False]
    with pytest.raises(RlhfsimError) as error:
        write_folder(out, {"b": ""})
    assert error.value.code == "folder-not-empty"

    def faster(work: Path, target: Path) -> None:
        write_new(target / "theirs", "x") if target.exists() else target.mkdir()
        (target / "theirs").write_text("x")
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(os, "replace", faster)
    with pytest.raises(RlhfsimError) as error:
        write_folder(tmp_path / "a" / "other", {"b": ""})
    assert error.value.code == "folder-not-empty"
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["other", "out"]


def test_a_name_is_text_in_markdown_and_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    inert = r"a\|b\`c\` \[x\](javascript:alert(1))&lt;script>alert(1)&lt;/script>\x1b\[31m\udcff"
    assert markdown_text(HOSTILE) == inert
    assert markdown_table(("name",), [(HOSTILE,)]).splitlines()[2] == f"| {inert} |"
    screen = console()
    screen.print(HOSTILE)
    screen.print(Text(HOSTILE, style="red"))
    shown = capsys.readouterr().out
    assert shown.count("\\x1b[31m\\udcff") == 2
    assert not {c for c in shown if ord(c) < 32} - {"\n"}


def test_half_a_character_in_a_path_is_refused() -> None:
    with pytest.raises(RlhfsimError, match="is no path"):
        cli.main(["validate", "\ud800.csv"], standalone_mode=False)
