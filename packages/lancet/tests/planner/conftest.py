import sys
from pathlib import Path

# `lancet_programs` is read by several tests of this folder.
sys.path.insert(0, str(Path(__file__).parent))
