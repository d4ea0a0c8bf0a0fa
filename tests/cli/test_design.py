"""`rlhfsim design` as a user runs it: text, JSON, exit codes, the written plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlhfsim.cli import main as entry
from rlhfsim.cli.design import design
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import read_plan

SMALL = [
    "--gpus",
    "8",
    "--model",
    "qwen3-4b",
    "--algorithm",
    "grpo",
    "--prompts",
    "64",
    "--samples",
    "4",
]


def run(*arguments: str, out: Path) -> Result:
    return CliRunner().invoke(design, [*arguments, "--out", str(out)])


def test_the_answer_is_ranked_explained_and_no_wider_than_100_columns(tmp_path: Path) -> None:
    result = run(*SMALL, out=tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 100
    for word in (
        "considered",
        "the chosen plan",
        "why",
        "what would flip the choice",
        "left out",
        "how sure",
        "next",
    ):
        assert word in result.output


def test_json_has_the_promised_keys_and_matches_the_written_plan(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = run(*SMALL, "--json", out=out)
    answer = json.loads(result.output)
    assert answer["schema"] == "rlhfsim.design/1"
    assert {"chosen", "runners_up", "considered"} <= set(answer)
    wanted = {
        "architecture",
        "role_placement",
        "step_s",
        "tokens_per_s_per_gpu",
        "peak_memory_bytes",
        "usd_per_step",
        "phases",
        "placement",
    }
    for plan in (answer["chosen"], *answer["runners_up"]):
        assert wanted <= set(plan)
    assert isinstance(answer["considered"]["plans"], int)
    written = read_plan(out)
    assert written.prediction.step_s == pytest.approx(answer["chosen"]["step_s"])
    assert written.architecture == answer["chosen"]["architecture"]


def test_a_cluster_on_which_nothing_fits_exits_with_1_and_names_a_change(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = run("--gpus", "8", "--model", "70b", "--prompts", "64", out=out)
    assert result.exit_code == 1
    assert "smallest change that fits" in result.output
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "h101"), "h101"),
        (("--model", "llama-9-70b"), "llama-9-70b"),
        (("--gpus", "0"), "0"),
        (("--gpus", "-8"), "-8"),
        (("--prompts", "0"), "prompts"),
        (("--response-len", "nan"), "response"),
        (("--response-len", "-3"), "response"),
        (("--response-len", "lognormal:mean=10,sgma=1,max=20"), "sgma"),
        (("--fix", "actor.tp"), "actor.tp"),
        (("--fix", "actor.tpp=8"), "tpp"),
        (("--fix", "actor.tp=0"), "actor tp: 0"),
        (("--allow", "asinc"), "asinc"),
        (("--forbid", "everything"), "everything"),
        (("--max-oom", "2"), "max-oom"),
        (("--mini-batches", "7"), "7 mini-batches"),
        (("--gpu", "rtx-4090", "--objective", "cost"), "--price"),
    ],
)
def test_bad_input_is_one_clear_error_and_writes_nothing(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "plan.json"
    monkeypatch.setattr("sys.argv", ["rlhfsim", "design", *SMALL, *arguments, "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    told = capsys.readouterr().err
    assert stopped.value.code == 2
    assert told.startswith("error[") or "Error:" in told
    assert said in told
    assert "Traceback" not in told
    assert not out.exists()


def test_an_unwritable_place_is_an_error_of_the_user(tmp_path: Path) -> None:
    result = run(*SMALL, out=tmp_path / "no" / "plan.json")
    assert isinstance(result.exception, RlhfsimError)
    assert "cannot write" in str(result.exception)


def test_help_lists_every_command_without_importing_numpy() -> None:
    result = CliRunner().invoke(entry.cli, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in entry.COMMANDS)
