"""The site of the yard: pages and docstrings, put together for Sphinx."""
