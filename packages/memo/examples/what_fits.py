"""Says what fits on devices that one does not have: python what_fits.py ./model H100 200GiB 8"""

import sys

import memo
from memo.profiler.analytic.analysis import Analysis
from memo.profiler.analytic.fit import fit
from memo.profiler.analytic.model_shapes import read_config

model, device, store, ranks = (
    *sys.argv[1:],
    *("llama-1b", "L4", "32GiB", "2")[len(sys.argv) - 1 :],
)
analysis = Analysis(read_config(model), device, ranks=int(ranks), optimizer="adamw")
budget = memo.Budget(device=int(0.92 * analysis.device.memory_bytes), store=store)
found = fit(analysis, budget, [1 << power for power in range(13, 18)])
print(found.table())
print(f"longest: {found.longest:,} tokens")
