"""What a corpus takes: measured here, the rest is proportion."""
