"""Runs the command line as `python -m adaqp`."""

import sys

from adaqp.cli import main

if __name__ == "__main__":
    sys.exit(main())
