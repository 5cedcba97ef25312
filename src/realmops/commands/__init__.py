"""Commands that are not stages."""
