"""The corpus states of a run: the output of the stages, and its updates, each with index and answers."""

from dataclasses import dataclass
from pathlib import Path

from realmops import artifacts
from realmops.artifacts import STAGE_FOLDERS, UPDATE
from realmops.model.reader_files import model_files

UPDATES = "updates"  # folder of the updates, below the root of a run
RESULTS = "results"  # folder of the answers, below that of an update


@dataclass(frozen=True)
class CorpusState:
    """The folders of a corpus, its index and its answers, from the pipeline or an update."""

    snapshot: Path
    finetune: Path
    results: Path
    number: int  # number of the update, 0 for the pipeline


def pipeline_state(root: Path) -> CorpusState:
    snapshot, finetune, results = (root / STAGE_FOLDERS[name] for name in ("snapshot", "finetune", "evaluate"))
    return CorpusState(snapshot, finetune, results, 0)


def newest_state(root: Path) -> CorpusState:
    return states(root)[-1]


def states(root: Path) -> list[CorpusState]:
    """Return the state of the pipeline, then the updates of its current model in order; the newest is verified."""
    pipeline = pipeline_state(root)
    model = model_digest(pipeline)
    result = [pipeline]
    for path in (root / UPDATES).glob(f"[!.]*/{artifacts.MANIFEST}"):
        manifest = artifacts.read_manifest(path.parent, UPDATE, verify=False)
        if manifest["model"] == model:
            snapshot, finetune, results = (path.parent / name for name in ("snapshot", "finetune", RESULTS))
            result.append(CorpusState(snapshot, finetune, results, manifest["number"]))
    result.sort(key=lambda state: state.number)
    if result[-1].number:
        artifacts.read_manifest(result[-1].snapshot.parent, UPDATE)
    return result


def model_digest(pipeline: CorpusState) -> str:
    corpus = artifacts.read_json(pipeline.snapshot / artifacts.MANIFEST)["files"][f"corpus/{artifacts.MANIFEST}"]
    return artifacts.digest_of([*map(artifacts.sha256_file, model_files(pipeline.finetune)), corpus])
