"""Index refreshes: the exchange between trainer and index builders, over a shared volume (paper, section 3.3)."""
