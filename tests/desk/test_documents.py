"""Files of a run, a pool, a purchase or a reward on the page: the answer of the command, with its pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from rlhfsim.cli.desk import of_documents
from rlhfsim.desk.documents import DocumentTask, _looked, answer_documents
from rlhfsim.desk.files import MAX_CHARACTERS, DocumentAnswer, NamedFile, named_files
from rlhfsim.desk.state import query
from rlhfsim.desk.tasks import told
from rlhfsim.errors import RlhfsimError

QUESTION = {
    "gpus": "4",
    "gpu": "h100",
    "model": "0.5b",
    "algorithm": "grpo",
    "prompts": "64",
    "samples": "2",
    "steps": "1000",
}
RUN = """steps: 40
lengths: [{step: 0, mean: 300}, {step: 40, mean: 900}]
stages: [{start: 0, max: 1024}, {start: 20, max: 2048}]
"""
JOB = """workload: {{model: 0.5b, algorithm: grpo, prompts: 32, samples: 4, reward: {{rules: {{}}}},
           response_len: {{kind: lognormal, mean: 300, max: 1024}}}}
steps: {steps}
deadline: 2 d
"""
JOBS = {"short.yaml": JOB.format(steps=20), "long.yaml": JOB.format(steps=200)}
PORTFOLIO = """title: one team
jobs:
  - name: chat
    workload: {model: 0.5b, algorithm: grpo, prompts: 64, samples: 8, reward: {rules: {}}}
    steps: 1000
    runs_per_year: 100
    deadline: 14 d
gpus: [h100]
sizes: [8]
supply: [bought, on-demand]
engineers: 1
maintenance: 5 %
storage: 2000 USD
on_demand_available: 0.9
"""
LEARNING = """target: 0.5
curve: learnt.csv
batch: 256
"""
CURVE = "samples,reward\n0,0.2\n1000,0.6\n"


def answer(files: Mapping[str, str], *, local: bool = True, **changes: str) -> DocumentAnswer:
    named = tuple(NamedFile(name, text) for name, text in files.items())
    return of_documents(query(QUESTION | changes), named, files=local)


@pytest.mark.parametrize(
    ("files", "schema", "figure", "command"),
    [
        ({"run.yaml": RUN}, "rlhfsim.long_run/1", "lengths", "rlhfsim design --gpus 4"),
        (JOBS, "rlhfsim.pool/1", "schedule", "rlhfsim pool short.yaml long.yaml --gpus 4 --gpu h100"),
        ({"portfolio.yaml": PORTFOLIO}, "rlhfsim.buy/1", "cash", "rlhfsim buy portfolio.yaml"),
        (
            {"learning.yaml": LEARNING, "learnt.csv": CURVE},
            "rlhfsim.time_to_reward/1",
            "hours",
            "rlhfsim design --gpus 4",
        ),
    ],
    ids=["run", "pool", "purchase", "reward"],
)
def test_files_get_the_answer_of_their_command(
    files: dict[str, str], schema: str, figure: str, command: str
) -> None:
    found = answer(files)
    assert found.page.schema == schema
    assert figure in [f.key for f in found.page.figures]
    assert found.command.startswith(command)
    assert all(name in found.command for name in files if name.endswith(".yaml"))


def test_the_process_sends_components_with_every_figure() -> None:
    ours, theirs = Pipe()
    files = (NamedFile("run.yaml", RUN),)
    told(partial(answer_documents, partial(of_documents, files=True), query(QUESTION), files), theirs)
    state, parts, over, _ = _looked(DocumentTask(**ours.recv()))
    text = json.dumps(parts, default=lambda c: c.to_plotly_json())
    assert over
    assert state == []
    assert text.count('"type": "Graph"') == 2
    assert "rlhfsim design --gpus 4" in text


def test_one_text_holds_files_by_their_names() -> None:
    found = named_files(f"--- # run.yaml\n{RUN}--- # learnt.csv\n{CURVE}")
    assert [name for name, _ in found] == ["run.yaml", "learnt.csv"]
    assert found[1].text.strip() == CURVE.strip()
    assert named_files(RUN) == (NamedFile("asked.yaml", RUN),)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("  ", "nothing-given"),
        ("x" * (MAX_CHARACTERS + 1), "too-large"),
        ("--- # ../../etc/passwd\na: 1\n", "bad-name"),
        ("--- # .hidden\na: 1\n", "bad-name"),
    ],
)
def test_texts_that_are_no_files_are_refused(text: str, code: str) -> None:
    with pytest.raises(RlhfsimError) as error:
        named_files(text)
    assert error.value.code == code


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.yaml": "neither: 1\n"}, "is no file of a run"),
        ({"run.yaml": RUN, **JOBS}, "ask run and pool at once"),
        ({"a.yaml": RUN, "b.yaml": RUN}, "ask run at once"),
        ({"only.yaml": JOBS["long.yaml"]}, "a pool has 2 to 16 jobs"),
        ({"learnt.csv": CURVE}, "ask nothing at once"),
    ],
)
def test_files_that_ask_no_one_question_are_refused(files: dict[str, str], said: str) -> None:
    with pytest.raises(RlhfsimError) as error:
        answer(files)
    assert said in error.value.message


def test_what_is_wrong_in_a_file_is_said_with_its_line() -> None:
    with pytest.raises(RlhfsimError) as error:
        answer({"run.yaml": RUN.replace("mean: 300", "mean: many")})
    [shown, *_] = _looked(DocumentTask(trouble=error.value))
    assert "(run.yaml:2)" in json.dumps(shown, default=lambda c: c.to_plotly_json())


@pytest.mark.parametrize(
    "named",
    [
        RUN.replace("lengths: [{step: 0, mean: 300}, {step: 40, mean: 900}]", "curve: lengths.csv"),
        RUN.replace("lengths: [{step: 0, mean: 300}, {step: 40, mean: 900}]", "curve: /etc/passwd"),
    ],
)
def test_files_of_this_machine_are_named_only_where_the_page_is_its_own(named: str, tmp_path: Path) -> None:
    with pytest.raises(RlhfsimError) as error:
        answer({"run.yaml": named}, local=False)
    assert "names a file" in error.value.message
    job = {name: text.replace("model: 0.5b", f"model: {tmp_path}/config.json") for name, text in JOBS.items()}
    with pytest.raises(RlhfsimError) as error:
        answer(job, local=False)
    assert "names a file" in error.value.message
    given: Any = answer({"learning.yaml": LEARNING, "learnt.csv": CURVE}, local=False)  # its own is no other
    assert given.page.figures
