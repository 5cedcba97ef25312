"""Exact match, recall at k, intervals, and the report."""
