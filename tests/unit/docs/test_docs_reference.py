"""Every public name has an entry in a page of the reference, and an example that a test runs.

Its docstrings say what each argument is, with the unit of times and sizes and the shape of arrays, and which errors it
raises.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from docstrings import described, docstrings, methods, parameters, raised, sections

from reverb_writer.errors import DOCS, SpecError
from reverb_writer.lazy import module_of_names

ROOT = Path(__file__).parents[3]
PAGES = {path.stem: path.read_text("utf-8") for path in (ROOT / "docs/reference").glob("*.md")}
ENTRY = re.compile(r"^\.\. auto(class|function|data|module):: (\S+)$", re.MULTILINE)
BLOCK = re.compile(r"^```(?:python|pycon)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [block for path in sorted((ROOT / "docs").rglob("*.md")) for block in BLOCK.findall(path.read_text("utf-8"))]
PACKAGES = (
    "reverb_writer",
    *(
        f"reverb_writer.{name}"
        for name in (
            "environments", "episodes", "errors", "files", "instinct_rl", "local", "ray", "returns", "rollouts", "rows",
            "sb3", "shards", "slices", "tables", "testing", "tf_agents", "windows",
        )
    ),
)  # fmt: skip

# Public calls take and return these records; no program needs to import them.
RECORDS = {
    "reverb_writer.decoding.samples": ("BatchInfo", "SampleInfo"),
    "reverb_writer.reading.read_options": ("ReadOptions",),
    "reverb_writer.reading.stats": ("DatasetStats",),
    "reverb_writer.tables.table_info": ("RateLimiterInfo", "TableInfo"),
    "reverb_writer.writing.stream_options": ("DeliveryOptions", "StreamOptions"),
}


def public_names() -> Iterator[tuple[str, str]]:
    """Yield module and name; the server's from its stub, because the server may not be installed."""
    for package in PACKAGES:
        yield from ((package, name) for name in pkgutil.resolve_name(package).__all__)
    for module, names in RECORDS.items():
        yield from ((module, name) for name in names)
    stub = ROOT / "server/reverb_writer_server/__init__.pyi"
    yield from (("reverb_writer_server", name) for name in module_of_names(stub))


def object_of(package: str, name: str) -> object:
    """Return what a public name stands for, or its name where the package is not installed."""
    if package == "reverb_writer_server":
        return f"{package}.{name}"
    return getattr(pkgutil.resolve_name(package), name)


def entries() -> Iterator[tuple[str, str]]:
    """Yield module and name of each entry of the reference; an entry of a module has all its public names."""
    for page in PAGES.values():
        for kind, entry in ENTRY.findall(page):
            if kind == "module":
                yield from ((entry, name) for name in pkgutil.resolve_name(entry).__all__)
            else:
                module, _, name = entry.rpartition(".")
                yield module, name


@pytest.mark.parametrize(("package", "name"), list(public_names()))
def test_every_public_name_has_an_entry_and_an_example(package: str, name: str) -> None:
    value = object_of(package, name)
    if isinstance(value, ModuleType):
        assert value.__doc__
        assert f"{package}.{name}" in PACKAGES
        return
    found = [module for module, called in entries() if called == name and object_of(module, called) == value]
    assert len(found) == 1, f"{package}.{name} needs one entry in docs/reference/, here or where it comes from"
    in_docstring = ">>> " in (inspect.getdoc(value) or "")
    in_block = any(re.search(rf"\b{name}\b", block) for block in BLOCKS)
    assert in_docstring or in_block, f"{package}.{name} needs an example: a doctest, or a block of a page"


# Bases and parts of public classes, which their docstrings describe.
UNLISTED = {"ClusterSpec", "Dataset", "EpisodeData", "Server", "TrajectorySource", "View"}


def test_root_has_few_names() -> None:
    assert len(pkgutil.resolve_name("reverb_writer").__all__) <= 45


@pytest.mark.parametrize(("package", "name"), list(public_names()))
def test_classes_in_public_signatures_are_public(package: str, name: str) -> None:
    value = object_of(package, name)
    functions = [*methods(value).values(), value.__init__] if inspect.isclass(value) else [value]
    known = {name for _, name in public_names()} | UNLISTED
    for function in filter(inspect.isfunction, functions):
        signature, names = inspect.signature(function), vars(sys.modules[function.__module__])
        kinds = [signature.return_annotation, *(one.annotation for one in signature.parameters.values())]
        for word in re.findall(r"\w+", " ".join(map(str, kinds))):
            found = names.get(word)
            is_ours = inspect.isclass(found) and found.__module__.startswith("reverb_writer")
            assert not is_ours or word in known, f"{function.__qualname__}: {word}"


@pytest.mark.parametrize(("module", "name"), sorted(set(entries())))
def test_every_entry_is_of_a_public_name(module: str, name: str) -> None:
    assert (module, name) in set(public_names())


def public_callables() -> Iterator[Any]:
    """Yield each public class, its public methods, and each public function, once, with the class or None."""
    found: dict[Callable[..., Any], type | None] = {}
    for package, name in public_names():
        value = object_of(package, name)  # the server's are names: its module loads TensorFlow
        if inspect.isfunction(value):
            found.setdefault(value)
        elif inspect.isclass(value) and not issubclass(value, BaseException):
            found.setdefault(value)
            found.update({method: value for method in methods(value).values() if method not in found})
    for function, owner in found.items():
        yield pytest.param(function, owner, id=f"{function.__module__}.{function.__qualname__}")


def raisers(value: Any) -> list[Callable[..., Any]]:
    """Return the functions whose errors the docstring of a public name lists."""
    if not inspect.isclass(value):
        return [value]
    own = (vars(value).get(name) for name in ("__init__", "__post_init__"))
    return [function for function in own if function and function.__code__.co_filename != "<string>"]


@pytest.mark.parametrize(("value", "owner"), list(public_callables()))
def test_docstrings_say_what_arguments_are_and_which_errors_are_raised(value: Any, owner: type | None) -> None:
    said = {**(described(owner) if owner else {}), **described(value)}  # a method may use what its class has described
    for parameter in parameters(value):
        name, kind = parameter.name, str(parameter.annotation)
        assert name in said, f"what is `{name}`?"
        assert not name.endswith("_s") or "seconds" in said[name], f"`{name}` has no unit: {said[name]}"
        assert not name.endswith("_bytes") or "bytes" in said[name], f"`{name}` has no unit: {said[name]}"
        assert not re.search(r"\b(ND)?Array\b", kind) or "[" in said[name], f"`{name}` has no shape: {said[name]}"
    text = "\n".join(docstrings(value))
    assert not {error for error in raised(raisers(value)) if error not in text}, "an error is not listed"


def test_what_lacks_a_description_is_found() -> None:
    def function(length_bytes: int, timeout_s: float, table: str) -> None:  # noqa: D417  # which is what is found
        """Wait for a `table`.

        Args:
            timeout_s: how long to wait,
                at most.
        """
        raise SpecError(f"{length_bytes} {timeout_s} {table}")

    function.__module__ = "reverb_writer"
    assert sections(function.__doc__ or "") == {"timeout_s": "how long to wait, at most."}
    assert described(function).keys() == {"timeout_s", "table"}
    assert [parameter.name for parameter in parameters(function)] == ["length_bytes", "timeout_s", "table"]
    assert raised([function]) == {"SpecError"}


def test_every_public_class_says_its_state_in_a_line() -> None:
    values = [object_of(package, name) for package, name in public_names()]
    classes = [value for value in values if inspect.isclass(value) and not getattr(value, "_is_protocol", False)]
    assert not [value.__name__ for value in classes if value.__repr__ is object.__repr__]


def strings_of_code(source: str) -> Iterator[str]:
    """Yield the strings of a module that are no docstrings, f-strings as they stand in the source."""
    tree = ast.parse(source)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    texts = {node.value for node in statements if isinstance(node.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in texts:
            yield node.value


def test_messages_link_to_pages_of_the_site() -> None:
    links = set()
    for path in [*(ROOT / "reverb_writer").rglob("*.py"), *(ROOT / "server").rglob("*.py")]:
        for text in strings_of_code(path.read_text("utf-8")):
            assert not re.search(r"\bdocs/\w+/[\w-]+\.md\b", text), f"{path}: a user has no such file: {text}"
            links.update(re.findall(r"\{DOCS\}/([\w/-]+)\.html", text))
    assert len(links) > 1
    assert not [page for page in links if not (ROOT / f"docs/{page}.md").exists()]
    for project in ("pyproject.toml", "server/pyproject.toml"):
        assert f'\nDocumentation = "{DOCS}"\n' in (ROOT / project).read_text("utf-8")


def test_every_example_is_shown() -> None:
    shown = runpy.run_path(str(ROOT / "docs/conf.py"))["_examples"]()
    examples = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.py")}
    assert set(re.findall(r"\{literalinclude\} \.\./\.\./(\S+)", shown)) == examples
