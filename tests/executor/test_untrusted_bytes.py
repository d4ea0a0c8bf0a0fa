"""What could run code from bytes: every loader of the tree is safe by its arguments, or has a reason here."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.refusals import check_model
from rlhfsim.errors import RlhfsimError

ROOT = Path(__file__).parents[2]
LOADERS = {
    "pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "torch",
    "yaml",
    "np",
    "numpy",
    "pd",
}
NAMES = {"load", "loads", "load_all", "full_load", "unsafe_load", "Unpickler", "open", "read_pickle"}
OWN_CHILD = "the other end is a child of this process, over its own pipe, with the user's own code"
REASONS = {
    "executor/rewards/calls.py: pickle.loads(protocol.receive(self.replies.fileno(), timeout_s, who))": OWN_CHILD,
    "executor/rewards/calls.py: pickle.loads(request)": "of the parent, over the pipe that it opened",
    "executor/environments/process.py: pickle.loads(body)": OWN_CHILD,
    "executor/environments/server.py: pickle.loads(body)": "of the parent, over the pipe that it opened",
    "executor/environments/server.py: pickle.loads(protocol.read_message(requests) or b'')": "likewise",
    "lab/fuzz/__main__.py: pickle.load(file)": OWN_CHILD,
    "lab/fuzz/mutations.py: yaml.load(text, Loader=yaml.CSafeLoader)": "a safe loader",
    "rlhfsim/specs/loading.py: yaml.load(text, Loader=yaml.CSafeLoader if aliased else _Loader)": (
        "_Loader is PyYAML's CSafeLoader"
    ),
    "rlhfsim/specs/frameworks/files.py: yaml.load(file.read_text(), Loader=yaml.CSafeLoader)": "a safe loader",
    "rlhfsim/interchange/rows.py: yaml.load(text, Loader=Loader)": "Loader is PyYAML's CSafeLoader, of own files",
}
"""Loader -> why nobody else can have written its bytes."""
SAFE = {"weights_only": True, "allow_pickle": False}
"""Argument -> value with which a loader executes nothing."""


def _calls() -> Iterator[tuple[Path, ast.Call]]:
    for top in ("rlhfsim", "executor", "lab"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    yield path.relative_to(ROOT), node


def _is_loader(call: ast.Call) -> bool:
    of = call.func
    return (
        isinstance(of, ast.Attribute)
        and isinstance(of.value, ast.Name)
        and of.value.id in LOADERS
        and of.attr in NAMES
    )


def _values(call: ast.Call) -> dict[str | None, object]:
    return {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}


def test_every_loader_that_could_run_code_has_a_reason() -> None:
    found = {
        f"{path}: {ast.unparse(call)}"
        for path, call in _calls()
        if _is_loader(call) and not SAFE.items() & _values(call).items()
    }
    assert found == REASONS.keys()


def test_a_model_that_needs_its_own_code_is_refused_and_none_of_it_runs(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    config = {"model_type": "own", "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RlhfsimError, match="auto_map") as refused:
        check_model(str(tmp_path))
    assert refused.value.code == "model-needs-its-code"
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "model_type": "llama"})
    )  # transformers' own is taken
    with pytest.raises(RlhfsimError) as refused:
        check_model(str(tmp_path))
    assert refused.value.code == "no-weights"


def test_code_that_comes_with_a_model_is_never_run() -> None:
    for path, call in _calls():
        values = _values(call)
        assert values.get("trust_remote_code", False) is False, path
        text = ast.unparse(call.func)
        if path.parts[0] == "executor" and "Auto" in text and text.endswith(".from_pretrained"):
            assert "trust_remote_code" in values, f"{path}: {text} would ask at a terminal"
    keys = [path for path in (ROOT / "executor").rglob("*.py") if '"trust_remote_code"' in path.read_text()]
    assert keys == []  # nor as an argument of vLLM
