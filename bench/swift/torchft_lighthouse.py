"""torchft's lighthouse, in torchft's environment; prints its address, ends when its input closes."""

import argparse
import sys

from torchft.coordination import LighthouseServer  # pyrefly: ignore

parser = argparse.ArgumentParser()
parser.add_argument("--min-replicas", type=int, required=True)
parser.add_argument("--join-timeout-ms", type=int, required=True)
parser.add_argument("--quorum-tick-ms", type=int, required=True)
parser.add_argument("--heartbeat-timeout-ms", type=int, required=True)
arguments = parser.parse_args()
lighthouse = LighthouseServer(bind="127.0.0.1:0", **vars(arguments))
print(lighthouse.address(), flush=True)
sys.stdin.read()
