"""``realmops doctor``: report software versions, device, stage states and the health of the exchange."""

import importlib.metadata
import platform
from collections.abc import Iterator
from pathlib import Path

from realmops import __version__, artifacts
from realmops.artifacts import WORK_FOLDER
from realmops.readers.ocr import INSTALL
from realmops.refresh.exchange import inspect_exchange
from realmops.stages import METRICS, STAGES
from realmops.stages.runner import is_running
from realmops.stages.snapshot import WAITING
from realmops.tracking.runs import tracking_folder
from realmops.tracking.sender import unsent_journals

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "mlflow", "dvc", "faiss")


def diagnose(root: Path, exchange: Path | None) -> Iterator[str]:
    yield f"realmops {__version__}, Python {platform.python_version()}, {platform.platform()}"
    for name in PACKAGES:
        yield f"  {name}: {_version(name)}"
    yield from _device()
    yield "stages:"
    for stage in STAGES.values():
        yield f"  {stage.name}: {_state(root, stage.name)}"
    metrics = root / STAGES["snapshot"].folder / METRICS
    if scans := metrics.is_file() and artifacts.read_json(metrics).get(WAITING):
        yield f"documents: {scans:,} scanned files and pages wait for OCR; {INSTALL}"
    for journal in unsent_journals(tracking_folder(root)):
        yield f"MLflow: {journal} is not sent yet; run 'realmops sync' when the server is reachable"
    for_builders = (card.parent for card in (root / "exchange").glob("*/run"))  # created by a Kubeflow pipeline
    in_stages = (
        folder for pattern in ("*/exchange", "*/shards/*") for folder in (root / WORK_FOLDER / "work").glob(pattern)
    )
    exchanges = [exchange] if exchange else sorted([*in_stages, *for_builders])
    if not exchanges:
        yield "exchange: none; tag, pretrain, finetune and evaluate have one while they run"
    for folder in exchanges:
        yield f"exchange {folder}:"
        for line in inspect_exchange(folder):
            yield f"  {line}"


def _version(name: str) -> str:
    for candidate in (name, f"{name}-cpu", f"{name}-gpu"):
        try:
            return importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _device() -> Iterator[str]:
    import torch

    from realmops.devices import resolve_device, resolve_precision

    device = resolve_device("auto")
    name = f"CPU, threads: {torch.get_num_threads()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    yield f"device: {device.type} ({name}), precision {str(resolve_precision('auto', device)).removeprefix('torch.')}"


def _state(root: Path, name: str) -> str:
    folder = root / STAGES[name].folder
    works = sorted((root / WORK_FOLDER / "work").glob(f"{name}-*"))
    advice = "the stage is running" if is_running(root / WORK_FOLDER, name) else "run the stage again to resume"
    unfinished = f"; unfinished work in {', '.join(map(str, works))}: {advice}" if works else ""
    if not (folder / artifacts.MANIFEST).is_file():
        return f"not run yet{unfinished}"
    try:
        artifacts.read_manifest(folder, name)
    except ValueError as error:
        return f"DAMAGED: {error}"
    seconds = artifacts.read_json(folder / METRICS).get("seconds")
    return f"done in {seconds} s, {folder}{unfinished}"
