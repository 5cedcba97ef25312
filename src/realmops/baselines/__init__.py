"""What Table 1 compares REALM with: T5, TF-IDF, links, learned paths, and a rule without learning.

A baseline takes one of two places. ``rankers.ranker_of`` gives what finds passages in the place of the retriever;
``t5.ClosedBook`` reads none and takes the place of retriever and reader (``Finetune.reads_passages``).
"""
