"""Says what texts fit on devices that one does not have.

    python what_fits.py ./model --device H100 --store 200GiB --ranks 8

MODEL is a folder of a Hugging Face model, or its config.json, or a known name such as llama-1b.
"""

import argparse

import memo
from memo.profiler.analytic.analysis import Analysis
from memo.profiler.analytic.fit import fit
from memo.profiler.analytic.model_shapes import read_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="llama-1b")
    parser.add_argument("--device", default="L4", help="such as L4, A100_80 or H100")
    parser.add_argument("--store", default="32GiB", help="host memory or disk for activations")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    analysis = Analysis(
        read_config(given.model), given.device, ranks=given.ranks, optimizer="adamw"
    )
    budget = memo.Budget(device=int(0.92 * analysis.device.memory_bytes), store=given.store)
    found = fit(analysis, budget, [1 << power for power in range(13, 18)])
    print(found.table())
    print(f"longest: {found.longest:,} tokens")


if __name__ == "__main__":
    main()
