"""The rules of the house, read off the source: what may be written where."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.fields import options_of
from octavo.options import EngineArgs, ServerArgs

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "octavo"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "triton" not in path.parts)
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]

# Modules that may read the environment, and the names they may read elsewhere: none.
ENVIRONMENT = {"config.py", "options.py"}
# The compiler and pip are run with this process's environment; they read it, we do not.
HANDED_ON = {"kernels/cpu/build.py", "checkpoint/pull.py", "supervisor.py"}
# Reads foreign objects, whose attributes are not ours to know.
PROBING: set[str] = {"models/spec.py", "models/reader.py"}
CUDA = re.compile(r"^(device/cuda|worker/graphs|kernels/|attention/(flash|flashinfer|triton|mla))")


def tree(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text(encoding="utf-8"), name)


def line(name: str, node: ast.AST) -> str:
    return f"octavo/{name}:{node.lineno}"  # type: ignore[attr-defined]


def attribute(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain, empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def environment_reads(name: str) -> Iterator[str]:
    for node in ast.walk(tree(name)):
        if attribute(node) in ("os.environ", "os.getenv"):
            yield line(name, node)
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in ("environ", "getenv"):
                    yield line(name, node)


def global_statements(name: str) -> Iterator[str]:
    return (line(name, node) for node in ast.walk(tree(name)) if isinstance(node, ast.Global))


def probes(name: str) -> Iterator[str]:
    for node in ast.walk(tree(name)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3):
            yield line(name, node)


def cuda_words(name: str) -> Iterator[str]:
    return (line(name, n) for n in ast.walk(tree(name)) if attribute(n).startswith("torch.cuda"))


def mutable_state(name: str) -> Iterator[str]:
    """Names of a module, not in capitals, that hold something which can be changed."""
    for node in tree(name).body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        for target in targets:
            if isinstance(target, ast.Name) and not is_constant(target.id) and is_mutable(value):
                yield f"{line(name, node)} {target.id}"


def is_constant(name: str) -> bool:
    """Capitals, or one of the names that Python itself gives a meaning."""
    return name.lstrip("_").isupper() or (name.startswith("__") and name.endswith("__"))


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return attribute(value.func).split(".")[-1] in (
            *("dict", "list", "set", "deque", "defaultdict", "OrderedDict", "Counter"),
            *("Lock", "Event", "Queue", "ContextVar", "local", "WeakValueDictionary"),
        )
    displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    return isinstance(value, displays)


def changed_constants(name: str) -> Iterator[str]:
    """Places that change a module's constant in place."""
    module = tree(name)
    constants = {
        target.id
        for node in module.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    changing = {"append", "add", "update", "pop", "clear", "setdefault", "extend", "remove"}
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if node.func.attr in changing and isinstance(owner, ast.Name) and owner.id in constants:
                yield f"{line(name, node)} {owner.id}.{node.func.attr}"
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            for target in targets:
                owner = target.value if isinstance(target, ast.Subscript) else None
                if isinstance(owner, ast.Name) and owner.id in constants and is_constant(owner.id):
                    yield f"{line(name, node)} {owner.id}[...]"


@pytest.mark.parametrize("name", NAMES)
def test_the_environment_is_read_in_two_modules(name: str) -> None:
    if name not in ENVIRONMENT | HANDED_ON:
        assert list(environment_reads(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_no_global_statement_and_no_state_in_modules(name: str) -> None:
    assert list(global_statements(name)) == []
    assert list(mutable_state(name)) == []
    assert list(changed_constants(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_attributes_are_known_not_probed(name: str) -> None:
    if name not in PROBING:
        assert list(probes(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_cuda_is_named_in_its_own_files(name: str) -> None:
    if not CUDA.match(name):
        assert list(cuda_words(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_each_module_says_what_it_is(name: str) -> None:
    module = tree(name)
    if module.body:  # an empty __init__.py needs none
        assert ast.get_docstring(module), f"octavo/{name} has no docstring"


def test_the_rules_see_what_they_forbid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.architecture.test_rules.PACKAGE", tmp_path)
    (tmp_path / "bad.py").write_text(
        "import os\nfrom os import environ\ncache = {}\nTABLE = {}\n"
        "def f(x):\n    global cache\n    TABLE['a'] = 1\n    TABLE.update(x)\n"
        "    hasattr(x, 'a')\n    getattr(x, 'a', 0)\n    os.getenv('A')\n"
        "    return os.environ['B'], torch.cuda.device_count()\n"
    )
    assert len(set(environment_reads("bad.py"))) == 3
    assert len(list(global_statements("bad.py"))) == 1
    assert len(list(mutable_state("bad.py"))) == 1
    assert len(list(changed_constants("bad.py"))) == 2
    assert len(list(probes("bad.py"))) == 2
    assert list(cuda_words("bad.py"))


def test_text_of_the_repository_names_no_machine() -> None:
    """No absolute path of a home or work folder in any tracked text."""
    home = re.compile(r"(?<![\w.])/(?:root|work|home/\w+)/\w")
    for path in [*FILES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        found = home.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(ROOT)}: {found.group() if found else ''}"


def test_every_option_is_read_by_something() -> None:
    """An option that nothing reads would be ignored, which no option may be."""
    read = {
        node.attr
        for name in NAMES
        if name not in {"options.py", "fields.py", "renamed.py"}
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute)
    }
    both_values_mean_the_same = {"enforce_eager", "disable_log_stats"}
    offered = {
        name
        for record in (EngineArgs, ServerArgs)
        for name, details in options_of(record).items()
        if details.only is None
    }
    assert sorted(offered - read - both_values_mean_the_same) == []
