"""The architecture: who may import whom, who may use what, and how long a file may be."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pallas_loss"

# Top to bottom: a module imports from its own floor and from floors above it.
FLOORS = [
    {"_device", "_errors", "_types", "_varying"},
    {"row_sums"},
    {"losses"},
    {"tuning"},
    {"backends"},
    {"select"},
    {"plans"},
    {"autodiff"},
    {"sharding"},
    {"validation"},
    {"inputs"},
    {"row_inputs"},
    {"padding"},
    {"api"},
    {"nnx", "__init__"},
    {"cli"},
    {"__main__"},
]
MAX_LINES = 400
MODULES = sorted(PACKAGE.rglob("*.py"))
PUBLIC_USERS = sorted((ROOT / "models").rglob("*.py"))


def name_of(path):
    return str(path.relative_to(ROOT))


def imported(path):
    """Every absolute module name that a file imports, wherever in it, with what `from` takes."""
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                base = package[: len(package) - node.level + 1] + base
            for alias in node.names:
                yield ".".join([*base, alias.name])


def floor_of(unit):
    """The index of a module or subpackage directly under the package."""
    for index, floor in enumerate(FLOORS):
        if unit in floor:
            return index
    raise AssertionError(f"pallas_loss.{unit} stands on no floor; give it one in FLOORS")


def unit_of(path):
    """The module or subpackage directly under the package that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def own_imports(path):
    """The units of the package that a file imports; a name of the package itself is `__init__`."""
    units = {p.stem if p.suffix else p.name for p in PACKAGE.iterdir()}
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "pallas_loss":
            yield parts[1] if len(parts) > 1 and parts[1] in units else "__init__"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_come_from_above(path):
    """A module that reaches down its own list of floors is a cycle in the making."""
    own = floor_of(unit_of(path))
    for unit in own_imports(path):
        if unit == unit_of(path):
            continue
        assert floor_of(unit) <= own, f"{name_of(path)} imports pallas_loss.{unit}, below it"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_are_short(path):
    """Past this length an abstraction is missing."""
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{name_of(path)} has {lines} lines"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_custom_rules_live_in_autodiff(path):
    """Derivative rules are written in one place; a backend never holds one."""
    if unit_of(path) == "autodiff":
        return
    names = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    names |= {part for name in imported(path) for part in name.split(".")}
    assert not names & {"custom_vjp", "custom_jvp", "defvjp", "defjvp"}, name_of(path)


@pytest.mark.parametrize("path", PUBLIC_USERS, ids=name_of)
def test_models_use_the_public_api_only(path):
    """The decoder and its training script are users: names of the package, and
    `pallas_loss.nnx`."""
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "pallas_loss":
            continue
        inner = parts[1:]
        assert not any(p.startswith("_") for p in inner), f"{name_of(path)} imports {name}"
        submodule = inner and (
            (PACKAGE / f"{inner[0]}.py").exists() or (PACKAGE / inner[0]).is_dir()
        )
        assert not submodule or inner[0] == "nnx", f"{name_of(path)} imports {name}"


@pytest.mark.parametrize("path", PUBLIC_USERS, ids=name_of)
def test_models_reach_no_private_attribute(path):
    """Nor through an attribute of an imported module."""
    aliases = {}
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "pallas_loss":
                    aliases[alias.asname or alias.name.split(".")[0]] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in aliases:
                assert not node.attr.startswith("_"), f"{name_of(path)} uses {node.attr}"


def test_the_walk_sees_what_it_has_to():
    """The measure itself, on files written here: relative, nested and aliased imports count."""
    path = PACKAGE / "backends" / "example.py"
    source = (
        "import pallas_loss.api as a\nfrom .. import nnx\ndef f():\n    from ..select import x\n"
    )

    class Source(type(path)):
        def read_text(self, *_, **__):
            return source

    assert sorted(own_imports(Source(path))) == ["api", "nnx", "select"]
    assert floor_of("losses") < floor_of("backends") < floor_of("api")
    assert {"api", "losses", "autodiff"} <= {unit_of(p) for p in MODULES}
