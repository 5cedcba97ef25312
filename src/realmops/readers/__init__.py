"""Readers of documents, one file a family: a path gives documents; no torch."""
