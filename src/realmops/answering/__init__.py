"""Question answering: retrieval, reading, confidence, and the record of an answer that all interfaces return."""
