"""What every Meshyard package stands on: hardware topology, communication and kernels.

Three rooms, `shared.topology`, `shared.comms` and `shared.kernels`, beside the exception types
(`shared.errors`), units (`shared.units`) and the record of a measured claim (`shared.claims`).
Nothing is imported here, so that a command line which only prints its help stays fast.
"""

__all__ = ["__project__", "__version__"]

__project__ = "meshyard"
__version__ = "0.1.0"
