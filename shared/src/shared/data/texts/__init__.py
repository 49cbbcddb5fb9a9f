"""What tests and demos of language models read, from wheels that carry it: `minilm` opens MiniLM's files."""
