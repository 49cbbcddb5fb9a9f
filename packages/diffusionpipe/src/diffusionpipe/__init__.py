"""Trains diffusion models in stages over slow links, frozen parts running while training waits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import shared

# Other distributions install a module of this name too, and theirs may have replaced ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "diffusionpipe needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install diffusionpipe again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

if TYPE_CHECKING:
    from diffusionpipe.job import losses
    from diffusionpipe.job.adapters.controlnet import ControlledUNet
    from diffusionpipe.job.cache import cache
    from diffusionpipe.job.chain import Chain, chain
    from diffusionpipe.job.draws import Draw
    from diffusionpipe.job.job import Job
    from diffusionpipe.job.layers import ChainLayer
    from diffusionpipe.planner.partitioning.bidirectional import partition_bidirectional
    from diffusionpipe.planner.partitioning.partition import partition
    from diffusionpipe.planner.plan import Plan
    from diffusionpipe.planner.search.search import plan
    from diffusionpipe.profiler.job_profile import JobProfile
    from diffusionpipe.profiler.measure import profile
    from diffusionpipe.runtime.engine import Engine
    from diffusionpipe.simulator import simulate, simulate_bidirectional

__all__ = [
    "Chain",
    "ChainLayer",
    "ControlledUNet",
    "Draw",
    "Engine",
    "Job",
    "JobProfile",
    "Plan",
    "cache",
    "chain",
    "losses",
    "partition",
    "partition_bidirectional",
    "plan",
    "profile",
    "simulate",
    "simulate_bidirectional",
]

__version__ = "0.1.0"

# Module -> its public names, imported at first use so that `diffusionpipe --help` stays fast.
_HOMES = {
    "job.adapters.controlnet": ("ControlledUNet",),
    "job.cache": ("cache",),
    "job.chain": ("Chain", "chain"),
    "job.draws": ("Draw",),
    "job.job": ("Job",),
    "job.layers": ("ChainLayer",),
    "planner.partitioning.bidirectional": ("partition_bidirectional",),
    "planner.partitioning.partition": ("partition",),
    "planner.plan": ("Plan",),
    "planner.search.search": ("plan",),
    "profiler.job_profile": ("JobProfile",),
    "profiler.measure": ("profile",),
    "runtime.engine": ("Engine",),
    "simulator": ("simulate", "simulate_bidirectional"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "losses":
        return import_module("diffusionpipe.job.losses")
    if name in _HOME_OF:
        return getattr(import_module(f"diffusionpipe.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'diffusionpipe' has no attribute {name!r}")
