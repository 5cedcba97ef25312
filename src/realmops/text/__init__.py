"""Languages, dates, tokenizers, vocabularies and spans: text processing without documents."""
