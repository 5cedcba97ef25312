"""Maximum inner product search, and the exchange between trainer and index builder (paper, section 3.3)."""
