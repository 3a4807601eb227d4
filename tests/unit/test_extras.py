"""What the client can do without is named by what installs it, wherever it is missing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.reading.views import Views

PACKAGE = Path(rw.__file__).parent
NEEDED = {"numpy", "grpc", "google", "cramjam", "tree", "reverb_writer", "__future__"}
# Loaded by an environment of that package, by the command, which looks for them, and where bytes cannot be read.
EXEMPT = {
    "environments/dm_env_recorder.py",
    "environments/gymnasium_recorders.py",
    "instinct_rl/datasets.py",  # its classes are those of PyTorch only where PyTorch is installed
    "progress.py",  # rich comes with the package
    "testing.py",  # loaded by pytest
}


class Strange:
    """An array of a library that nobody knows."""


@pytest.mark.parametrize(
    ("missing", "call", "install"),
    [
        ("torch", lambda _: __import__("reverb_writer.reading.views.torch"), "reverb-writer[torch]"),
        ("jax", lambda _: Views().as_jax(), "reverb-writer[jax]"),
        ("tensorflow", lambda _: Views().as_tf(), "tensorflow"),
        ("minari", lambda path: rw.files.from_minari(str(path), None), "reverb-writer[minari]"),  # type: ignore[arg-type]
        ("minari", lambda path: rw.files.to_minari([], path, "a/b-v0"), "reverb-writer[minari]"),
        ("array_api_compat", lambda _: _namespace(), "reverb-writer[arrays]"),
        (
            "array_api_compat",
            lambda _: rw.rollouts.RolloutStorage(2, 2, (3,), (3,), (1,), device="cpu"),
            "reverb-writer[arrays,torch]",
        ),
    ],
)
def test_missing_package_is_named_by_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, call: Callable[[Path], Any], install: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("torch", "tf"):
        monkeypatch.delitem(sys.modules, f"reverb_writer.reading.views.{name}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(rw.errors.MissingExtraError) as caught:
        call(tmp_path)
    assert str(caught.value).endswith(f"which is not installed: pip install '{install}'")
    assert f"needs `{missing}" in str(caught.value)
    assert isinstance(caught.value, ModuleNotFoundError)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_extra_of_a_framework_brings_what_its_arrays_need(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rw.to_transitions` of tensors failed after the learner had started."""
    pyproject = PACKAGE.parent / "pyproject.toml"
    if not pyproject.exists():
        pytest.skip("installed without its sources")
    line = next(line for line in pyproject.read_text("utf-8").splitlines() if line.startswith(f"{library} = "))
    assert '"reverb-writer[arrays]"' in line
    monkeypatch.setitem(sys.modules, "array_api_compat", None)
    array = type("Tensor", (), {"__module__": f"{library}.of"})()
    from reverb_writer.arrays import array_namespace

    with pytest.raises(rw.errors.MissingExtraError, match=rf"pip install 'reverb-writer\[{library}\]'"):
        array_namespace(array)


def _namespace() -> Any:
    from reverb_writer.arrays import array_namespace

    return array_namespace(Strange(), np.zeros(1))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_optional_import_says_what_installs_it(path: Path) -> None:
    name = str(path.relative_to(PACKAGE))
    if name in EXEMPT or name.startswith(("cli/", "demo/", "ray/")):
        return  # `demo`: examples with their extra; `ray.actors` says it
    tree = ast.parse(path.read_text())
    guarded = {
        inner
        for node in ast.walk(tree)
        if (isinstance(node, ast.With) and "needs(" in ast.unparse(node.items[0].context_expr))
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    strangers = [
        module
        for node in ast.walk(tree)
        if node not in guarded
        for module in _imported(node)
        if module.partition(".")[0] not in NEEDED | sys.stdlib_module_names | {"ml_dtypes"}
    ]
    assert not strangers


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
        first = node.args[0]
        return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []
