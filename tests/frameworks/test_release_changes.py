"""Which release changed which key that is read here; releases that are not recorded fall to the nearest one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhfsim.api import estimate_file
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.keys import RecordedKey, key_table
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.export import export, exporter, exporters
from rlhfsim.interchange.releases import nearest_release
from rlhfsim.interchange.table import bare
from rlhfsim.what_if.doctor.case import Case
from tests.frameworks.test_keys import table_of

ROOT = Path(__file__).parents[2]
CHANGES = ROOT / "tests/data/framework_keys/changed_keys.txt"
VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B"


def changed_keys(name: str) -> Iterator[str]:
    """`verl 0.9.1 actor_rollout_ref.rollout.max_num_seqs: 1024 -> 256`, of keys that are read or written."""
    table, keys = table_of(name), key_table(name)
    known = sorted(
        {bare(n) for key in table.keys for n in table.named(key.key, *key.also)} & keys.keys.keys()
    )
    for i, release in enumerate(keys.releases[1:], start=1):
        for key in known:
            before, now = (shown(keys.at(key, place)) for place in (i - 1, i))
            if before != now:
                yield f"{name} {release} {key}: {before} -> {now}"


def shown(key: RecordedKey | None) -> str:
    return "(no such key)" if key is None else " or ".join(key.defaults)


@pytest.mark.parametrize("name", exporters())
def test_a_release_that_changes_a_key_says_so(name: str) -> None:
    """A new release in the tables changes this list: each line is a key to look at, then to write down here."""
    listed = [line for line in CHANGES.read_text().splitlines() if line.startswith(f"{name} ")]
    assert list(changed_keys(name)) == listed


@pytest.mark.parametrize("name", exporters())
def test_the_newest_release_has_every_key_that_is_written(name: str) -> None:
    table, keys = table_of(name), key_table(name)
    newest = len(keys.releases) - 1
    gone = {
        key: keys.releases[max(known.last for known in keys.keys[key])]
        for key in {bare(key.key) for key in table.keys}
        if key in keys.keys and keys.at(key, newest) is None
    }
    assert gone == {}, f"{keys.releases[newest]} has them no longer; last in"


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("0.9.7", "0.9.1"),
        ("0.9.0", "0.9.1"),
        ("0.9", "0.9.1"),
        ("v0.8.2", "0.8.0"),
        ("0.7.3.post1", "0.7.1"),
        ("0.6.0", None),
        ("1", None),
        ("", None),
    ],
)
def test_the_nearest_release_is_one_of_the_same_minor_version(version: str, nearest: str | None) -> None:
    assert nearest_release(version, ("0.9.1", "0.8.0", "0.7.1")) == nearest


def test_the_nearer_patch_counts_and_of_two_the_newer() -> None:
    assert nearest_release("0.9.4", ("0.9.1", "0.9.10")) == "0.9.1"
    assert nearest_release("0.9.5", ("0.9.0", "0.9.10")) == "0.9.10"


def test_an_export_for_a_patch_that_is_not_recorded_is_written_for_the_nearest_and_says_so(
    tmp_path: Path,
) -> None:
    recipe = next(iter(sorted((ROOT / "scenarios/recipes").glob("verl-*.yaml"))))
    plan = estimate_file(recipe)
    asked, recorded = (export(plan, "verl", frozenset(), version=v) for v in ("0.8.3", "0.8.0"))
    assert asked.files == recorded.files
    assert asked.warning == "the keys of verl 0.8.3 are not recorded: written for 0.8.0"
    assert recorded.warning is None
    assert export(plan, "verl", frozenset(), version="0.9").version == exporter("verl").version
    with pytest.raises(RlhfsimError, match=r"0\.3\.9 are not known"):
        export(plan, "verl", frozenset(), version="0.3.9")


def test_the_doctor_says_by_which_release_it_reads(tmp_path: Path) -> None:
    def assumed(version: str) -> list[str]:
        configuration, settings = read_configuration(VERL, {"verl_version": version})
        case = Case(configuration=configuration, settings=settings, gpu="h100")
        return list(case.assumed(case.under({"trainer.nnodes": 1, "trainer.n_gpus_per_node": 8})))

    assert "keys as in verl 0.9.1: those of 0.9.7 are not recorded" in assumed("0.9.7")
    for recorded in ("0.9.1", "0.9", "v0.8"):
        assert not [line for line in assumed(recorded) if "not recorded" in line]
