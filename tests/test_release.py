"""What is released: one version everywhere, and the files of the wheel and of the source archive."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DATA = "rlhfsim/data"


def _version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def test_package_citation_and_changelog_name_one_version_and_day() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.groups() == (cited["version"], cited["date-released"])
    assert newest[1] == _version()


def _build(target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [built] = folder.iterdir()
    return built


@pytest.mark.slow
@pytest.mark.parallel
def test_the_wheel_holds_the_two_packages_their_data_and_nothing_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(_build("wheel", tmp_path)) as wheel:
        names = set(wheel.namelist())
    about = f"rlhfsim-{_version()}.dist-info"
    assert {name.split("/")[0] for name in names} == {"rlhfsim", "executor", about}
    assert {"rlhfsim/py.typed", "executor/py.typed", f"{about}/licenses/LICENSE"} <= names
    assert {n for n in names if n.startswith(f"{DATA}/reports/")} == {f"{DATA}/reports/accuracy.json"}
    for folder in ("hardware_profiles", "scenarios"):
        shipped = {n.removeprefix(f"{DATA}/") for n in names if n.startswith(f"{DATA}/{folder}/")}
        assert shipped == _files(folder)


@pytest.mark.slow
@pytest.mark.parallel
def test_the_source_archive_holds_what_builds_the_wheel_and_no_tests(tmp_path: Path) -> None:
    with tarfile.open(_build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert _files("rlhfsim", "executor", "hardware_profiles", "scenarios") <= names
    assert {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} <= names
    assert {n for n in names if n.startswith(("tests/", "lab/", "reports/"))} == {"reports/accuracy.json"}


def _files(*folders: str) -> set[str]:
    found = (file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file())
    return {
        str(f.relative_to(ROOT)) for f in found if f.parent.name != "__pycache__" and f.stem[:5] != "local"
    }
