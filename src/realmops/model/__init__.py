"""Retriever, reader and the likelihoods that join them (paper, section 3)."""
