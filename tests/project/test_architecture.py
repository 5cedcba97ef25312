"""The direction of imports (CONTRIBUTING.md, "The layers"), read from the syntax trees of src/realmops."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

# Lowest first. A unit (a module or a package directly under realmops) imports itself and units of lower rows.
LAYERS = (
    ("__init__",), ("memory_map",), ("files",), ("artifacts", "config_yaml", "credentials", "options", "resources"),
    ("config", "journal"),
    ("hub", "devices", "compressed"), ("readers", "sample"), ("corpus", "inputs"), ("questions", "model"), ("search",),
    ("refresh",), ("answering",), ("train",), ("baselines", "evaluate"), ("tracking",), ("stages",),
    ("starter", "console"), ("commands",), ("serve",), ("api",), ("cluster",), ("cli",), ("__main__",),
)  # fmt: skip
RANK = {unit: rank for rank, row in enumerate(LAYERS) for unit in row}
CORE = {
    "memory_map", "files", "artifacts", "config", "config_yaml", "credentials", "options", "hub", "devices",
    "compressed", "journal", "readers", "sample", "corpus", "questions", "model", "search", "refresh", "answering",
    "train", "evaluate",
}  # fmt: skip
# What these may import on top, directly or through others: `realmops --help` pays for cli, a stage's start for config.
LIGHT_UNITS = {
    "cli": {"click"}, "config": {"pydantic", "yaml"}, "options": {"pydantic"}, "hub": set[str](), "stages": set[str](),
    "tracking": {"pydantic", "yaml"},
}  # fmt: skip
# The protocol between trainer and builder: checked, collected and watched by processes that have no torch.
WITHOUT_TORCH = (
    "builder", "child_processes", "exchange", "follower", "heartbeat", "lease", "trainer", "versions",
)  # fmt: skip
ROOM_LINES = 3500
IN_ONE_MODULE = ("mlflow", "faiss", "kfp", "kubernetes")
MODEL_CODE = (
    "realmops.commands.pyfunc"  # imported by nothing: MLflow copies it into the registered model and runs the copy
)
RESTRICTED_LOADER = "realmops.hub"  # reads the .bin files of others, with weights_only
PICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@dataclass(frozen=True)
class Import:
    importer: str  # dotted module name
    target: str  # dotted name as imported; `from a import b` gives a.b
    line: int
    on_top: bool  # runs when the importer is imported


def module_name(path: Path, source: Path) -> str:
    parts = list(path.relative_to(source).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_modules(source: Path) -> dict[str, Path]:
    return {module_name(path, source): path for path in sorted(source.rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def read_imports(module: str, path: Path) -> Iterator[Import]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def walk(node: ast.AST, on_top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, alias.name, child.lineno, on_top)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    above = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*above, *filter(None, [child.module])])
                for alias in child.names:
                    yield Import(module, f"{base}.{alias.name}", child.lineno, on_top)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, on_top and not inside and not is_type_checking(child))

    yield from walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)), True)


MODULES = read_modules(SOURCE)
IMPORTS = [found for module, path in MODULES.items() for found in read_imports(module, path)]


def unit(dotted: str) -> str:
    """The module or package directly under realmops that a dotted name lies in."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and f"realmops.{parts[1]}" in MODULES else "__init__"


def library(found: Import) -> str:
    return found.target.split(".")[0]


def is_ours(found: Import) -> bool:
    return library(found) == "realmops"


def where(found: Import) -> str:
    return f"{MODULES[found.importer].relative_to(SOURCE.parent)}:{found.line} imports {found.target}"


def may_import(importer: str, target: str) -> bool:
    return importer == target or RANK[target] < RANK[importer]


def test_every_unit_has_a_layer() -> None:
    units = {unit(module) for module in MODULES}
    assert units <= set(RANK), f"give {units - set(RANK)} a place in LAYERS and in CONTRIBUTING.md"
    loader = [found for found in IMPORTS if found.importer == RESTRICTED_LOADER and library(found) == "torch"]
    assert {found.target for found in loader} == {"torch", "torch.Tensor"}, "in a function, and for type checkers"
    assert not any(found.on_top for found in loader)


def test_module_file_names_are_unique() -> None:
    paths: dict[str, list[str]] = {}
    for path in MODULES.values():
        if path.name != "__init__.py":
            paths.setdefault(path.name, []).append(str(path.relative_to(SOURCE)))
    twice = {name: found for name, found in paths.items() if len(found) > 1}
    assert not twice, f"rename all but one: {twice}"


def test_imports_point_down() -> None:
    wrong = [
        where(found) for found in IMPORTS if is_ours(found) and not may_import(unit(found.importer), unit(found.target))
    ]
    lazily = [one for one in wrong if one.startswith("src/realmops/__init__.py:") and " realmops.api" in one]
    assert wrong == lazily, "\n".join(wrong)
    on_top = {library(found) for found in IMPORTS if unit(found.importer) == "__init__" and found.on_top}
    assert on_top <= {"typing", "realmops"}


def test_no_modules_import_each_other() -> None:
    """Imports within functions count, too; the front door ``realmops`` does not."""
    targets = {module: set[str]() for module in MODULES}
    for found in IMPORTS:
        if is_ours(found) and found.importer != "realmops":
            target = found.target if found.target in MODULES else found.target.rpartition(".")[0]
            targets[found.importer] |= {target} - {found.importer, "realmops"}
    left = dict(targets)
    while leaves := [module for module, others in left.items() if not others & left.keys()]:
        for module in leaves:
            del left[module]
    assert not left, f"each of these imports another one of them, or one that does: {sorted(left)}"


def test_rooms_fit_on_a_map() -> None:
    """A package, with its sub-packages."""
    lines: dict[Path, int] = {}
    for path in MODULES.values():
        room = SOURCE / "realmops" / path.relative_to(SOURCE / "realmops").parts[0]
        lines[room] = lines.get(room, 0) + len(path.read_text(encoding="utf-8").splitlines())
    too_large = {str(room.relative_to(SOURCE)): count for room, count in lines.items() if count > ROOM_LINES}
    assert not too_large, f"at most {ROOM_LINES} lines: {too_large}"


@pytest.mark.parametrize("name", IN_ONE_MODULE)
def test_imported_in_one_module(name: str) -> None:
    importers = {found.importer for found in IMPORTS if library(found) == name}
    if name == "mlflow":
        importers = {module for module in importers - {MODEL_CODE} if unit(module) != "tracking"}
    assert len(importers) <= 1, f"{name} is imported by {sorted(importers)}; keep one"


def test_the_code_of_the_registered_model_is_imported_by_nothing() -> None:
    wrong = [where(found) for found in IMPORTS if found.target.startswith(MODEL_CODE)]
    assert MODEL_CODE in MODULES
    assert not wrong, "\n".join(wrong)


def test_the_core_runs_without_the_operations_tools() -> None:
    """A bare GPU box has no mlflow, dvc or kfp; faiss there is a choice, so never imported on top."""
    never = {"mlflow", "dvc", "kfp", "kubernetes"}
    not_on_top = {*never, "faiss", "fsspec"}
    wrong = [
        where(found)
        for found in IMPORTS
        if unit(found.importer) in CORE and library(found) in (not_on_top if found.on_top else never)
    ]
    assert not wrong, "\n".join(wrong)


def test_readers_corpus_and_questions_need_no_torch() -> None:
    """Text is read, cut and tokenised without loading torch."""
    rooms = {"readers", "sample", "corpus", "questions", "inputs"}
    wrong = [where(found) for found in IMPORTS if unit(found.importer) in rooms and library(found) == "torch"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_exchange_needs_no_torch(name: str) -> None:
    start = f"realmops.refresh.{name}"
    wrong = [
        f"{' -> '.join(way)}: {where(found)}"
        for module, way in chains_on_top(start).items()
        for found in IMPORTS
        if found.importer == module and (found.on_top or module == start) and library(found) == "torch"
    ]
    assert not wrong, "\n".join(wrong)


def imported_on_top(module: str) -> list[str]:
    """Modules of ours that importing ``module`` runs: what it names on top, and the packages around each."""
    on_top = [found for found in IMPORTS if found.importer == module and found.on_top and is_ours(found)]
    dotted = [module, *(found.target for found in on_top)]
    around = {".".join(name.split(".")[:end]) for name in dotted for end in range(1, name.count(".") + 2)}
    return sorted(around & MODULES.keys())


def chains_on_top(start: str) -> dict[str, list[str]]:
    """Every module of ours that importing ``start`` runs, with the way there."""
    ways = {start: [start]}
    queue = [start]
    while queue:
        module = queue.pop(0)
        for target in imported_on_top(module):
            if target not in ways:
                ways[target] = [*ways[module], target]
                queue.append(target)
    return ways


@pytest.mark.parametrize("name", LIGHT_UNITS)
def test_light_modules_import_nothing_heavy(name: str) -> None:
    """On top: the standard library and what ``LIGHT_UNITS`` has; through other modules of ours, too."""
    start = f"realmops.{name}"
    assert start in MODULES, f"{start} is gone; take it out of LIGHT_UNITS"
    allowed = sys.stdlib_module_names | LIGHT_UNITS[name] | {"realmops"}
    wrong = [
        f"{' -> '.join(way)}: {where(found)}"
        for module, way in chains_on_top(start).items()
        for found in IMPORTS
        if found.importer == module and found.on_top and library(found) not in allowed
    ]
    assert not wrong, "import these inside the functions that use them:\n" + "\n".join(wrong)


def serialisation_by_code(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that write or read Python objects as code: torch.save, torch.load, allow_pickle=True."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and ast.unparse(node) == "weights_only=False":
            yield node.value.lineno, ast.unparse(node)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.serialization"):
            yield from ((node.lineno, f"torch.{a.name}") for a in node.names if a.name in ("load", "save"))
        elif isinstance(node, ast.keyword) and ast.unparse(node) == "allow_pickle=True":
            yield node.lineno, ast.unparse(node)


def test_no_pickle() -> None:
    wrong = [where(found) for found in IMPORTS if library(found) in PICKLERS]
    for module, path in MODULES.items():
        found = serialisation_by_code(ast.parse(path.read_text(encoding="utf-8")))
        allowed = {"torch.load"} if module == RESTRICTED_LOADER else set()
        wrong += [f"{path.relative_to(SOURCE.parent)}:{line} {text}" for line, text in found if text not in allowed]
    assert not wrong, "use safetensors, JSON, Parquet or .npy:\n" + "\n".join(wrong)


def test_the_one_loader_of_pickles_is_restricted() -> None:
    """One call of torch.load, and it takes weights only."""
    tree = ast.parse(MODULES[RESTRICTED_LOADER].read_text(encoding="utf-8"))
    assert [text for _, text in serialisation_by_code(tree)] == ["torch.load"]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "torch.load"]
    assert [{k.arg: ast.unparse(k.value) for k in call.keywords}["weights_only"] for call in calls] == ["True"]
