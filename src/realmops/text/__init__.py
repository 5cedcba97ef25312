"""Languages, tokens and spans: what is known of text without documents."""
