"""What demos and tests of language models read, from wheels that carry it.

`bible` is a text, and `minilm` opens the files of a small model.
"""
