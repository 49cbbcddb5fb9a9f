"""What every Meshyard package stands on: hardware topology, communication and kernels.

Three rooms of substance, `shared.topology`, `shared.comms` and `shared.kernels`, and a small one,
`shared.data`, for events, flights and metrics. Beside them: atomic files (`files`), command lines
(`cli`), names that users choose from (`registry`), claims of a demo (`claims`), exceptions
(`errors`), units (`units`), what long runs tell (`training`) and marks of processes in names
(`process_mark`). Nothing is imported here, so that a command line which only prints its help stays
fast.
"""

__all__ = ["__project__", "__version__"]

__project__ = "meshyard"
__version__ = "0.1.0"
