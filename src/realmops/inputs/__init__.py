"""Inputs: files, folders and models that options name and no stage makes, here or at an address."""
