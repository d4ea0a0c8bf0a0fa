"""Users' configurations in the keys of their framework, judged as `rlhfsim doctor` judges them."""

from __future__ import annotations

import hashlib
import shlex

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.configuration import configuration_named, configuration_names
from rlhfsim.interchange.configuration.settings import NAMED_MODEL, FrameworkSettings, scalar
from rlhfsim.memory.ledger import Ledger
from rlhfsim.validation.outcome import Skip
from rlhfsim.validation.rows import Row
from rlhfsim.what_if.doctor.case import Case, judged

FITTED, HELD_OUT = "fitted", "held out"


def half(row: Row) -> str:
    """Whether rules may be mended on a row; of those in a framework's keys half, by a hash of the source."""
    if row.text("settings") is None:
        return FITTED  # seen while the rules were written
    digest = hashlib.sha256(row.words("source").encode()).digest()
    return HELD_OUT if digest[0] % 2 else FITTED


def ledger_of(row: Row) -> Ledger:
    """The ledger of a row whose `settings` are words `key=value`.

    Raises:
        Skip: the doctor refuses the configuration.
    """
    names = {configuration_named(name).title: name for name in configuration_names()}
    configuration = configuration_named(names[row.framework])
    words = (word.partition("=") for word in shlex.split(row.words("settings")))
    values = {key: scalar(value) for key, _, value in words}
    named = {NAMED_MODEL: row.text("model"), configuration.version_key: row.text("version")}
    values |= {key: value for key, value in named.items() if value is not None}
    settings = FrameworkSettings(values, f"{row.file}, line {row.line}")
    case = Case(configuration=configuration, settings=settings, gpu=row.words("gpu_type"))
    try:
        return judged(case.under({}), None).memory
    except RlhfsimError as error:
        raise Skip(f"the doctor refuses it: {error.message}") from error
