"""Kubernetes and Kubeflow Pipelines: submission, training keys, index builders, pipeline tasks."""

from realmops import __version__

# default image of the pods, published by .github/workflows/release.yml for each version
IMAGE = f"ghcr.io/realmops/realmops:{__version__}"
VOLUME = "/realmops"  # where pods mount the claim
INPUTS = "inputs"  # folder of fetched inputs next to that of the runs, with a subfolder for each version
