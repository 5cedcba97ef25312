"""Everything that talks to a cluster: submission, key, builders, tasks of the pipeline."""

from realmops import __version__

# of the pods, where no other is named: what .github/workflows/release.yml makes of a version
IMAGE = f"ghcr.io/realmops/realmops:{__version__}"
