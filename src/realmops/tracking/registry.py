"""MLflow's model registry: the versions of a model and its champion."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from realmops.config_yaml import parse_yaml
from realmops.credentials import error_line
from realmops.journal import NAME
from realmops.tracking.client import experiment_id, mlflow_client, resolve_tracking_uri

CHAMPION = "champion"
DIGEST_TAG = "realmops.digest"
COPIED_TAG = "realmops.copied"  # set on versions whose files are MLflow artifacts


@dataclass(frozen=True)
class ModelVersion:
    """One version of a registered model, with the tags that it was registered with."""

    uri: str
    number: int
    tags: Mapping[str, str]


class Registry:
    """The versions of one registered model; errors of MLflow are raised as a ConnectionError of one line."""

    def __init__(self, name: str, folder: Path, experiment: str) -> None:
        if not NAME.fullmatch(name):
            raise ValueError(f"model name {name!r}: only letters, digits, - and _ are allowed")
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self._folder = name, folder
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
        self._uri = resolve_tracking_uri(folder)
        with _one_line_errors():
            self._client = mlflow_client(self._uri)

    def champion(self) -> ModelVersion | None:
        with _one_line_errors():
            model = self._registered()
            number = model.aliases.get(CHAMPION) if model else None
            return None if number is None else self._version(self._client.get_model_version(self.name, number))

    def fetch(self, version: ModelVersion, path: str, folder: Path) -> Path:
        with _one_line_errors():
            from mlflow.artifacts import download_artifacts

            uri = f"{self._client.get_model_version_download_uri(self.name, str(version.number))}/{path}"
            return Path(download_artifacts(artifact_uri=uri, dst_path=str(folder), tracking_uri=self._uri))

    def settings(self, version: ModelVersion) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = self.fetch(version, "MLmodel", Path(folder))
            description = parse_yaml(path.read_bytes(), path)
        return dict(description["flavors"]["python_function"].get("config") or {})

    def register(
        self,
        code: Path,
        artifacts: Mapping[str, Path],
        *,
        config: Mapping[str, Any],
        question: str,
        tags: Mapping[str, str],
        run_id: str | None,
    ) -> ModelVersion:
        """Log a model and register it as a new version; ``code`` is its Python file."""
        with _one_line_errors(), _current_server(self._uri):
            import mlflow
            from mlflow.models import ModelSignature
            from mlflow.types import ColSpec, Schema

            experiment = experiment_id(self._client, self._experiment, self._folder)
            logged = self._client.create_logged_model(experiment, self.name, run_id, dict(tags))
            mlflow.pyfunc.log_model(
                name=self.name,
                model_id=logged.model_id,
                python_model=str(code),
                artifacts={name: str(path) for name, path in artifacts.items()},
                model_config=dict(config),
                signature=ModelSignature(inputs=Schema([ColSpec("string")])),
                input_example=[question],
                pip_requirements=_requirements(),
                code_paths=[str(Path(__file__).parents[1])],
            )
            if self._registered() is None:
                self._client.create_registered_model(self.name)
            source = (logged.model_uri, run_id, dict(tags))
            return self._version(self._client.create_model_version(self.name, *source, model_id=logged.model_id))

    def make_champion(self, version: ModelVersion, question: str, earlier: ModelVersion | None) -> bool:
        """Let a stored version answer ``question`` and give it the alias, unless ``earlier`` was replaced meanwhile.

        A race of some milliseconds remains, as MLflow cannot move an alias conditionally.
        """
        with _one_line_errors(), _current_server(self._uri):
            import mlflow

            mlflow.tracing.disable()  # never around log_model, which deadlocks in MLflow 3.17 with tracing off
            try:
                mlflow.pyfunc.load_model(version.uri).predict([question])
            finally:
                mlflow.tracing.enable()
            if self.champion() != earlier:
                return False
            self._client.set_registered_model_alias(self.name, CHAMPION, str(version.number))
            return self.champion() == version

    def _registered(self) -> Any:
        return next(iter(self._client.search_registered_models(f"name = '{self.name}'")), None)

    def _version(self, entry: Any) -> ModelVersion:
        return ModelVersion(f"models:/{self.name}/{entry.version}", int(entry.version), dict(entry.tags))


def _requirements() -> list[str]:
    """Return this package's requirements, pinned to the installed versions; the package itself is logged as code."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    requirements = [Requirement(line) for line in metadata.requires("realmops") or ()]
    # Public versions: package indexes have no local ones such as torch 2.13.0+cpu.
    return [f"{r.name}=={Version(metadata.version(r.name)).public}" for r in requirements if r.marker is None]


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        if not isinstance(error, MlflowException | SQLAlchemyError | OSError | ImportError):
            raise
        # Not "from error": a traceback would print the error with its URI, which may contain a password.
        place = "at MLFLOW_TRACKING_URI" if os.environ.get("MLFLOW_TRACKING_URI") else "of the local database"
        raise ConnectionError(f"the model registry {place} failed: {error_line(error)}") from None


@contextmanager
def _current_server(uri: str) -> Iterator[None]:
    import mlflow

    if mlflow.get_tracking_uri() == uri:  # setting it would outlive the environment variable that named it
        yield
        return
    earlier = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None  # type: ignore[no-untyped-call]
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(earlier)  # type: ignore[arg-type]  # None resets it
