"""Lets tests import the models and jobs that several of them use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
