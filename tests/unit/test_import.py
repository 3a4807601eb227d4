"""What `import reverb_writer` costs: in a fresh interpreter, which modules it brings."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from importlib import resources
from typing import Any

import pytest

import reverb_writer

HEAVY = {"dm_env", "gymnasium", "jax", "reverb", "reverb_writer_server", "tensorflow", "tf_agents", "torch"}


def modules_after(statements: str) -> set[str]:
    """Run `statements` in a fresh interpreter and return the names of the modules that are loaded then."""
    script = f"import json, sys\n{statements}\njson.dump(sorted(sys.modules), sys.stdout)"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, timeout=60)
    return set(json.loads(done.stdout))


def test_import_loads_nothing_but_the_package_and_what_makes_it_lazy() -> None:
    loaded = modules_after("import reverb_writer")
    assert {name for name in loaded if name.startswith("reverb_writer")} == {"reverb_writer", "reverb_writer.lazy"}
    assert not loaded & {"numpy", "grpc", "google.protobuf", "cramjam", "tree"}


def test_touching_every_public_name_loads_no_framework() -> None:
    loaded = modules_after("import reverb_writer\nfor name in dir(reverb_writer): getattr(reverb_writer, name)")
    assert "reverb_writer.client" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("name", sorted(reverb_writer._MODULE_OF))
def test_public_name_is_the_one_of_its_module_and_has_a_docstring(name: str) -> None:
    value = getattr(reverb_writer, name)
    home = sys.modules[f"reverb_writer.{reverb_writer._MODULE_OF[name]}"]
    assert value is getattr(home, name)
    assert name in home.__all__
    assert inspect.getdoc(value)


def test_type_checkers_see_the_names_that_the_interpreter_sees() -> None:
    seen = {
        alias.asname: node.module.removeprefix("reverb_writer.")
        for node in ast.walk(ast.parse(inspect.getsource(reverb_writer)))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("reverb_writer.")
        for alias in node.names
        if alias.asname
    }
    assert seen == reverb_writer._MODULE_OF


@pytest.mark.parametrize(
    ("package", "also"), [("reverb_writer", {"environments", "rollouts"}), ("reverb_writer.rollouts", set())]
)
def test_star_gives_the_public_names_and_nothing_else(package: str, also: set[str]) -> None:
    got: dict[str, Any] = {}
    exec(f"from {package} import *", got)  # noqa: S102  # allowed at module level only
    module = importlib.import_module(package)
    assert got.keys() - {"__builtins__"} == module._MODULE_OF.keys() | also
    assert {name for name in dir(module) if not name.startswith("__")} == module._MODULE_OF.keys() | also


def test_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="module 'reverb_writer' has no attribute 'TrajectoryObservr'"):
        reverb_writer.TrajectoryObservr  # noqa: B018  # the look-up is the test


def test_names_are_listed_before_they_are_loaded() -> None:
    loaded = modules_after("import reverb_writer\nassert 'TrajectoryObserver' in dir(reverb_writer)")
    assert "reverb_writer.observers" not in loaded


def test_package_ships_its_types() -> None:
    assert resources.files(reverb_writer).joinpath("py.typed").is_file()
