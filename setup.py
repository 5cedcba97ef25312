"""Put k8s/ and the compiled pipelines, which are at the top of the checkout, into the package; see pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Build the modules, and copy the files that ``realmops.resources`` finds as ``realmops/k8s`` and so on."""

    def get_source_files(self) -> list[str]:
        """Return the files that the sdist needs."""
        return [*super().get_source_files(), *map(str, resources())]

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # the checkout has them
        for file in resources():
            target = Path(self.build_lib, "realmops", file)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def resources() -> list[Path]:
    """List the manifests, and the compiled pipelines without their sources."""
    manifests = [path for path in Path("k8s").rglob("*") if path.is_file()]
    return sorted([*manifests, *Path("pipelines").glob("*.yaml")])


setup(cmdclass={"build_py": BuildPy})
