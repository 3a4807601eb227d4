"""What `import reverb_writer` costs: in a fresh interpreter, which modules it brings."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import threading
from importlib import resources
from pathlib import Path
from types import ModuleType

import pytest

import reverb_writer
import reverb_writer.rollouts
from reverb_writer.lazy import module_of_names

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
    assert not loaded & {"numpy", "grpc", "google.protobuf", "cramjam", "tree"}
    assert resources.files(reverb_writer).joinpath("py.typed").is_file()


@pytest.mark.parametrize(
    ("program", "left_out"),
    [
        ("rw.files.RolloutWriter, rw.files.RolloutDataset", {"grpc", "torch", "click"}),
        ("a = rw.TrajectoryAccumulator({'x': np.zeros(1)}); a.add('x', 1.0); a.build()", {"grpc", "google.protobuf"}),
        ("rw.TrajectoryObserver", {"multiprocessing"}),
    ],
)
def test_what_a_part_of_the_package_does_not_need_it_does_not_load(program: str, left_out: set[str]) -> None:
    assert not modules_after(f"import numpy as np, reverb_writer as rw\n{program}") & left_out


@pytest.mark.parametrize("module", ["reverb_writer.tables", "reverb_writer.testing"])
def test_what_the_server_and_every_pytest_load_is_cheap(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert not loaded & {"numpy", "grpc", "google.protobuf", "cramjam", "tree", "reverb_writer.local"}


def test_touching_every_public_name_loads_no_framework() -> None:
    loaded = modules_after("import reverb_writer\nfor name in dir(reverb_writer): getattr(reverb_writer, name)")
    assert "reverb_writer.client" in loaded
    assert not loaded & HEAVY


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


def test_star_import_brings_the_public_names_and_nothing_else() -> None:
    names: dict[str, object] = {}
    exec("from reverb_writer import *", names)  # noqa: S102  # the statement is the test
    assert names.keys() - {"__builtins__"} == {*vars(reverb_writer)["__all__"]}


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
    found: list[str] = []
    threads = [threading.Thread(target=lambda name=name: found.append(getattr(two_names, name))) for name in "AB"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["a", "b"]
    assert two_names.overlaps == [False, False]
