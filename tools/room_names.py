"""The words that `rooms.py` checks names against: roles, refused file names, shared class names."""

__all__ = ["EXPORTED_CLASHES", "REFUSED", "ROLES", "SAME_ROLE"]

# A second word for a role at a package's top level, and the word of the house.
ROLES = {
    **dict.fromkeys(("configuration", "setting", "settings", "options", "recipe"), "config"),
    **dict.fromkeys(("plan", "planning", "scheduler"), "planner"),
    **dict.fromkeys(("executor", "engine", "run"), "runtime"),
    **dict.fromkeys(("profile", "profiling", "speed", "measuring"), "profiler"),
    **dict.fromkeys(("simulation", "simulate", "sim", "replaying"), "simulator"),
    **dict.fromkeys(("eval", "evaluate"), "evaluation"),
    **dict.fromkeys(("dataset", "datasets"), "data"),
    **dict.fromkeys(("example", "showcase"), "demo"),
    **dict.fromkeys(("main", "command_line"), "cli"),
}

# Words of a file name by which nobody would search for what the file holds.
REFUSED = frozenset(
    "call extra found guard past places placing plain seat speed told".split()
)

# Class names that several packages use for the same role.
SAME_ROLE = {}

# Exported class names that mean two things, which keep their names for those who import them.
EXPORTED_CLASHES = {}
