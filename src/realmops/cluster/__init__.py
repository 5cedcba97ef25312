"""Everything that talks to a cluster: submission, key, builders, tasks of the pipeline."""
