"""A script or a log that is pasted on the page: judged as data, bounded, never run."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from rlhfsim.desk.files import MAX_CHARACTERS, decoded
from rlhfsim.desk.pasted import PastedAnswer, answered, judge
from rlhfsim.errors import RlhfsimError
from tests.frameworks.test_importers import verl_console
from tests.frameworks.test_log_alone import log

SCRIPT = r"""python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
  data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=512 \
  actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.rollout.n=4 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 trainer.n_gpus_per_node=2 trainer.nnodes=1
"""


def test_a_script_is_answered_by_the_doctor() -> None:
    answer = judge(SCRIPT, "h100", "", files=True)
    assert (answer.title, answer.good) == ("A configuration of verl", True)
    assert answer.text.startswith("fits: ")
    assert "actor_rollout_ref." in answer.text


def test_a_log_is_answered_by_the_watch(tmp_path: Path) -> None:
    text = log(tmp_path, head="GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)").read_text()
    answer = judge(text, "", "job.log", files=False)
    assert answer.title == "A log of verl: step 3"
    assert "by the doctor on its configuration" in answer.text
    rows = "".join(
        json.dumps({"step": i, "step_time": 9.0, "completions/mean_length": 9.0}) + "\n" for i in range(6)
    )
    assert judge(rows, "", "", files=False).title == "A log of TRL: step 5"


def test_nothing_of_what_is_pasted_runs(tmp_path: Path) -> None:
    made = tmp_path / "made"
    spoiled = f"touch {made}\nN=$(touch {made})\n{SCRIPT}; touch {made} && `touch {made}`\n"
    judge(spoiled, "h100", "", files=True)
    assert not made.exists()


@pytest.mark.parametrize(
    ("text", "gpu", "said"),
    [
        ("x" * (MAX_CHARACTERS + 1), "h100", "longer than 2 MiB"),
        ("  \n", "h100", "nothing to judge"),
        (SCRIPT, "", "nothing says what it is to run on"),
        ("hello\n", "h100", "no framework's marks"),
        (SCRIPT, "h9000", "h9000"),
    ],
)
def test_what_cannot_be_judged_is_said_in_one_sentence(text: str, gpu: str, said: str) -> None:
    (shown,) = answered(lambda: judge(text, gpu, "", files=True))
    assert said in shown.children
    assert shown.className == "status bad"


def test_a_model_of_this_machine_is_named_only_from_this_machine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    named = SCRIPT.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tmp_path))
    with pytest.raises(RlhfsimError, match="names a folder of this machine"):
        judge(named, "h100", "", files=False)
    with pytest.raises(RlhfsimError) as error:
        judge(named, "h100", "", files=True)
    assert error.value.code != "names-a-file"


def test_a_dropped_file_is_text_or_refused() -> None:
    text = verl_console(3)
    assert decoded("data:text/plain;base64," + base64.b64encode(text.encode()).decode()) == text
    for spoiled in ("data:x;base64,!!", "data:x;base64," + base64.b64encode(b"\xff\xfe").decode(), ""):
        if spoiled:
            with pytest.raises(RlhfsimError, match="no UTF-8 text"):
                decoded(spoiled)


def test_an_answer_has_its_verdict_above_its_text() -> None:
    first, second = answered(lambda: PastedAnswer(title="A log of verl: step 3", good=True, text="step 9 s"))
    assert (first.children, first.className) == ("A log of verl: step 3.", "status good")
    assert "step 9 s" in json.dumps(second.to_plotly_json(), default=lambda c: c.to_plotly_json())
