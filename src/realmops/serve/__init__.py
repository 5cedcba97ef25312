"""Serving of one generation (model, corpus and index) at a time, over HTTP and the Model Context Protocol."""
