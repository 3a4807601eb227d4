"""Packages import in one direction: each imports only itself and packages that stand after it in its list."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CLIENT = [
    "cli",
    "ray",
    "testing",
    "tf_agents",
    "sb3",
    "instinct_rl",
    "local",
    "rollouts",
    "files",
    "writing",
    "reading",
    "accumulator",
    "client",
    "transport",
    "decoding",
    "environments",
    "episodes",
    "tables",
    "protocol",
    "returns",
    "slices",
    "transitions",
    "windows",
    "steps",
    "leaves",
    "nests",
    "deadline",
    "background",
    "progress",
    "arguments",
    "scalars",
    "arrays",
    "lazy",
    "errors",
]
SERVER = [
    "cli",
    "service",
    "turn",
    "starting",
    "saving",
    "jobs",
    "certs",
    "observability",
    "reverb",
    "checkpoints",
    "config",
    "machine",
    "log_setup",
    "signals",
]
LAYERS = {"reverb_writer": CLIENT, "reverb_writer_server": SERVER}
FOLDERS = {"reverb_writer": ROOT / "reverb_writer", "reverb_writer_server": ROOT / "server" / "reverb_writer_server"}

WITH_GRPC = {"transport", "local"}  # the client's end of a connection, and a server's
PURE = CLIENT[CLIENT.index("transport") + 1 :]
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


def imports(path: Path, *, at_load: bool = False, with_types: bool = True) -> set[str]:
    """Return the full names of all that a file imports.

    Without what its functions import if `at_load`, and without what only type checkers import unless `with_types`.
    """
    found = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not with_types:
            continue
        if not (at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            pending += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize(("package", "path"), FILES, ids=IDS)
def test_module_imports_only_packages_below_its_own(package: str, path: Path) -> None:
    layers = LAYERS[package]
    own = layer_of(package, path)
    imported = {name.split(".")[1] for name in imports(path) if name.startswith(f"{package}.")} - {"__version__"}
    assert imported <= {*layers[layers.index(own) :]}


@pytest.mark.parametrize("path", CLIENT_FILES, ids=str)
def test_only_transport_and_local_import_grpc(path: Path) -> None:
    uses_grpc = any(name.partition(".")[0] == "grpc" for name in imports(path))
    assert not uses_grpc or layer_of("reverb_writer", path) in WITH_GRPC


@pytest.mark.parametrize("path", [path for path in CLIENT_FILES if path.parent.name != "views"], ids=str)
def test_no_framework_is_imported_at_load(path: Path) -> None:
    assert not {name.partition(".")[0] for name in imports(path, at_load=True)} & FRAMEWORKS


@pytest.mark.parametrize("package", LAYERS)
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    root = FOLDERS[package].parent
    files = [path for owner, path in FILES if owner == package]
    path_of = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}
    imported = {}
    for name, path in path_of.items():
        found = [f"{one}." for one in imports(path, with_types=False)]
        matches = [[module for module in path_of if one.startswith(f"{module}.")] for one in found]
        imported[name] = {max(modules, key=len) for modules in matches if modules}
    # `Views.transitions` makes an object of a class that derives from `Views`.
    imported.get("reverb_writer.reading.views", set()).discard("reverb_writer.reading.views.transitions")
    graphlib.TopologicalSorter(imported).prepare()  # a CycleError names the files


def test_no_two_modules_have_one_name() -> None:
    stems = [path.stem for path in CLIENT_FILES if not path.stem.startswith("__") and path.stem != path.parent.name]
    assert sorted(stems) == sorted({*stems})
