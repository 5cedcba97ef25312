"""Question sets, their files, generated questions, and when an answer or a passage is right; no torch."""
