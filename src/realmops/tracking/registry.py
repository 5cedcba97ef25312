"""MLflow's model registry: the versions of a model and its champion."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from realmops.journal import NAME
from realmops.tracking.client import error_summary, experiment_id, mlflow_client, resolve_tracking_uri

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
    """The versions of one registered model, one of which has the alias ``champion``.

    MLflow moves an alias unconditionally: the caller must serialise promotions. Errors of MLflow are raised as a
    ConnectionError of one line; errors of the model's own code are not converted.
    """

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
        """Return the version with the alias, or None."""
        with _one_line_errors():
            model = self._registered()
            number = model.aliases.get(CHAMPION) if model else None
            return None if number is None else self._version(self._client.get_model_version(self.name, number))

    def find(self, tags: Mapping[str, str]) -> ModelVersion | None:
        """Return the newest version that was registered with these tags, or None."""
        conditions = [f"name = '{self.name}'", *(f"tags.`{tag}` = '{value}'" for tag, value in tags.items())]
        with _one_line_errors():
            versions = [self._version(entry) for entry in self._client.search_model_versions(" AND ".join(conditions))]
        return max(versions, key=lambda version: version.number, default=None)

    def fetch(self, version: ModelVersion, artifact: str, folder: Path) -> Path:
        """Download one artifact of a version into a folder, or all of them if ``artifact`` is empty."""
        with _one_line_errors():
            from mlflow.artifacts import download_artifacts

            uri = f"{self._client.get_model_version_download_uri(self.name, str(version.number))}/artifacts/{artifact}"
            return Path(download_artifacts(artifact_uri=uri, dst_path=str(folder), tracking_uri=self._uri))

    def settings(self, version: ModelVersion) -> dict[str, Any]:
        """Return the ``context.model_config`` that the model's code will get."""
        with _one_line_errors(), _current_server(self._uri):
            from mlflow.models import get_model_info

            return dict(get_model_info(version.uri).flavors["python_function"].get("config") or {})

    def register(
        self,
        code: Path,
        artifacts: Mapping[str, Path],
        *,
        config: Mapping[str, Any],
        signature: Mapping[str, Any],
        question: str,
        tags: Mapping[str, str],
        run_id: str | None,
    ) -> ModelVersion:
        """Log a model and register it as a new version.

        MLflow copies ``code``, the Python file of the model, and ``artifacts`` under the names that the code uses.
        ``config`` is its ``context.model_config``, ``signature`` has the columns of "inputs" and "outputs" in MLflow's
        format, and ``question`` is an example input.
        """
        with _one_line_errors(), _current_server(self._uri):
            import mlflow
            from mlflow.models import ModelSignature

            experiment = experiment_id(self._client, self._experiment, self._folder)
            logged = self._client.create_logged_model(experiment, self.name, run_id, dict(tags))
            mlflow.pyfunc.log_model(
                name=self.name,
                model_id=logged.model_id,
                python_model=str(code),
                artifacts={name: str(path) for name, path in artifacts.items()},
                model_config=dict(config),
                signature=ModelSignature.from_dict({side: json.dumps(columns) for side, columns in signature.items()}),
                input_example=[question],
                pip_requirements=_requirements(),
                code_paths=[str(Path(__file__).parents[1])],
            )
            if self._registered() is None:
                self._client.create_registered_model(self.name)
            source = (logged.model_uri, run_id, dict(tags))
            return self._version(self._client.create_model_version(self.name, *source, model_id=logged.model_id))

    def make_champion(self, version: ModelVersion, question: str, earlier: ModelVersion | None) -> bool:
        """Load a stored version, let it answer ``question`` as a check, and give it the alias.

        The champion is compared with ``earlier`` after the slow load, just before the alias moves, and once more
        afterwards. A race of some milliseconds remains, as MLflow cannot move an alias conditionally. False is returned
        if another version became the champion meanwhile.
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
        """Return MLflow's entry of the model, or None before its first version."""
        return next(iter(self._client.search_registered_models(f"name = '{self.name}'")), None)

    def _version(self, entry: Any) -> ModelVersion:
        return ModelVersion(f"models:/{self.name}/{entry.version}", int(entry.version), dict(entry.tags))


def _requirements() -> list[str]:
    """Return this package's requirements, pinned to the installed versions.

    The package itself is logged as code, since it is not published in a package index.
    """
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
        raise ConnectionError(f"the model registry {place} failed: {error_summary(error)}") from None


@contextmanager
def _current_server(uri: str) -> Iterator[None]:
    """Set MLflow's current server for calls that take no tracking URI."""
    import mlflow

    if mlflow.get_tracking_uri() == uri:  # setting it would outlive the environment variable that named it
        yield
        return
    is_set = mlflow.is_tracking_uri_set()  # type: ignore[no-untyped-call]
    earlier = mlflow.get_tracking_uri() if is_set else None
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(earlier)  # type: ignore[arg-type]  # None resets it
