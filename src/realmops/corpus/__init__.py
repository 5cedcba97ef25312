"""Documents, passages, salient spans and questions: everything that is text. No torch at import."""
