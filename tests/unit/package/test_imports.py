"""Packages import in one direction, without frameworks, and name what a missing package needs."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from threads import at_once

import reverb_writer
import reverb_writer as rw
import reverb_writer.rollouts
from reverb_writer import instinct_rl
from reverb_writer.arrays import array_namespace
from reverb_writer.lazy import module_of_names
from reverb_writer.reading.views import View

ROOT = Path(__file__).parents[3]

# From the highest layer to the lowest.
CLIENT = [
    "cli", "ray", "testing", "tf_agents", "sb3", "instinct_rl", "local", "rollouts", "files", "accumulator",
    "replay", "shards", "writing", "reading", "client", "transport", "decoding", "environments", "episodes", "tables",
    "protocol", "slices", "transitions", "windows", "steps", "rows", "leaves", "nests", "deadline", "background",
    "progress", "arguments", "scalars", "keywords", "arrays", "lazy", "errors",
]  # fmt: skip
SERVER = [
    "cli", "service", "turn", "starting", "saving", "save_numbers", "jobs", "certs", "observability", "reverb",
    "checkpoints", "config", "machine", "log_setup", "signals",
]  # fmt: skip
LAYERS = {"reverb_writer": CLIENT, "reverb_writer_server": SERVER}
FOLDERS = {"reverb_writer": ROOT / "reverb_writer", "reverb_writer_server": ROOT / "server" / "reverb_writer_server"}

WITH_GRPC = {"transport", "local"}  # the client's end of a connection, and a server's
FRAMEWORKS = {"jax", "ray", "reverb", "tensorflow", "tf_agents", "torch"}

FILES = sorted(
    (package, path)
    for package, folder in FOLDERS.items()
    for path in folder.rglob("*.py")
    if path.parent != folder or not path.stem.startswith("__")
)
IDS = ["/".join((package, *path.relative_to(FOLDERS[package]).parts)) for package, path in FILES]
CLIENT_FILES = [path for package, path in FILES if package == "reverb_writer"]


def layer_of(package: str, path: Path) -> str:
    return path.relative_to(FOLDERS[package]).with_suffix("").parts[0]


def imports(path: Path, leave_out: Callable[[ast.AST], bool] = lambda _: False) -> set[str]:
    """Return the full names of all that a file imports, but for nodes of its syntax tree that are left out."""
    found = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if leave_out(node):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            found |= {
                one.value for one in node.args[:1] if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
        pending += ast.iter_child_nodes(node)
    return found


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def is_guarded(node: ast.AST) -> bool:
    return isinstance(node, ast.With) and "needs(" in ast.unparse(node.items[0].context_expr)


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(("package", "path"), FILES, ids=IDS)
def test_module_imports_only_packages_below_its_own(package: str, path: Path) -> None:
    layers = LAYERS[package]
    own = layer_of(package, path)
    imported = {name.split(".")[1] for name in imports(path) if name.startswith(f"{package}.")} - {"__version__"}
    assert imported <= {*layers[layers.index(own) :]}


@pytest.mark.parametrize("path", CLIENT_FILES, ids=str)
def test_no_framework_is_imported_at_load_and_grpc_only_by_transport_and_local(path: Path) -> None:
    assert "grpc" not in tops(imports(path)) or layer_of("reverb_writer", path) in WITH_GRPC
    assert path.parent.name == "views" or not tops(imports(path, is_function)) & FRAMEWORKS


@pytest.mark.parametrize("package", LAYERS)
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    root = FOLDERS[package].parent
    files = [path for owner, path in FILES if owner == package]
    path_of = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}
    imported = {}
    for name, path in path_of.items():
        found = [f"{one}." for one in imports(path)]
        matches = [[module for module in path_of if one.startswith(f"{module}.")] for one in found]
        imported[name] = {max(modules, key=len) for modules in matches if modules}
    graphlib.TopologicalSorter(imported).prepare()  # a CycleError names the files


CHEAP = {"numpy", "grpc", "google.protobuf", "cramjam", "tree"}  # packages that cheap imports leave out
HEAVY = {"dm_env", "gymnasium", "jax", "reverb", "reverb_writer_server", "tensorflow", "tf_agents", "torch"}


def modules_after(statements: str) -> set[str]:
    """Run `statements` in a fresh interpreter and return the names of the modules that are loaded then."""
    script = f"import json, sys\n{statements}\njson.dump(sorted(sys.modules), sys.stdout)"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, timeout=60)
    return set(json.loads(done.stdout))


def test_import_loads_nothing_but_the_package_and_what_makes_it_lazy() -> None:
    loaded = modules_after("import reverb_writer\nassert 'TrajectoryObserver' in dir(reverb_writer)")
    own = {name for name in loaded if name.startswith("reverb_writer")}
    assert own == {"reverb_writer", "reverb_writer.errors", "reverb_writer.lazy"}
    assert not loaded & CHEAP
    assert resources.files(reverb_writer).joinpath("py.typed").is_file()


@pytest.mark.parametrize(
    ("program", "left_out"),
    [
        ("import reverb_writer.tables", CHEAP | {"reverb_writer.local"}),  # as the server does
        ("import reverb_writer.testing", CHEAP | {"reverb_writer.local"}),  # as every pytest does
        ("import reverb_writer.files as f; f.RolloutWriter, f.RolloutDataset", {"grpc", "torch", "click"}),
        ("import reverb_writer as rw; a = rw.TrajectoryAccumulator({'x': 0.0}); a.add('x', 1.0); a.build()", {"grpc"}),
        ("import reverb_writer as rw; rw.TrajectoryObserver", {"multiprocessing"}),
        ("import reverb_writer as rw\nfor name in dir(rw): getattr(rw, name)", HEAVY),
    ],
)
def test_what_a_part_of_the_package_does_not_need_it_does_not_load(program: str, left_out: set[str]) -> None:
    assert not modules_after(program) & left_out


@pytest.mark.parametrize("package", [reverb_writer, reverb_writer.rollouts], ids=lambda package: package.__name__)
def test_public_names_are_those_of_their_modules_and_have_docstrings(package: ModuleType) -> None:
    module_of = module_of_names(Path(str(package.__file__)).with_suffix(".pyi"))
    assert {*vars(package)["__all__"]} == module_of.keys()
    for name, module in module_of.items():
        value = getattr(package, name)
        assert inspect.getdoc(value), name
        if module != package.__name__:
            home = sys.modules[module]
            assert value is getattr(home, name)


def test_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="module 'reverb_writer' has no attribute 'TrajectoryObservr'"):
        reverb_writer.TrajectoryObservr  # type: ignore[attr-defined]  # noqa: B018  # the look-up is the test


def test_names_that_two_threads_first_use_at_once_load_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each may hold the import lock of a module that the other needs, and gets half of it."""
    package = tmp_path / "two_names"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import threading\nfrom reverb_writer.lazy import lazy_names\n"
        "loading, overlaps = threading.Semaphore(1), []\n"
        "__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)\n"
    )
    (package / "__init__.pyi").write_text("from two_names.a import A as A\nfrom two_names.b import B as B\n")
    for name in "ab":
        (package / f"{name}.py").write_text(
            "import time\nfrom two_names import loading, overlaps\n"
            "overlaps.append(not loading.acquire(blocking=False))\n"
            f"time.sleep(0.2)\nloading.release()\n{name.upper()} = '{name}'\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    two_names = importlib.import_module("two_names")
    assert at_once(lambda: two_names.A, lambda: two_names.B) == ["a", "b"]
    assert two_names.overlaps == [False, False]


PACKAGE = Path(rw.__file__).parent
NEEDED = {"numpy", "grpc", "google", "google_crc32c", "cramjam", "tree", "reverb_writer", "__future__"}
# Loaded by an environment of that package, by the command, which looks for them, and where bytes cannot be read.
EXEMPT = {
    "environments/dm_env_recorder.py",
    "environments/gymnasium_recorders.py",
    "instinct_rl/datasets.py",  # its classes are those of PyTorch only where PyTorch is installed
    "progress.py",  # rich comes with the package
    "testing.py",  # loaded by pytest
}


@pytest.mark.parametrize(
    ("missing", "call", "install"),
    [
        ("torch", lambda _: __import__("reverb_writer.reading.views.torch"), "reverb-writer[torch]"),
        ("jax", lambda _: View(None).as_jax(), "reverb-writer[jax]"),
        ("tensorflow", lambda _: View(None).as_tf(), "tensorflow"),
        ("array_api_compat", lambda _: array_namespace(Fraction(1), np.zeros(1)), "reverb-writer[arrays]"),
        (
            "array_api_compat",
            lambda _: instinct_rl.ReplayBuffer(2, 2, "cpu"),
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


def test_package_that_is_too_old_is_named_by_what_installs_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.delattr(gymnasium.vector, "VectorWrapper")  # as in Gymnasium 0.29
    monkeypatch.delitem(sys.modules, "reverb_writer.environments.gymnasium_recorders", raising=False)
    told = r"`record` needs `gymnasium.vector`, but .* does not fit .*: pip install 'reverb-writer\[gymnasium\]'"
    with pytest.raises(rw.errors.MissingExtraError, match=told):
        rw.environments.record(gymnasium.Env(), print)


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
    with pytest.raises(rw.errors.MissingExtraError, match=rf"pip install 'reverb-writer\[{library}\]'"):
        array_namespace(array)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_optional_import_says_what_installs_it(path: Path) -> None:
    name = str(path.relative_to(PACKAGE))
    if name in EXEMPT or name.startswith(("cli/", "demo/", "ray/")):
        return  # `demo`: examples with their extra; `ray.actors` says it
    unguarded = tops(imports(path, lambda node: is_for_types(node) or is_guarded(node)))
    assert unguarded <= NEEDED | sys.stdlib_module_names | {"ml_dtypes"}
