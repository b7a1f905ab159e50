"""The public names: exported lazily, typed by a stub, documented, and every example runs.

Examples run in this process, after `from PACKAGE import *`, as the API pages say.
"""

import ast
import doctest
import importlib
import inspect
import re
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import BaseModel

from checkout import DOCS, ROOT

PACKAGES = {
    "entropy_experiments": ROOT / "packages" / "entropy-experiments",
    "gradient_doctor": ROOT / "packages" / "gradient-doctor",
    "arc_refine": ROOT / "packages" / "arc-refine",
}
EXPORTED = [
    (package, name) for package in PACKAGES for name in importlib.import_module(package).__all__
]
each_name = pytest.mark.parametrize(("package", "name"), EXPORTED, ids=lambda word: word)


def value_of(package, name):
    return getattr(importlib.import_module(package), name)


def home_of(package, name):
    return importlib.import_module(f"{package}.{importlib.import_module(package)._HOME[name]}")


def docstring(package, name):
    """Of a class or a function, or the string below an alias's assignment."""
    value = value_of(package, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return inspect.getdoc(value) or ""
    for module in [m for key, m in sys.modules.items() if key.startswith(f"{package}.")]:
        file = getattr(module, "__file__", None)
        if file is None or getattr(module, name, None) is not value:
            continue
        body = ast.parse(Path(file).read_text("utf-8")).body
        for node, below in pairwise(body):
            assigned = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
            if assigned and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                return inspect.cleandoc(below.value.value)
    return ""


def section(text, title):
    """The lines of a section of a Google-style docstring."""
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)+)", text + "\n", re.MULTILINE)
    return "" if found is None else inspect.cleandoc("\n" + found.group(1))


def parameters(value):
    """Names that a caller may pass; a protocol has none, and keys of the config their own page."""
    if inspect.isclass(value):
        if getattr(value, "_is_protocol", False) or issubclass(value, BaseModel | int):
            return []
    elif not inspect.isfunction(value):
        return []
    return [p.name for p in inspect.signature(value).parameters.values() if p.name != "self"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_stub_names_what_the_package_exports(package):
    module = importlib.import_module(package)
    file = Path(module.__file__).with_name("__init__.pyi")
    stub = ast.parse(file.read_text("utf-8"))
    imported = {
        alias.name: node.module.removeprefix(f"{package}.")
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == module._HOME
    (listed,) = [
        ast.literal_eval(node.value)
        for node in stub.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert sorted(listed) == sorted(module.__all__) == sorted(module._HOME)


@each_name
def test_the_home_has_the_name(package, name):
    assert getattr(home_of(package, name), name) is value_of(package, name)
    assert name in dir(importlib.import_module(package))


@each_name
def test_the_docstring_has_arguments_result_and_example(package, name):
    value, text = value_of(package, name), docstring(package, name)
    first = text.partition("\n")[0]
    assert first.endswith((".", "`.", "?")), f"one sentence first; got {first!r}"
    # A named tuple has no constructor that mkdocstrings could see: its fields are attributes.
    named = "Attributes" if hasattr(value, "_fields") else "Args"
    arguments = re.findall(r"^(\w+): \S", section(text, named), re.MULTILINE)
    assert arguments == parameters(value)
    if inspect.isfunction(value):
        assert section(text, "Returns"), "a function says what it returns"
    example = section(text, "Examples")
    assert ">>> " in example
    shown = doctest.DocTestParser().get_examples(example)
    assert any(doctest.SKIP not in one.options for one in shown), "an example runs"


@each_name
def test_the_example_runs(package, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = docstring(package, name)
    exported = set(importlib.import_module(package).__all__)
    names = exported & set(re.findall(r"\w+", section(text, "Examples")))
    namespace = {one: value_of(package, one) for one in names}
    test = doctest.DocTestParser().get_doctest(text, namespace, f"{package}.{name}", None, 0)
    said = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)


def test_the_api_pages_have_every_name_once():
    named = [
        line.removeprefix("::: ")
        for page in sorted((DOCS / "api").glob("*.md"))
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("::: ")
    ]
    assert sorted(named) == sorted(f"{package}.{name}" for package, name in EXPORTED)


@pytest.mark.parametrize("package", PACKAGES)
def test_wheels_hold_the_types(package):
    """hatchling takes every file of the package's folder; wild/test_distributions.py builds one."""
    folder = PACKAGES[package]
    wheel = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]
    assert wheel["targets"]["wheel"] == {"packages": [f"src/{package}"]}
    for name in ("py.typed", "__init__.pyi"):
        assert (folder / "src" / package / name).is_file()


def test_the_doctor_depends_on_torch_and_nothing_else():
    project = tomllib.loads((PACKAGES["gradient_doctor"] / "pyproject.toml").read_text("utf-8"))
    assert [re.match(r"[\w-]+", one)[0] for one in project["project"]["dependencies"]] == ["torch"]
    assert "optional-dependencies" not in project["project"]


def test_it_has_teeth():
    text = (
        "Adds.\n\nArgs:\n    a: One.\n\nReturns:\n    The sum.\n\nExamples:\n    >>> 1 + 1\n    3\n"
    )
    assert re.findall(r"^(\w+): \S", section(text, "Args"), re.MULTILINE) == ["a"]
    assert section(text, "Raises") == ""
    test = doctest.DocTestParser().get_doctest(text, {}, "wrong", None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, out=lambda _: None)
    assert runner.failures == 1
