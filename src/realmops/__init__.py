"""REALM: retrieval-augmented language model pre-training, as software that people run."""

__version__ = "0.1.0"
