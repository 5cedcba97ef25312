"""Maximum inner product search over embeddings, exact or approximate, and BM25 (paper, section 3.3)."""
