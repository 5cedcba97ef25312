"""Registered models of MLflow, of which one version is the champion."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from realmops.journal import NAME
from realmops.tracking.client import chosen_uri, error_summary, experiment_id, mlflow_client

CHAMPION = "champion"


@dataclass(frozen=True)
class ModelVersion:
    """One version of a registered model; ``tags`` are those that it was registered with."""

    uri: str
    number: int
    tags: Mapping[str, str]


class Registry:
    """The versions of one registered model, and which of them has the alias ``champion``.

    MLflow moves an alias without any condition: two promotions at the same time are for the caller to keep apart.
    Trouble with MLflow is a ConnectionError of one line; errors of the model's own code stay what they are.
    """

    def __init__(self, name: str, folder: Path, experiment: str) -> None:
        if not NAME.fullmatch(name):
            raise ValueError(f"model name {name!r}: only letters, digits, - and _ are allowed")
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self._folder = name, folder
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
        self._uri = chosen_uri(folder)
        with _trouble_in_one_line():
            self._client = mlflow_client(self._uri)

    def champion(self) -> ModelVersion | None:
        """The version that has the alias."""
        with _trouble_in_one_line():
            model = self._registered()
            number = model.aliases.get(CHAMPION) if model else None
            return None if number is None else self._version(self._client.get_model_version(self.name, number))

    def find(self, tags: Mapping[str, str]) -> ModelVersion | None:
        """The newest version that was registered with these tags."""
        conditions = [f"name = '{self.name}'", *(f"tags.`{tag}` = '{value}'" for tag, value in tags.items())]
        with _trouble_in_one_line():
            found = [self._version(one) for one in self._client.search_model_versions(" AND ".join(conditions))]
        return max(found, key=lambda version: version.number, default=None)

    def fetch(self, version: ModelVersion, artifact: str, folder: Path) -> Path:
        """Download one of a version's artifacts into a folder; all of them where it is ""."""
        with _trouble_in_one_line():
            from mlflow.artifacts import download_artifacts

            uri = f"{self._client.get_model_version_download_uri(self.name, str(version.number))}/artifacts/{artifact}"
            return Path(download_artifacts(artifact_uri=uri, dst_path=str(folder), tracking_uri=self._uri))

    def settings(self, version: ModelVersion) -> dict[str, Any]:
        """What the model's code finds in ``context.model_config``."""
        with _trouble_in_one_line(), _current_server(self._uri):
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
        """Log a model that runs ``code``, a Python file that MLflow copies, and make a version of it.

        ``artifacts`` are copied into it by the names that its code knows them by; ``config`` is what the code finds in
        ``context.model_config``; ``signature`` has columns by "inputs" and "outputs", in MLflow's form; ``question`` is
        an example of an input, ``run_id`` the run that the version came from, if it is known.
        """
        with _trouble_in_one_line(), _current_server(self._uri):
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
            made = (logged.model_uri, run_id, dict(tags))
            return self._version(self._client.create_model_version(self.name, *made, model_id=logged.model_id))

    def crown(self, version: ModelVersion, question: str, earlier: ModelVersion | None) -> bool:
        """Load a version from where it is stored, have it answer, and give it the alias.

        False where the champion is no longer ``earlier``: it is looked at again after the loading, which takes long,
        just before the alias moves, and once more behind it. Between two looks some milliseconds are left, as MLflow
        has no condition to move an alias by.
        """
        with _trouble_in_one_line(), _current_server(self._uri):
            import mlflow

            mlflow.tracing.disable()  # never around log_model: with tracing off, that of 3.17 waits for its own lock
            try:
                mlflow.pyfunc.load_model(version.uri).predict([question])
            finally:
                mlflow.tracing.enable()
            if self.champion() != earlier:
                return False
            self._client.set_registered_model_alias(self.name, CHAMPION, str(version.number))
            return self.champion() == version

    def _registered(self) -> Any:
        """MLflow's entry of the model, None before its first version."""
        return next(iter(self._client.search_registered_models(f"name = '{self.name}'")), None)

    def _version(self, found: Any) -> ModelVersion:
        return ModelVersion(f"models:/{self.name}/{found.version}", int(found.version), dict(found.tags))


def _requirements() -> list[str]:
    """What this package needs, in the versions that are installed.

    The package itself goes along as code: nobody of ours owns its name where others install from.
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    found = [Requirement(line) for line in metadata.requires("realmops") or ()]
    # The public part: no index has torch 2.13.0+cpu, which is what some are built as.
    return [f"{one.name}=={Version(metadata.version(one.name)).public}" for one in found if one.marker is None]


@contextmanager
def _trouble_in_one_line() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        if not isinstance(error, MlflowException | SQLAlchemyError | OSError | ImportError):
            raise
        # Not "from error": a traceback would print its text with the address, and the password in that.
        place = "at MLFLOW_TRACKING_URI" if os.environ.get("MLFLOW_TRACKING_URI") else "of the local database"
        raise ConnectionError(f"the model registry {place} failed: {error_summary(error)}") from None


@contextmanager
def _current_server(uri: str) -> Iterator[None]:
    """For what MLflow offers for its current server only."""
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
        mlflow.set_tracking_uri(earlier)  # type: ignore[arg-type]  # None takes it back
