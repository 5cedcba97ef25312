"""MLflow: a stage's run, the process that sends it, the registry of models, the views."""
