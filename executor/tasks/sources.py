"""The source that a run's settings ask for, and the check that its prompts fit the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from executor.settings import Data
from executor.tasks.files import FileSource
from executor.tasks.prompts import Generated, Preference, Problem, Source
from executor.tasks.text import Prompt
from rlhfsim.errors import RlhfsimError

_PREFERENCES: Mapping[str, Preference] = {"dpo": "pairs", "kto": "labels"}


def open_source(data: Data, algorithm: str, seed: int) -> Source:
    """Where problems come from, with what the algorithm needs of each.

    Raises:
        RlhfsimError: task `file` without a path, or a file that cannot be used.
    """
    preference = _PREFERENCES.get(algorithm, "none")
    if data.task != "file":
        return Generated(task=data.task, difficulty=data.difficulty, seed=seed, preference=preference)
    if not data.path:
        raise RlhfsimError("data-missing", "task 'file' needs data.path", help="name a JSONL or Parquet file")
    return FileSource(data, seed=seed, preference=preference)


def check_lengths(problems: Sequence[Problem], count_tokens: Callable[[Prompt], int], *, most: int) -> None:
    """Refuse a prompt of more than `most` tokens: cutting it would ask something else.

    Raises:
        RlhfsimError: names the first such prompt and its length.
    """
    for problem in problems:
        if (length := count_tokens(problem.prompt)) > most:
            raise RlhfsimError(
                "prompt-too-long",
                f"a prompt of {length} tokens, {most} at most: {str(problem.prompt)[:60]!r}",
                help="raise the plan's prompt length, or drop such rows from the data",
            )
