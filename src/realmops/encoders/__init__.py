"""Encoders: packed sequences, networks that read them, and the folders of published ones."""
