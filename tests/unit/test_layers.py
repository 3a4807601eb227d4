"""Imports go one way: a module imports only modules that stand before it in this list."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import reverb_writer

LAYERS = [
    "lazy",
    "due",
    "errors",
    "extras",
    "arguments",
    "deadline",
    "windowing",
    "priorities",
    "steps",
    "returns",
    "slices",
    "episode",
    "timescale",
    "wire.messages",
    "wire.strings",
    "wire.tensors",
    "wire.signatures",
    "wire.items",
    "structure",
    "wire.responses",
    "wire.trajectories",
    "wire.plain_chunks",
    "wire.sent_chunks",
    "wire.arena",
    "wire.shelf",
    "wire.samples",
    "wire.output",
    "wire.assembly",
    "wire.in_flight",
    "wire.lifetime",
    "wire.timer",
    "wire.connection",
    "wire.channel",
    "wire.server_info",
    "wire.inquiry",
    "wire.insert_stream",
    "wire.sample_stream",
    "wire.draw",
    "wire.single_item",
    "wire.specs",
    "shard",
    "client",
    "flow",
    "accumulator",
    "targets",
    "chunks",
    "writer",
    "lanes",
    "session",
    "observing",
    "observers",
    "vector",
    "environments",
    "reading.batches",
    "reading.pieces",
    "reading.stats",
    "reading.plan",
    "reading.prefetch",
    "reading.waiting",
    "reading.turns",
    "reading.priority_updates",
    "reading.sources",
    "reading.views",
    "reading.replay",
    "reading.members",
    "reading.contiguous",
    "variables",
    "rollouts",
    "tables",
    "tf_agents",
    "cli",
]
PURE = {*LAYERS[: LAYERS.index("wire.connection")], "tables"}
FRAMEWORKS = {"jax", "reverb", "tensorflow", "tf_agents", "torch"}

ROOT = Path(reverb_writer.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def layer_of(module: str) -> str:
    """Return the layer that is the module or the package that holds it, or `module` if there is none."""
    return next((layer for layer in LAYERS if f"{module}.".startswith(f"{layer}.")), module)


def imports(path: Path, *, at_load: bool = False) -> set[str]:
    """Return the full names of the modules that a file imports, without those within functions if `at_load`."""
    found = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in submodules if is_module(name)} or {node.module or ""}
        if not (at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            pending += ast.iter_child_nodes(node)
    return found


def is_module(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def first_party(names: set[str]) -> set[str]:
    return {name.removeprefix("reverb_writer.") for name in names if name.startswith("reverb_writer.")}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_module_imports_only_what_stands_before_it(path: Path) -> None:
    here = layer_of(module_of(path))
    assert here in LAYERS
    allowed = LAYERS[: LAYERS.index(here) + 1]  # modules of one package may import each other
    assert {layer_of(imported) for imported in first_party(imports(path))} <= {*allowed}


def test_no_module_imports_itself_through_others() -> None:
    graph = {module_of(path): first_party(imports(path)) for path in FILES}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"cycle: {' -> '.join([*above, module])}"
        if module not in done:
            for imported in graph.get(module, ()):
                visit(imported, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", [path for path in FILES if layer_of(module_of(path)) in PURE], ids=module_of)
def test_pure_module_imports_neither_grpc_nor_what_has_it(path: Path) -> None:
    assert not any(name.partition(".")[0] == "grpc" for name in imports(path))
    assert {layer_of(name) for name in first_party(imports(path))} <= PURE


# A view is its framework's, and is loaded when it is asked for: `ReplayDataset.as_torch` and its like.
@pytest.mark.parametrize(
    "path", [path for path in FILES if layer_of(module_of(path)) != "reading.views"], ids=module_of
)
def test_no_framework_is_imported_at_load(path: Path) -> None:
    assert not {name.partition(".")[0] for name in imports(path, at_load=True)} & FRAMEWORKS
