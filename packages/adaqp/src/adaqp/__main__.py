"""Runs the command line as `python -m adaqp`."""

from adaqp.cli import main

main()
