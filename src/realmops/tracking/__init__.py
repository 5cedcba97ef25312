"""MLflow tracking: the run of a stage, the process that sends its metrics, the model registry, the saved views."""
