"""The corpora of a run, each with its index and answers: what the stages made, and its updates."""

from dataclasses import dataclass
from pathlib import Path

from realmops import artifacts
from realmops.model.checkpoint_files import identifying_files
from realmops.stages import CORPUS, STAGES

UPDATE = "update"  # the kind of an update's manifest
UPDATES = "updates"  # the folder of a run that holds them
RESULTS = "results"  # in an update's folder: its answers


@dataclass(frozen=True)
class CorpusState:
    """The folders of a corpus, its index and the answers over it: those of the pipeline or of an update."""

    snapshot: Path
    finetune: Path
    results: Path
    number: int  # of the update, 0 for the pipeline


def pipeline_state(root: Path) -> CorpusState:
    """Return what the stages made, before any update."""
    snapshot, finetune, results = (root / STAGES[name].folder for name in ("snapshot", "finetune", "evaluate"))
    return CorpusState(snapshot, finetune, results, 0)


def newest_state(root: Path) -> CorpusState:
    """Return the newest update of the present model, or what the pipeline made."""
    return states(root)[-1]


def states(root: Path) -> list[CorpusState]:
    """Return what the pipeline made, then the updates of its present model in order.

    Raises ValueError when the newest one is damaged.
    """
    pipeline = pipeline_state(root)
    model = model_digest(pipeline)
    found = [pipeline]
    for path in (root / UPDATES).glob(f"[!.]*/{artifacts.MANIFEST}"):
        manifest = artifacts.read_manifest(path.parent, UPDATE, verify=False)
        if manifest["model"] == model:
            snapshot, finetune, results = (path.parent / name for name in ("snapshot", "finetune", RESULTS))
            found.append(CorpusState(snapshot, finetune, results, manifest["number"]))
    found.sort(key=lambda state: state.number)
    if found[-1].number:
        artifacts.read_manifest(found[-1].snapshot.parent, UPDATE)
    return found


def before_and_after(root: Path) -> tuple[CorpusState, CorpusState]:
    """Return what the stages made, and its newest update. Raises ValueError when the present model has none."""
    artifacts.read_manifest(root / STAGES["finetune"].folder, "finetune")
    newest = newest_state(root)
    if newest.number == 0:
        raise ValueError(f"{root / UPDATES} holds no update of the present model; run 'realmops update' first")
    return pipeline_state(root), newest


def model_digest(pipeline: CorpusState) -> str:
    """Return the digest of the pipeline's models and corpus, which its updates begin from.

    A closed-book model has no such files, and is never updated.
    """
    files = identifying_files(pipeline.finetune, "retriever", "reader")
    corpus = artifacts.read_json(pipeline.snapshot / artifacts.MANIFEST)["files"][f"{CORPUS}/{artifacts.MANIFEST}"]
    return artifacts.digest_of([*(artifacts.sha256_file(path) for path in files), corpus])
