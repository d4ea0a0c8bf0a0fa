"""A calibrated profile is a new file that says where it comes from, and nothing else is touched."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from planted_plans import GPU, plan, planted_runs

from rlhfsim.calibration.fit import Calibration, calibrate
from rlhfsim.calibration.profile_writer import check_new, profile_text, write_profile
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.hardware.profiles import load_profile, profile_from_text, profile_hash


@pytest.fixture(scope="module")
def found() -> Calibration:
    plans = (plan(), plan(prompts=128, gpus=4))
    profile, rng = load_profile(GPU), np.random.default_rng(3)
    return calibrate(
        planted_runs(plans, profile, {"rl_layer_time": 3e-3, "controller_time": 3.0}, rng), profile
    )


def test_what_was_fitted_is_read_again(found: Calibration, tmp_path: Path) -> None:
    written = write_profile(tmp_path / "mine.yaml", found)
    again = load_profile(tmp_path / "mine.yaml")
    assert profile_hash(again) == profile_hash(written)
    assert again.name == "mine"
    for c in found.coefficients:
        kept = again.coefficients[c.name]
        assert (kept.value, kept.low, kept.high) == pytest.approx(
            (c.after.value, c.after.low, c.after.high), rel=1e-4
        )
        assert kept.dimension == c.before.dimension
        assert kept.source.startswith("calibrated ")
        assert c.before.source[:40] in kept.source


def test_every_changed_value_names_interval_n_runs_and_what_it_was(
    found: Calibration, tmp_path: Path
) -> None:
    write_profile(tmp_path / "mine.yaml", found)
    data = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert data["extends"] == GPU
    assert set(data["coefficients"]) == {c.name for c in found.coefficients}
    for c in found.coefficients:
        entry = data["coefficients"][c.name]
        assert {"value", "low", "high", "source"} == set(entry)
        for word in (f"n={c.n}", f"on {c.runs} of 2 runs", "r0, r1", "nvlink", "before "):
            assert word in entry["source"], (c.name, word)


def test_what_was_not_fitted_stays(found: Calibration, tmp_path: Path) -> None:
    written = write_profile(tmp_path / "mine.yaml", found)
    fitted = {c.name for c in found.coefficients}
    before = found.profile
    assert written.memory == before.memory
    assert written.curves == before.curves
    assert all(written.coefficients[n] == c for n, c in before.coefficients.items() if n not in fitted)


def test_the_pack_says_device_engines_interconnect_errors_and_region(
    found: Calibration, tmp_path: Path
) -> None:
    runs = tuple(
        replace(o, versions={"vllm": v, "numpy": "2"})
        for o, v in zip(found.observations, ("0.11.0", "0.10.1"), strict=True)
    )
    told = write_profile(tmp_path / "mine.yaml", replace(found, observations=runs)).calibration
    assert told is not None
    assert told.base == GPU
    assert dict(told.versions) == {"vllm": "0.11.0/0.10.1"}
    assert told.interconnect == "nvlink 450 GB/s over 8 GPUs, nic 50 GB/s"
    assert told.runs == ("r0", "r1")
    assert told.data == found.data
    assert told.phase_error is not None
    assert told.step_error is not None
    assert told.step_error[1] < told.step_error[0]
    assert {"actor.generate", "actor.train", "reference.logprob"} <= set(told.region)
    assert all(len(points) == 2 for points in told.region.values())


def test_a_profile_of_a_file_is_extended_by_its_path(found: Calibration, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first = write_profile(tmp_path / "a" / "first.yaml", found)
    second = write_profile(
        tmp_path / "second.yaml", replace(found, profile=first), tmp_path / "a" / "first.yaml"
    )
    assert yaml.safe_load((tmp_path / "second.yaml").read_text())["extends"] == "a/first.yaml"
    assert second.calibration is not None
    assert second.calibration.base == "first"
    assert second.title == "H100 SXM 80GB (calibrated)"


def test_without_a_file_before_the_whole_profile_is_carried(found: Calibration) -> None:
    text = profile_text("alone", found, extends=None)
    assert "extends" not in yaml.safe_load(text)
    whole = profile_from_text(text)
    assert whole.name == "alone"
    assert whole.memory == found.profile.memory
    assert whole.aliases == ()


def test_a_file_is_never_overwritten(found: Calibration, tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    out.write_text("precious")
    with pytest.raises(RlhfsimError, match="never overwritten") as caught:
        write_profile(out, found)
    assert caught.value.code == "file-exists"
    assert out.read_text() == "precious"


def test_a_dangling_link_is_not_followed(found: Calibration, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    with pytest.raises(RlhfsimError, match="never overwritten"):
        write_profile(tmp_path / "mine.yaml", found)
    assert not (tmp_path / "elsewhere.yaml").exists()


def test_a_file_that_appears_meanwhile_is_not_overwritten(
    found: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, link = tmp_path / "mine.yaml", os.link

    def raced(source: str, target: Path) -> None:
        out.write_text("theirs")
        link(source, target)

    monkeypatch.setattr(os, "link", raced)
    with pytest.raises(RlhfsimError, match="never overwritten"):
        write_profile(out, found)
    assert out.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["mine.yaml"]


def test_a_write_that_fails_leaves_nothing(
    found: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(RlhfsimError, match="no space left"):
        write_profile(tmp_path / "mine.yaml", found)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["h100_sxm.yaml", "H100-SXM.yml", "h100.yaml", "a100-80.yaml"])
def test_the_name_of_a_known_profile_is_taken(name: str, tmp_path: Path) -> None:
    with pytest.raises(RlhfsimError) as caught:
        check_new(tmp_path / name)
    assert caught.value.code == "name-taken"


def test_only_yaml_is_written_and_a_missing_folder_is_said(found: Calibration, tmp_path: Path) -> None:
    with pytest.raises(RlhfsimError, match="YAML"):
        check_new(tmp_path / "mine.json")
    with pytest.raises(RlhfsimError, match="no such file or directory"):
        write_profile(tmp_path / "no" / "mine.yaml", found)
