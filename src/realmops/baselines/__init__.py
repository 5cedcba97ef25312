"""Baselines of Table 1: T5, TF-IDF, links, learned paths, and a rule without learning.

A baseline replaces one of two components: ``rankers.build_ranker`` builds a replacement of the retriever;
``t5.ClosedBook`` reads no passages and replaces retriever and reader (``Finetune.reads_passages``).
"""
