"""Problems from a data set of the user: what it is for decides which columns a row needs (columns.py).

none      prompt, answer                    rule rewards
pairs     prompt, chosen, rejected          DPO, reward models
labels    prompt, answer (the response), label    KTO
responses prompt, answer (the response)     SFT
`Problem.meta` has every column of the row (tests of a code problem, ...). Every row is looked at before a
run; one that cannot be used ends it or is left out (`data.on_bad_row`). One different prompt in ten is held
out where there are enough, or the share `data.held_out`, chosen by hash: no epoch contains it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from datetime import date, timedelta
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from executor.settings import Answers, Data, Say
from executor.tasks.columns import columns_of
from executor.tasks.formats import open_rows
from executor.tasks.prompts import Preference, Problem
from executor.tasks.rows import BadRow, Row, Rows
from executor.tasks.text import Prompt
from rlhfsim.errors import Place, RlhfsimError

HELD_OUT_SHARE = 0.1
CHUNK = 1_000
"""Rows that are looked at together."""
TOLD_S = 5.0
"""Between two words on how far it is."""
SHOWN = 3
"""Reasons that are named where rows are dropped."""


class FileSource:
    """Problems of a data set, shuffled anew every epoch by the run's seed."""

    def __init__(
        self,
        data: Data,
        *,
        seed: int = 0,
        preference: Preference = "none",
        answers: Answers = "required",
        say: Say = lambda text: None,
    ) -> None:
        """Look at every row. `answers`: of rule rewards; `say` hears of guesses and dropped rows.

        Raises:
            RlhfsimError: no such data, no rows, a missing column, or a bad row, each with its place.
        """
        self._data, self._seed = data, seed
        self._rows = open_rows(data)
        self._columns = columns_of(data, preference, self._first(), answers=answers, say=say)
        self._digest = hashlib.blake2b(digest_size=16)
        self._usable, hashes = self._looked_at(say)
        share, prompts = HELD_OUT_SHARE if data.held_out is None else data.held_out, np.unique(hashes)
        out = np.isin(hashes, prompts[: int(len(prompts) * share + 1e-9)])  # equal prompts fall on one side
        self._training, self._held_out = np.flatnonzero(~out), np.flatnonzero(out)
        self._orders: dict[int, NDArray[np.int64]] = {}

    def _first(self) -> Row:
        """The first row that is one."""
        bad: BadRow | None = None
        for row in self._rows.read(0, CHUNK):
            if not isinstance(row, BadRow):
                return row
            if self._data.on_bad_row == "stop":
                raise _refused(row, self._rows, 0)
            bad = bad or row
        assert bad is not None, "there are rows"
        raise _refused(bad, self._rows, 0)

    def _looked_at(self, say: Say) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """(usable rows,) their numbers and hashes of their prompts."""
        usable: list[int] = []
        hashes: list[int] = []
        reasons: Counter[str] = Counter()
        first, told = -1, time.monotonic()
        starts = range(0, len(self._rows), CHUNK)
        rows = itertools.chain.from_iterable(self._rows.read(start, start + CHUNK) for start in starts)
        for number, row in enumerate(rows):
            try:
                if isinstance(row, BadRow):
                    raise row
                problem = self._columns.problem(row)
                self._digest.update(_PLAIN.encode(row).encode())
                usable.append(number)
                hashes.append(_hash(problem.prompt))
            except BadRow as error:
                if self._data.on_bad_row == "stop":
                    raise _refused(error, self._rows, number) from None
                first = number if not reasons else first
                reasons[str(error)] += 1
            if number % CHUNK == 0 and time.monotonic() - told > TOLD_S:
                told = time.monotonic()
                say(f"reading the data: {100 * number // len(self._rows)} %")
        if reasons:
            text = "; ".join(f"{n:,} {why}" for why, n in reasons.most_common(SHOWN))
            say(
                f"data: {reasons.total():,} of {len(self._rows):,} rows are dropped, "
                f"the first at {self._rows.place(first)}: {text}"
            )
        if not usable:
            raise _refused(BadRow(reasons.most_common(1)[0][0]), self._rows, first)
        return np.array(usable, np.int64), np.array(hashes, np.uint64)

    def __len__(self) -> int:
        """Rows that can be used."""
        return len(self._usable)

    @property
    def size(self) -> int:
        """Rows to train on."""
        return len(self._training)

    def prompts(self, start: int, end: int) -> list[Prompt]:
        """Prompts of usable rows `start` to `end - 1`, in the order of the data."""
        return [self._problem(row).prompt for row in range(start, min(end, len(self)))]

    def place(self, row: int) -> Place:
        """Where a usable row is stored."""
        return self._rows.place(int(self._usable[row]))

    def identity(self) -> tuple[object, ...]:
        """Another one where rows or columns are others."""
        used = sorted(self._columns.used.items())
        return (*self._rows.identity(), *used, self._data.chat_template, len(self))

    @property
    def content(self) -> str:
        """Hash of all usable rows."""
        return self._digest.hexdigest()

    def shares(self) -> str:
        """How many rows are for training and how many for evaluation, in words."""
        held, training = len(self._held_out), len(self._training)
        return f"{training:,} rows to train on, {held:,} held out (data.held_out)"

    def drop(self, rows: Sequence[int]) -> None:
        """Use these neither for training nor for evaluation.

        Raises:
            RlhfsimError: nothing is left.
        """
        self._training, self._held_out = (
            part[~np.isin(part, rows)] for part in (self._training, self._held_out)
        )
        self._orders = {}
        if not len(self._training) and (not len(self._held_out) or self._data.held_out != 1.0):
            raise RlhfsimError(
                "data-empty",
                f"after {len(rows):,} rows are dropped, none is left to train on",
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
        return [self._problem(int(row)) for row in self._held_out[:count]]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Rows in the order of an epoch; those of the last two asked for are kept."""
        if epoch not in self._orders:
            rng = np.random.default_rng([self._seed, epoch])
            order = rng.permutation(self._training) if self._data.shuffle else self._training
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return self._orders[epoch]

    def _problem(self, usable: int) -> Problem:
        number = int(self._usable[usable])
        [row] = self._rows.read(number, number + 1)
        if isinstance(row, BadRow):  # changed under the run
            raise _refused(row, self._rows, number)
        return self._columns.problem(row)


def _stable(value: object) -> str:
    """A value that JSON does not know, the same in every process."""
    return str(value) if isinstance(value, bytes | date | timedelta | Decimal) else type(value).__name__


_PLAIN = json.JSONEncoder(default=_stable)


def _hash(prompt: Prompt) -> int:
    """Eight bytes of it."""
    text = prompt if isinstance(prompt, str) else str(list(prompt))
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def _refused(bad: BadRow, rows: Rows, number: int) -> RlhfsimError:
    """The error of a row that ends the run."""
    return RlhfsimError(
        bad.code,
        str(bad),
        place=rows.place(number),
        help='a row is one object, like {"prompt": "1+1=", "answer": "2"}; data.on_bad_row: drop leaves out '
        "rows that cannot be used, and counts them",
    )
