"""Baselines of Table 1: T5, TF-IDF, links, learned paths, and a rule without learning."""
