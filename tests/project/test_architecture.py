"""The direction of imports (CONTRIBUTING.md, "The layers"), read from the syntax trees of src/realmops."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

# Lowest first. A unit (a module or a package directly under realmops) imports itself and units of lower rows.
LAYERS = (
    ("__init__",), ("credentials", "git", "memory_map", "number_format", "progress"), ("files",),
    ("artifacts", "config_yaml", "option_types", "resources"), ("options",),
    ("config", "journal"),
    ("hub", "devices", "compressed"), ("process", "readers", "sample"), ("corpus", "inputs"), ("questions", "model"),
    ("search",), ("refresh",), ("answering",), ("train",), ("baselines", "evaluate"), ("opening",),
    ("tracking",), ("stages",), ("starter", "console"), ("commands",), ("serve",), ("api",), ("cluster",), ("cli",),
    ("__main__",),
)  # fmt: skip
RANK = {unit: rank for rank, row in enumerate(LAYERS) for unit in row}
# All up to opening: a machine that only trains and answers has no mlflow, dvc or kfp.
CORE = {unit for unit, rank in RANK.items() if rank <= RANK["opening"]} - {"__init__", "resources", "inputs"}
# Libraries that these import, also through others: `realmops --help` pays for cli, the start of a stage for config.
LIGHT_UNITS = {
    "cli": {"click"}, "config": {"pydantic", "yaml"}, "options": {"pydantic"}, "hub": set[str](), "stages": set[str](),
    "tracking": {"pydantic", "yaml"},
}  # fmt: skip
# The protocol between trainer and builder is used by processes without torch.
WITHOUT_TORCH = ("builder", "child_processes", "exchange", "follower", "heartbeat", "lease", "trainer", "versions")
ROOM_LINES = 3500
MODEL_CODE = "realmops.commands.pyfunc"  # MLflow copies it into the registered model and runs the copy
RESTRICTED_LOADER = "realmops.hub"  # reads .bin files with weights_only
# Modules that delete, and what: only that is deleted which docs/operate.md lists ("What a command may delete").
DELETERS = {
    "artifacts": "drafts, and what check_replaceable allows to replace", "files": "what refresh.versions names",
    "refresh.versions": "pins", "cluster.clean": "marked runs", "cluster.builders": "the exchange with a run's key",
    "inputs.dvc_project": "cache entries in work", "corpus.seen_ids": "a database in a draft",
    "search.bm25_writer": "parts in a draft", "commands.adapt": "its work, and what check_replaceable allows",
    **dict.fromkeys(
        ("stages.runner", "stages.snapshot", "refresh.shards", "train.loop", "train.held_out_sentences",
         "tracking.sender", "commands.update", "commands.public_reader"), "below .realmops",
    ),
}  # fmt: skip
PICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@dataclass(frozen=True)
class Import:
    importer: str  # dotted module name
    target: str  # dotted name as imported; `from a import b` gives a.b
    line: int
    on_top: bool  # runs when the importer is imported

    @property
    def library(self) -> str:
        return self.target.split(".")[0]

    @property
    def units(self) -> tuple[str, str]:
        return unit(self.importer), unit(self.target)

    def __str__(self) -> str:
        return f"{MODULES[self.importer].relative_to(SOURCE.parent)}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def read_imports(module: str, tree: ast.AST) -> Iterator[Import]:
    def walk(node: ast.AST, on_top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(module, alias.name, child.lineno, on_top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{module}:{child.lineno}: write the whole name"
                yield from (Import(module, f"{child.module}.{a.name}", child.lineno, on_top) for a in child.names)
            is_lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            is_lazy |= isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            yield from walk(child, on_top and not is_lazy)

    yield from walk(tree, True)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}
IMPORTS = [imported for module, tree in TREES.items() for imported in read_imports(module, tree)]


def unit(dotted: str) -> str:
    """Return the module or package directly under realmops that has a dotted name."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and f"realmops.{parts[1]}" in MODULES else "__init__"


def wrong(is_wrong: Callable[[Import], bool]) -> list[str]:
    return [str(imported) for imported in IMPORTS if is_wrong(imported)]


def test_every_unit_has_a_layer_and_imports_point_down() -> None:
    assert {unit(module) for module in MODULES} <= set(RANK), "give it a place in LAYERS and in CONTRIBUTING.md"

    def points_up(imported: Import) -> bool:
        importer, target = imported.units
        is_front_door = imported.importer == "realmops" and target == "api" and not imported.on_top
        return imported.library == "realmops" and importer != target and not (
            RANK[target] < RANK[importer] or is_front_door
        )  # fmt: skip

    assert wrong(points_up) == []


def test_only_these_modules_delete() -> None:
    names = {"rmtree", "unlink", "rmdir", "removedirs", "rmdirs"}
    found = {m for m, tree in TREES.items() for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in names}
    assert {module.removeprefix("realmops.") for module in found} == DELETERS.keys()


def test_only_work_folders_and_caches_are_replaced_whatever_is_in_them() -> None:
    calls = [(m, n) for m, tree in TREES.items() for n in ast.walk(tree) if isinstance(n, ast.Call) and len(n.args) > 1]
    found = {m for m, n in calls if ast.unparse(n.func).endswith("atomic_folder") and ast.unparse(n.args[1]) == "None"}
    expected = ("train.loop", "train.held_out_sentences", "inputs.resolve")
    assert found == {f"realmops.{module}" for module in expected}


def test_module_file_names_are_unique() -> None:
    names = [path.name for path in MODULES.values() if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


def test_no_modules_import_each_other() -> None:
    """Imports within functions count, too; the front door ``realmops`` does not."""
    left = {module: set[str]() for module in MODULES}
    for imported in IMPORTS:
        if imported.library == "realmops" and imported.importer != "realmops":
            target = imported.target if imported.target in MODULES else imported.target.rpartition(".")[0]
            left[imported.importer] |= {target} - {imported.importer, "realmops"}
    while leaves := [module for module, others in left.items() if not others & left.keys()]:
        for module in leaves:
            del left[module]
    assert not left, f"each of these imports another one of them, or one that does: {sorted(left)}"


def test_rooms_fit_on_a_map() -> None:
    lines: dict[str, int] = {}
    for module, path in MODULES.items():
        lines[unit(module)] = lines.get(unit(module), 0) + len(path.read_text(encoding="utf-8").splitlines())
    assert {room: count for room, count in lines.items() if count > ROOM_LINES} == {}


@pytest.mark.parametrize("name", ["mlflow", "faiss", "kfp", "kubernetes"])
def test_a_library_is_imported_in_one_module(name: str) -> None:
    importers = {imported.importer for imported in IMPORTS if imported.library == name}
    if name == "mlflow":
        importers = {module for module in importers - {MODEL_CODE} if unit(module) != "tracking"}
    assert len(importers) <= 1, f"{name} is imported by {sorted(importers)}; keep one"


def test_the_code_of_the_registered_model_is_imported_by_nothing() -> None:
    assert MODEL_CODE in MODULES
    assert wrong(lambda imported: imported.target.startswith(MODEL_CODE)) == []


def test_the_core_needs_no_operations_tools_and_text_needs_no_torch() -> None:
    """faiss is optional, so never imported on top."""
    never = {"mlflow", "dvc", "kfp", "kubernetes"}
    core = [imported for imported in IMPORTS if unit(imported.importer) in CORE]
    assert [str(i) for i in core if i.library in never or (i.on_top and i.library in ("faiss", "fsspec"))] == []
    rooms = {"readers", "sample", "corpus", "questions", "inputs"}
    assert wrong(lambda imported: imported.library == "torch" and unit(imported.importer) in rooms) == []


def chains_on_top(start: str) -> dict[str, list[str]]:
    """Return every module of ours that importing ``start`` imports, with the way to it."""
    ways, queue = {start: [start]}, [start]
    while queue:
        module = queue.pop(0)
        dotted = [module, *(i.target for i in IMPORTS if i.importer == module and i.on_top and i.library == "realmops")]
        around = {".".join(name.split(".")[:end]) for name in dotted for end in range(1, name.count(".") + 2)}
        for target in sorted((around & MODULES.keys()) - ways.keys()):
            ways[target] = [*ways[module], target]
            queue.append(target)
    return ways


def heavy(start: str, is_heavy: Callable[[str], bool]) -> list[str]:
    return [
        f"{' -> '.join(way)}: {imported}"
        for module, way in chains_on_top(start).items()
        for imported in IMPORTS
        if imported.importer == module and imported.on_top and is_heavy(imported.library)
    ]


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_exchange_needs_no_torch(name: str) -> None:
    assert heavy(f"realmops.refresh.{name}", "torch".__eq__) == []


@pytest.mark.parametrize("name", LIGHT_UNITS)
def test_light_modules_import_nothing_heavy(name: str) -> None:
    allowed = sys.stdlib_module_names | LIGHT_UNITS[name] | {"realmops"}
    assert heavy(f"realmops.{name}", lambda library: library not in allowed) == [], "import these inside functions"


def test_nothing_is_pickled_and_one_restricted_call_reads_pickles() -> None:
    assert wrong(lambda imported: imported.library in PICKLERS) == []
    calls = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, ast.keyword | ast.Attribute | ast.ImportFrom) else ""
            assert text not in ("allow_pickle=True", "weights_only=False", "torch.save"), (module, text)
            assert not text.startswith(("from torch import load", "from torch.serialization")), (module, text)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                calls[module] = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    assert calls.keys() == {RESTRICTED_LOADER}, "use safetensors, JSON, Parquet or .npy"
    assert calls[RESTRICTED_LOADER]["weights_only"] == "True"
    loader = [i for i in IMPORTS if i.importer == RESTRICTED_LOADER and i.library == "torch"]
    assert not any(imported.on_top for imported in loader)
