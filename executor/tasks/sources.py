"""The source of problems that a run's settings ask for."""

from __future__ import annotations

from collections.abc import Mapping

from executor.settings import Answers, Data, Say
from executor.tasks.files import FileSource
from executor.tasks.prompts import HELD_OUT_SHARE, LEAST_SHARE, Generated, Preference, ProblemSource
from rlhfsim.errors import RlhfsimError

_PREFERENCES: Mapping[str, Preference] = {
    "dpo": "pairs",
    "reward_model": "pairs",
    "kto": "labels",
    "sft": "responses",
}


def open_source(
    data: Data,
    algorithm: str,
    seed: int,
    *,
    answers: Answers = "required",
    training: bool = True,
    say: Say = lambda text: None,
) -> ProblemSource:
    """Where problems come from, with what the algorithm needs of each. `answers`, `say`: see `FileSource`.

    `training`: some of them are to be trained on.

    Raises:
        RlhfsimError: task `file` without a path, or a file that cannot be used.
    """
    preference = _PREFERENCES.get(algorithm, "none")
    if data.task not in (None, "file") and data.path:
        raise RlhfsimError(
            "data-unused",
            f"data.path is given, but task {data.task!r} is generated",
            help="leave data.task out, or set it to file",
        )
    if data.task != "file" and not data.path:
        task = data.task or "arithmetic"
        share = HELD_OUT_SHARE if data.held_out is None else data.held_out
        if share >= 1:
            raise RlhfsimError(
                "nothing-to-train-on",
                "data.held_out: 1 leaves no problem to train on",
                help="hold out a smaller share",
            )
        if 0 < share < LEAST_SHARE or share > 1 - LEAST_SHARE:
            raise RlhfsimError(
                "few-problems",
                f"data.held_out: {share:g} of generated problems leaves next to none on one side",
                help=f"hold out {LEAST_SHARE:g} to {1 - LEAST_SHARE:g} of them, or 0",
            )
        return Generated(task=task, difficulty=data.difficulty, seed=seed, preference=preference, share=share)
    if not data.path:
        raise RlhfsimError("data-missing", "task 'file' needs data.path", help="name a file or folder")
    if training and data.held_out == 1.0:
        raise RlhfsimError(
            "nothing-to-train-on",
            f"data.held_out: {data.held_out:g} leaves no row to train on",
            help="hold out a smaller share",
        )
    return FileSource(data, seed=seed, preference=preference, answers=answers, say=say)
