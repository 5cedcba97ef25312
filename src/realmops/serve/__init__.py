"""Answers served: one generation of model, corpus and index at a time, over HTTP or at the terminal."""
