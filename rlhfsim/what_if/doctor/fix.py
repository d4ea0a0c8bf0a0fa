"""The script or configuration of a doctor's case with the advised keys in place, read and judged again."""

from __future__ import annotations

from dataclasses import replace
from difflib import unified_diff
from pathlib import Path

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.interchange.configuration.edited import edited_script, edited_yaml
from rlhfsim.interchange.configuration.forms import of_changed
from rlhfsim.interchange.configuration.recognise import settings_of
from rlhfsim.specs.loading import read_text
from rlhfsim.what_if.doctor.case import Judged, judged
from rlhfsim.what_if.doctor.diagnosis import Diagnosis, KeyChange

SCRIPTS, YAMLS = (".sh", ".slurm"), (".yaml", ".yml")
ELSEWHERE = ("deepspeed_config.", "fsdp_config.", "distributed_type", "num_processes", "num_machines")
"""Keys of accelerate, which no command of TRL takes."""
ALIKE = 0.01
"""Difference of the step, as a share, from which the new file does not say what was advised."""


@frozen
class ChangedFile:
    """A changed file, not yet written."""

    path: Path
    """Where it goes: `run.new.sh` next to `run.sh`."""
    text: str
    diff: str
    change: KeyChange
    judged: Judged
    """Judgement of the new text, read again."""


def advised(answer: Diagnosis) -> KeyChange | None:
    """All changes that the doctor names at once: the first that makes it fit, and those that are faster."""
    if answer.faster:
        return answer.faster[-1]
    return answer.fixes[0] if answer.fixes else None


def changed_path(path: Path) -> Path:
    """Where the changed file goes."""
    return path.with_name(f"{path.stem}.new{path.suffix}")


def fixed(answer: Diagnosis, path: Path) -> ChangedFile:
    """The file with the advised keys, judged again from its text.

    Raises:
        RlhfsimError: there is nothing to change, it is no script and no YAML file, or the new text does not
            say what was advised.
    """
    change, text = advised(answer), read_text(path)
    if change is None:
        raise _unfixed("nothing-to-fix", "no change of its keys is advised", path, "run it as it is")
    _check_its_own(change, text, path)
    if path.suffix in YAMLS:
        new = edited_yaml(text, change.keys)
    elif path.suffix in SCRIPTS:
        new = edited_script(text, change.keys, answer.case.configuration.entries)
    else:
        help = f"name one file: {', '.join((*SCRIPTS, *YAMLS))}"
        raise _unfixed("fix-needs-a-file", "only a script or a YAML file is changed", path, help)
    again = _judged_again(answer, text, new, path)
    before = change.judged
    if again.fits != before.fits or abs(again.step_s / before.step_s - 1) > ALIKE:
        keys = " ".join(f"{key}={value}" for key, value in change.keys.items())
        raise _unfixed(
            "fix-not-read-back", "the changed file does not say what is advised", path, f"set {keys}"
        )
    target = changed_path(path)
    lines = text.splitlines(), new.splitlines()
    diff = "\n".join(unified_diff(*lines, path.name, target.name, lineterm=""))
    return ChangedFile(path=target, text=new, diff=diff, change=change, judged=again)


def _check_its_own(change: KeyChange, text: str, path: Path) -> None:
    absent = tuple(key for key in ELSEWHERE if key.rstrip(".") not in text)
    elsewhere = [f"{key}: {value}" for key, value in change.keys.items() if key.startswith(absent)]
    if elsewhere:
        what = f"{len(elsewhere)} of the advised keys lie in accelerate's file"
        raise _unfixed("fix-in-another-file", what, path, f"set there {', '.join(elsewhere)}")


def _judged_again(answer: Diagnosis, old: str, new: str, path: Path) -> Judged:
    """The new text in place of the old one, with what was said in addition to it."""
    case = answer.case
    before, after = (settings_of(case.configuration, of_changed(text, path), {}) for text in (old, new))
    besides = {key: value for key, value in case.settings.values.items() if before.values.get(key) != value}
    return judged(replace(case, settings=after.with_values(besides)).under({}), case.price)


def _unfixed(code: str, message: str, path: Path, help: str) -> RlhfsimError:
    return RlhfsimError(code, message, place=Place(file=str(path)), help=help)
