"""The sample corpus: an encyclopedia of an invented world, with questions about it."""
