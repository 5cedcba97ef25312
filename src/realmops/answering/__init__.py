"""The one way from a question to its answer: retriever, index and reader, and the record that people are shown."""
