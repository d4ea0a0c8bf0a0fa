"""Every YAML and command of the executor's pages is one; the first example and what follows it run (long)."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from executor.settings import Settings
from rlhfsim.cli.main import COMMANDS
from rlhfsim.plan import write_plan
from rlhfsim.specs.loading import convert, parse_yaml

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / name).read_text() for name in ("engineers.md", "environments.md", "executor.md")}
YAML = [(name, text) for name, page in PAGES.items() for text in re.findall(r"```yaml\n(.*?)```", page, re.S)]
COMMAND_LINES = [
    (name, line.partition("  #")[0].strip())
    for name, page in PAGES.items()
    for line in page.splitlines()
    if re.match(r"(?:    )?rlhfsim [a-z]", line)
]


def test_there_are_examples() -> None:
    assert len(YAML) >= 9
    assert len(COMMAND_LINES) >= 20


@pytest.mark.parametrize(("page", "text"), YAML)
def test_a_yaml_of_a_page_is_settings(page: str, text: str) -> None:
    assert convert(Settings, parse_yaml(text, page), yaml.safe_load(text)) != Settings()


@pytest.mark.parametrize(("page", "line"), COMMAND_LINES)
def test_a_command_of_a_page_is_one(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    for name in ("plan.json", "run.yaml"):
        (tmp_path / name).touch()
    _, name, *words = shlex.split(
        line.replace(" ... ", " --gpus 16 --gpu h100 --model 8b ").partition(" > ")[0]
    )
    assert name in COMMANDS
    module = importlib.import_module(f"rlhfsim.cli.{name.replace('-', '_')}")
    command = getattr(module, name.replace("-", "_"))
    assert command.make_context(name, words).params


TEMPLATE = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}="


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the first example of engineers.md names: data, rewards, a model with a chat template."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import runs

    from executor.tasks import tiny

    monkeypatch.chdir(tmp_path)
    model = tiny.build(tmp_path / "qwen2.5-7b", layers=2)
    configuration = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(configuration | {"chat_template": TEMPLATE}))
    sums = [(f"{i}+1", str(i + 1)) for i in range(60)]
    columns = {"question": [q for q, _ in sums], "solution": [a for _, a in sums]}
    pq.write_table(pa.table(columns), tmp_path / "mine.parquet")
    rows = [{"prompt": f"{i}+2=", "answer": str(i + 2)} for i in range(20)]
    (tmp_path / "benchmark.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(
        "def score(prompt, response, answer, meta):\n"
        "    assert meta['solution'] == answer\n"
        "    return len(set(response)) / 8\n"
    )
    page = PAGES["engineers.md"]
    (tmp_path / "run.yaml").write_text(next(text for name, text in YAML if name == "engineers.md"))
    assert "run.yaml" in page
    write_plan(tmp_path / "plan.json", runs.plan("hybrid", "grpo", model))
    return tmp_path


def rlhfsim(line: str, *, rc: tuple[int, ...] = (0,)) -> str:
    """What a line of a page prints."""
    path = os.pathsep.join([str(DOCS.parent), os.getcwd()])
    ended = subprocess.run(
        [sys.executable, "-m", *shlex.split(line)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode in rc, f"{line}\n{ended.stdout[-1000:]}{ended.stderr[-3000:]}"
    return " ".join(ended.stdout.split())


@pytest.mark.slow
@pytest.mark.long
def test_the_first_example_runs_and_so_does_what_the_page_does_with_it(place: Path, ray_address: str) -> None:
    small = " --set iterations=2 --set evaluation.problems=4"
    page = [line for name, line in COMMAND_LINES if name == "engineers.md"]
    [start] = [line for line in page if "--settings run.yaml" in line]
    start = start.replace("--address auto", f"--address {ray_address}")
    [dry] = [line for line in page if "--dry-run --address auto" in line]
    rlhfsim(dry.replace("--address auto", f"--address {ray_address}"))
    assert "on 4 held-out problems" in rlhfsim(start + small)
    rows = [json.loads(line) for line in (place / "runs/a/metrics.jsonl").open()]
    assert {"reward/function", "reward/format"} <= set(rows[0])
    assert "has done its 2 iterations" in rlhfsim(start + small), "the line is idempotent"
    rlhfsim((start + small).replace("runs/a", "runs/b") + " --set seed=1")
    defended = page[page.index("rlhfsim compare runs/a") :]
    for line in defended:
        if "--recalibrate-every" not in line:  # a run of 50 iterations; tests/executor/test_runs.py has it
            rlhfsim(line, rc=(0, 1) if "--profile ours.yaml" in line else (0,))
    assert (place / "run.html").stat().st_size > 10_000
    address = f" --address {ray_address}"
    for line in (
        "launch --resume runs/a --iterations 3",
        "launch --resume runs/a --set seed=5 --change settings",
    ):
        rlhfsim(f"rlhfsim {line}{address}")
    assert len((place / "runs/a/metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
@pytest.mark.long
def test_the_planners_lines_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = [line for name, line in COMMAND_LINES if name == "engineers.md"]
    for line in page:
        if line.split()[1] in ("design", "memory", "estimate") and "ours.yaml" not in line:
            rlhfsim(line.partition(" > ")[0])
    rlhfsim("rlhfsim launch plan.json --dry-run --assume-cluster 2x8xh100")


@pytest.mark.slow
@pytest.mark.long
def test_the_executors_lines_run(place: Path, ray_address: str) -> None:
    """Those that engineers.md does not have: its launches are above, with `FOLDER` and a plan of two ranks."""
    page = [line for name, line in COMMAND_LINES if name == "executor.md"]
    local = [line for line in page if line.split()[1] in ("check-machine", "demo", "sync")]
    dry = [line for line in page if line.endswith("--dry-run")]
    known = [line for line in page if "--scale" in line]
    assert (len(local), len(dry), len(known)) == (3, 1, 1)
    for line in local:
        rlhfsim(line, rc=(0, 1) if "check-machine" in line else (0,))
    rlhfsim(f"{dry[0]} --address {ray_address}")
    shrunk = rlhfsim(f"{known[0]} --iterations 1 --out runs/shrunk --address {ray_address}")
    assert "sizes shrink to this machine" in shrunk


@pytest.mark.slow
@pytest.mark.long
def test_the_lines_of_the_environments_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    design, launch = [line for name, line in COMMAND_LINES if name == "environments.md"]
    rlhfsim(design.replace(" ... ", " --gpus 16 --gpu h100 --model 8b --algorithm grpo --time-limit 10s "))
    rlhfsim(f"{launch} --dry-run --assume-cluster 2x8xh100")
