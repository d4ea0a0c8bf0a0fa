"""Users' configurations in the keys of their framework, judged as `rlhfsim doctor` judges them."""

from __future__ import annotations

import hashlib
import shlex

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.configuration.configuration import configuration_named, configuration_names
from rlhfsim.frameworks.configuration.settings import NAMED_MODEL, FrameworkSettings, scalar
from rlhfsim.memory.ledger import Ledger
from rlhfsim.validation.outcome import Skip
from rlhfsim.validation.rows import Row
from rlhfsim.what_if.doctor.case import Case, judged

FITTED, HELD_OUT = "fitted", "held out"
GSM8K_TOKENS = 100.0, 250.0
"""Means of prompts and responses that verl's logs of GSM8K print (scenarios/recipes), on which its tuning
scripts train (`data.train_files` at 603c07d99), but for one of 72B on H20, which leaves its data open."""


def gsm8k(row: Row) -> bool:
    """Whether a row is a script that trains on GSM8K, far below its limits."""
    source = row.text("source") or ""
    return "examples/tuning/" in source and "scaling/" not in source and "32_h20" not in source


def half(row: Row) -> str:
    """Whether rules may be mended on a row; of those in a framework's keys half, by a hash of the source."""
    if row.text("settings") is None:
        return FITTED  # seen while the rules were written
    digest = hashlib.sha256((row.text("source") or "").encode()).digest()
    return HELD_OUT if digest[0] % 2 else FITTED


def ledger_of(row: Row) -> Ledger:
    """The ledger of a row whose `settings` are words `key=value`.

    Raises:
        Skip: the doctor refuses the configuration.
    """
    names = {configuration_named(name).title: name for name in configuration_names()}
    configuration = configuration_named(names[row.text("framework") or ""])
    words = (word.partition("=") for word in shlex.split(row.text("settings") or ""))
    values = {key: scalar(value) for key, _, value in words}
    named = {NAMED_MODEL: row.text("model"), configuration.version_key: row.text("version")}
    values |= {key: value for key, value in named.items() if value is not None}
    settings = FrameworkSettings(values, f"{row.file}, line {row.line}")
    prompt, response = GSM8K_TOKENS if gsm8k(row) else (None, None)
    case = Case(
        configuration=configuration,
        settings=settings,
        gpu=row.text("gpu_type") or "",
        prompt_tokens=prompt,
        response_tokens=response,
    )
    try:
        return judged(case.under({}), None).memory
    except RlhfsimError as error:
        raise Skip(f"the doctor refuses it: {error.message}") from error
