"""The source of problems that a run's settings ask for."""

from __future__ import annotations

from collections.abc import Mapping

from executor.settings import Data
from executor.tasks.files import FileSource
from executor.tasks.prompts import Generated, Preference, ProblemSource
from rlhfsim.errors import RlhfsimError

_PREFERENCES: Mapping[str, Preference] = {
    "dpo": "pairs",
    "reward_model": "pairs",
    "kto": "labels",
    "sft": "responses",
}


def open_source(data: Data, algorithm: str, seed: int) -> ProblemSource:
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
