"""Runs command lines of meshyard-swift in one process, whose templates are shared.

Reads a line of JSON a command: a folder to run it in, and its words. Prints its exit status.
"""

import json
import os
import sys

from swift.cli import main

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        folder, words = json.loads(line)
        os.chdir(folder)
        answers.write(f"{main(words)}\n")
        answers.flush()
