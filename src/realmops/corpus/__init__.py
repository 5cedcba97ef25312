"""Passages, tokens, salient spans and masks of a snapshot; does not import torch."""
