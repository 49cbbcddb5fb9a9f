"""The rules that `tools/rooms.py` prints the violations of, and the tests hold."""
