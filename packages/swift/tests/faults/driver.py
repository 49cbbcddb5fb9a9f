"""Runs command lines of meshyard-swift, a JSON list a line, in one process: its templates are shared."""

import json
import os
import sys

from swift.cli import main

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(f"{main(json.loads(line))}\n")
        answers.flush()
