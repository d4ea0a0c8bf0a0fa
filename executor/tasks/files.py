"""Problems from a JSONL or Parquet file, read through the `datasets` library.

Columns are named by `executor.settings.Data`. Which ones a file needs depends on what it is for:
none      prompt, answer                    rule rewards
pairs     prompt, chosen, rejected          DPO, reward models
labels    prompt, answer (the response), label    KTO
responses prompt, answer (the response)     SFT
All other columns go to `Problem.meta` (tests of a code problem, ...). A text column may also hold numbers.
One different prompt in ten is held out where there are ten or more, chosen by hash: no epoch contains it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from executor.settings import Data
from executor.tasks.prompts import Preference, Problem
from executor.tasks.text import Prompt
from rlhfsim.errors import Place, RlhfsimError

_HELD_OUT_SHARE = 10
_JSON_ENDINGS, _PARQUET_ENDINGS = (".jsonl", ".json", ".ndjson"), (".parquet", ".pq")
_NEEDED: Mapping[Preference, tuple[str, ...]] = {
    "none": ("answer_column",),
    "pairs": ("chosen_column", "rejected_column"),
    "labels": ("answer_column", "label_column"),
    "responses": ("answer_column",),
}
"""Settings that name a needed column, beside the prompt's."""


class FileSource:
    """Problems of a file, shuffled anew every epoch by the run's seed."""

    def __init__(self, data: Data, *, seed: int = 0, preference: Preference = "none") -> None:
        """Read and check the whole file.

        Raises:
            RlhfsimError: missing or empty file, malformed line, missing column or value, each with its place.
        """
        assert data.path, "checked by `open_source`"
        self._data, self._seed, self._preference = data, seed, preference
        self._rows = _read(Path(data.path))
        columns = {getattr(data, setting): setting for setting in ("prompt_column", *_NEEDED[preference])}
        _check(self._rows, columns, data.path, chat=data.chat_template)
        self._training, self._held_out = _split(self._rows[data.prompt_column])
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Rows of the file."""
        return len(self._rows)

    def prompts(self, start: int, end: int) -> list[Prompt]:
        """Of rows `start` to `end - 1`, in the order of the file."""
        return [_prompt(value) for value in self._rows[start:end][self._data.prompt_column]]

    def place(self, row: int) -> Place:
        """Where a row stands."""
        assert self._data.path
        return _place(Path(self._data.path), row)

    def drop(self, rows: Sequence[int]) -> None:
        """Use these neither for training nor for evaluation.

        Raises:
            RlhfsimError: nothing is left to train on.
        """
        unwanted = set(rows)
        self._training = [row for row in self._training if row not in unwanted]
        self._held_out = [row for row in self._held_out if row not in unwanted]
        self._orders = {}
        if not self._training:
            raise RlhfsimError(
                "data-empty",
                f"after {len(unwanted):,} rows are dropped, none is left to train on",
                help="raise data.max_prompt_tokens, or set data.on_long: truncate",
            )

    def batch(self, position: int, count: int) -> list[Problem]:
        """Problems from data position `position` on, across epochs as needed."""
        assert position >= 0, "a data position counts problems from 0"
        problems = []
        for place in range(position, position + count):
            epoch, offset = divmod(place, len(self._training))
            problems.append(self._problem(int(self._order(epoch)[offset])))
        return problems

    def held_out(self, count: int) -> list[Problem]:
        """The first `count` rows with a held-out prompt; none in a file of under ten different prompts."""
        return [self._problem(row) for row in self._held_out[:count]]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Rows in the order of an epoch; those of the last two asked for are kept."""
        if epoch not in self._orders:
            rows = np.array(self._training)
            rng = np.random.default_rng([self._seed, epoch])
            order = rng.permutation(rows) if self._data.shuffle else rows
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return self._orders[epoch]

    def _problem(self, row: int) -> Problem:
        data, values = self._data, dict(self._rows[row])
        prompt = _prompt(values.pop(data.prompt_column))
        answer = values.pop(data.answer_column, None)
        match self._preference:
            case "pairs":
                values["chosen"] = str(values.pop(data.chosen_column))
                values["rejected"] = str(values.pop(data.rejected_column))
            case "labels":
                values["response"] = str(answer)
                values["label"] = 1.0 if float(values.pop(data.label_column)) > 0 else -1.0
            case "responses":
                values["response"] = str(answer)
            case "none":
                pass
        return Problem(prompt=prompt, answer="" if answer is None else str(answer), meta=values)


def _prompt(value: Any) -> Prompt:
    """Text, or a conversation without the fields that other turns have."""
    if not isinstance(value, list):
        return str(value)
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in value)


def _split(prompts: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Rows to train on and rows held out; equal prompts fall on one side."""
    texts = [str(prompt) for prompt in prompts]
    ranked = sorted(set(texts), key=lambda text: hashlib.blake2b(text.encode()).digest())
    kept_out = set(ranked[: len(ranked) // _HELD_OUT_SHARE])
    training = [row for row, text in enumerate(texts) if text not in kept_out]
    return training, [row for row, text in enumerate(texts) if text in kept_out]


def _read(path: Path) -> Any:
    """The rows as a `datasets.Dataset` in memory."""
    if not path.is_file():
        raise RlhfsimError(
            "data-missing",
            f"{path} is not a file",
            place=Place(file=str(path)),
            help="data.path names a JSONL or Parquet file on the machine that runs the driver",
        )
    if path.stat().st_size == 0:
        raise _empty(path)
    ending = path.suffix.lower()
    if ending not in _JSON_ENDINGS + _PARQUET_ENDINGS:
        raise RlhfsimError(
            "data-format",
            f"{path.name} is neither JSONL nor Parquet",
            place=Place(file=str(path)),
            help=f"known endings: {', '.join(_JSON_ENDINGS + _PARQUET_ENDINGS)}",
        )
    if ending in _JSON_ENDINGS:
        _check_lines(path)
    rows = _load(path, parquet=ending in _PARQUET_ENDINGS)
    if len(rows) == 0:
        raise _empty(path)
    return rows


def _load(path: Path, *, parquet: bool) -> Any:
    import datasets

    library = cast(Any, datasets)
    read = library.Dataset.from_parquet if parquet else library.Dataset.from_json
    was_enabled = library.is_progress_bar_enabled()
    library.disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory() as cache:  # a cache that outlives the run could be stale
            return read(str(path), cache_dir=cache, keep_in_memory=True)
    except (library.exceptions.DatasetsError, ValueError, OSError) as error:
        raise RlhfsimError(
            "data-format",
            f"cannot be read as {'Parquet' if parquet else 'JSONL'}: {error.__cause__ or error}",
            place=Place(file=str(path)),
        ) from None
    finally:
        if was_enabled:
            library.enable_progress_bars()


def _check_lines(path: Path) -> None:
    """Name the first line that is not a JSON object: the library's own message counts from its last block."""
    is_empty = True
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                is_empty = is_empty and not line.strip()
                if line.strip() and (reason := _malformed(line)):
                    raise RlhfsimError(
                        "data-line",
                        reason,
                        place=Place(file=str(path), line=number, text=line),
                        help='write one object per line, like {"prompt": "1+1=", "answer": "2"}',
                    )
    except UnicodeDecodeError as error:
        raise RlhfsimError("data-encoding", f"is not UTF-8: {error}", place=Place(file=str(path))) from None
    if is_empty:
        raise _empty(path)


def _malformed(line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        return f"not a JSON object: {error}"
    return "" if isinstance(value, dict) else f"a JSON {type(value).__name__}, not an object"


def _check(rows: Any, columns: dict[str, str], path: str, *, chat: bool) -> None:
    """All needed columns are there and have a value in every row."""
    for column, setting in columns.items():
        if column not in rows.column_names:
            raise RlhfsimError(
                "data-column",
                f"no column {column!r}",
                place=Place(file=path),
                help=f"columns: {', '.join(rows.column_names)}; name the right one with data.{setting}",
            )
        for row, value in enumerate(rows[column]):
            reason = _unusable(value, column, setting, chat=chat)
            if reason:
                raise RlhfsimError("data-value", reason, place=_place(Path(path), row))


def _unusable(value: Any, column: str, setting: str, *, chat: bool) -> str:
    """What is wrong with a value; empty for nothing."""
    label = setting == "label_column"
    if value is None:
        return f"column {column!r} has no value here"
    if setting == "prompt_column" and isinstance(value, list):
        return _bad_turns(value, column, chat=chat)
    if not isinstance(value, (bool, int, float) if label else (str, int, float)):
        return f"column {column!r} must be {'a number, or true or false' if label else 'text'}"
    if setting == "prompt_column" and not str(value).strip():
        return "an empty prompt"
    return ""


def _bad_turns(value: list[Any], column: str, *, chat: bool) -> str:
    """What is wrong with a conversation; empty for nothing."""
    if not chat:
        return f"column {column!r} holds a conversation, which needs data.chat_template: true"
    whole = all(
        isinstance(t, dict) and isinstance(t.get("role"), str) and isinstance(t.get("content"), str)
        for t in value
    )
    return "" if value and whole else f"column {column!r} must be text or turns of role and content"


def _place(path: Path, row: int) -> Place:
    """Line of a JSONL row (blank lines are no rows); row of a Parquet file, from 1."""
    if path.suffix.lower() in _PARQUET_ENDINGS:
        return Place(file=f"{path} (row {row + 1})")
    with path.open(encoding="utf-8") as lines:
        filled = ((number, text) for number, text in enumerate(lines, 1) if text.strip())
        number, text = next(itertools.islice(filled, row, None), (None, None))
    return Place(file=str(path), line=number, text=text)


def _empty(path: Path) -> RlhfsimError:
    return RlhfsimError("data-empty", "the file has no rows", place=Place(file=str(path)))
