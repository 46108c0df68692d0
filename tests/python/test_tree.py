"""How the modules of the package import each other: one way, by public names, from where things are now."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_public_names import MOVED

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "blocksparse"


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parsed(path):
    return ast.parse(path.read_text(), filename=str(path))


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: parsed(path) for name, path in FILES.items()}
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}
LAYERS = [
    f"blocksparse.torch.{layer}" for layer in ("ops", "autograd", "functional", "modules")
]  # each uses the former


def imports(tree, module="", package=""):
    """(module, name or None) of all that is imported from blocksparse, in functions, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "blocksparse")
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            if source.split(".")[0] == "blocksparse":
                yield from ((source, alias.name) for alias in node.names)


def imports_of(name):
    return imports(TREES[name], name, name if name in PACKAGES else name.rpartition(".")[0])


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def parents(name):
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts) - 1)]


def edges(name):
    """Modules that this one runs or asks; not the packages around it, which have begun already."""
    found = set()
    for source, member in imports_of(name):
        target = f"{source}.{member}" if f"{source}.{member}" in FILES else source
        found |= {target, *parents(target)} - {name, *(set(parents(name)) - {target})}
    return found


def circle(graph):
    """The names along a circle, or []."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        for other in sorted(graph[name]):
            if found := visit(other):
                return found
        done.add(path.pop())
        return []

    return next((found for name in sorted(graph) if (found := visit(name))), [])


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_imports_have_no_circle():
    graph = {name: edges(name) for name in FILES}
    assert {"blocksparse.layout", "blocksparse.torch.tables"} <= graph["blocksparse.torch.functional.linear"]
    assert "blocksparse.torch" in graph["blocksparse._arrays.kinds"]  # in a function
    assert circle(graph) == []


def test_what_is_found_by_name_is_known():
    """Imports by a string are not in the graph, so there are two places for them."""
    calls = {"import_module", "resolve_name", "__import__"}
    users = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in calls) or (isinstance(node, ast.Name) and node.id in calls)
    }
    assert users == {"blocksparse.layout", "blocksparse._core.moved"}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_of_torch_uses_those_before_it(layer):
    later = LAYERS[LAYERS.index(layer) + 1 :]
    wrong = [
        (name, target) for name in FILES if name.startswith(layer) for target in edges(name) if target in set(later)
    ]
    assert wrong == []


# ---- Private names -------------------------------------------------------------------------------------------------


def defined(tree):
    """All names that a module gives to something: variables, functions, classes, attributes, slots."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def foreign(tree):
    """Names under which a module has modules of others, whose private names are their affair."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name for alias in node.names}
    return names - {"blocksparse"}


def private_uses(tree):
    """Private attributes of what is neither the object itself, nor defined in the module, nor another library's."""
    own, others = defined(tree), foreign(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            holder = ast.unparse(node.value)
            heirs = holder in ("self", "cls", "super()")  # may use what their base class lets them
            if not heirs and holder.split(".")[0] not in others:
                yield ast.unparse(node)


def test_a_private_use_is_found():
    text = "import torch\nfrom . import ops\ntorch._C.f\nself._a\nops._b()\nx.y._c\n_d = 1\nother._d\nself.layer._e"
    assert set(private_uses(ast.parse(text))) == {"ops._b", "x.y._c", "self.layer._e"}


@pytest.mark.parametrize("name", FILES)
def test_no_private_name_crosses_a_module(name):
    taken = [
        f"{source}.{member}"
        for source, member in imports_of(name)
        if (member and is_private(member) and f"{source}.{member}" not in PACKAGES)
        or any(is_private(part) and part_of not in PACKAGES for part, part_of in split(source))
    ]
    assert taken == []
    assert list(private_uses(TREES[name])) == []


def split(name):
    """Each part of a dotted name, with the name as far as it."""
    return [(whole.rpartition(".")[2], whole) for whole in [*parents(name), name]]


# ---- Old addresses -------------------------------------------------------------------------------------------------


def programs():
    """All that imports the package, but for the test of old addresses."""
    folders = ("python", "tests", "examples", "experiments", "benchmarks", "docs", "scripts")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if path.name != "test_public_names.py"]


def test_no_program_uses_old_addresses():
    for path in programs():
        name = name_of(path) if PACKAGE in path.parents else ""
        found = set()
        for source, member in imports_of(name) if name else imports(parsed(path)):
            found |= {source, f"{source}.{member}"} & set(MOVED)
        # The front end imports its own, so that they are there as attributes.
        own = {old for old in MOVED if old.startswith("blocksparse.torch.")}
        assert found == (own if name == "blocksparse.torch" else set()), path


NEEDS = {  # modules, and packages with all that is in them, that import a library of their own
    "blocksparse.jax": "jax",
    "blocksparse.jax.equinox": "equinox",
    "blocksparse.jax.linen": "flax",
    "blocksparse.jax.nnx": "flax",
    "blocksparse.jax.pruning": "optax",
    "blocksparse.keras": "keras",
    "blocksparse.tensorflow": "tensorflow",
    "blocksparse.torch.sparsify.lightning": "lightning",
    "blocksparse.torch.sparsify.trainer": "transformers",
}


def test_nothing_is_taken_from_old_addresses():
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
    absent = {name for name, library in NEEDS.items() if importlib.util.find_spec(library) is None}
    missing = {name for name in FILES if absent & {name, *parents(name)}}
    here = [name for name in FILES if name not in {*MOVED, *missing, "blocksparse.__main__"}]
    strict = ["-W", "error:blocksparse.:DeprecationWarning"]  # the beginning of what old addresses say
    environment = {**os.environ, "PYTHONWARNINGS": "", "KERAS_BACKEND": "torch"}
    subprocess.run([sys.executable, *strict, "-c", code, *here], check=True, env=environment)
