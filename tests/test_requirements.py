"""The pinned sets: what is asked for is in them, and one release of everything."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def _pins(name: str) -> dict[str, str]:
    lines = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE)
    return {canonicalize_name(package): release for package, release in lines}


def test_the_cpu_set_has_what_it_is_made_from() -> None:
    pins = _pins("cpu.lock")
    for line in (ROOT / "requirements" / "cpu.in").read_text().splitlines():
        asked = Requirement(line)
        assert pins[canonicalize_name(asked.name)] in str(asked.specifier)


def test_the_frameworks_set_repeats_nothing_of_the_cpu_set() -> None:
    assert not _pins("cpu.lock").keys() & _pins("frameworks.lock").keys()


def test_the_cpu_set_can_run_the_reward_math_with_all_that_it_needs() -> None:
    pins = _pins("cpu.lock")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["math"]
    seen, todo = set[str](), [Requirement(text) for text in wanted]
    while todo:
        asked = todo.pop()
        name = canonicalize_name(asked.name)
        assert asked.specifier.contains(pins[name]), f"{asked} and {name}=={pins[name]}"
        if name not in seen:
            seen.add(name)
            needed = [Requirement(text) for text in requires(name) or ()]
            todo += [n for n in needed if n.marker is None or n.marker.evaluate({"extra": ""})]
    assert "antlr4-python3-runtime" in seen


LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
HOSTS = re.compile(
    r"pypi\.org|pythonhosted|download\.pytorch|registry\.npmjs|conda\.anaconda|(deb|security)\.debian",
    re.IGNORECASE,
)


def test_there_is_a_lock_for_each_install() -> None:
    assert {"base", "build", "cpu", "frameworks", "gpu", "skyrl"} == {path.stem for path in LOCKS}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_entry_of_a_lock_is_one_release_with_its_hashes(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    entries = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert entries
    for entry in entries:
        assert re.fullmatch(
            r"[A-Za-z0-9_.-]+(\[[a-z0-9,-]+\])?==[^\s;]+( ;[^-]+)?(\s+--hash=sha256:[0-9a-f]{64})+\s*", entry
        ), entry[:90]


@pytest.mark.parametrize(("lock", "extra"), [("base.lock", None), ("gpu.lock", "real-gpu")])
def test_a_lock_has_what_the_install_asks_for(lock: str, extra: str | None) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + (project["optional-dependencies"][extra] if extra else [])
    pins = _pins(lock)
    for text in asked:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)], prereleases=True), (
            text
        )


def test_packages_of_the_gpu_set_do_not_write_each_other_s_files() -> None:
    """cuda-python holds files of cuda-bindings up to 12, which then breaks flashinfer and vLLM's kernels."""
    pins = _pins("gpu.lock")
    assert pins["cuda-python"].split(".")[0] == pins["cuda-bindings"].split(".")[0]


def test_no_committed_file_names_the_host_of_a_package_registry() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    named = []
    for name in tracked.decode().split("\0"):
        path = ROOT / name
        if (
            name
            and path.is_file()
            and path != Path(__file__)
            and HOSTS.search(path.read_text(errors="ignore"))
        ):
            named.append(name)
    assert not named


def test_the_image_is_taken_by_digest_and_does_not_run_as_root() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert all(re.search(r"@sha256:[0-9a-f]{64}$", line) for line in lines if line.startswith("FROM "))
    assert [line.split()[1] for line in lines if line.startswith("USER ")][-1] not in ("root", "0")
    assert all("--require-hashes" in line or "--no-deps" in line for line in lines if "pip install" in line)
