"""Inputs: files, folders and models that options name and no stage makes: local, tracked by DVC, or at an address."""
