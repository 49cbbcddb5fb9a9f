"""The words that names are checked against: roles, refused file names, shared class names."""

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
    [
        "call",
        "extra",
        "found",
        "guard",
        "past",
        "places",
        "placing",
        "plain",
        "seat",
        "speed",
        "told",
    ]
)

# Class names that several packages use for the same role. Classes of a `cli` are not compared: they
# have the names of their commands.
SAME_ROLE = {
    "Batch": "rows that go through a model together",
    "Candidate": "a plan that a search looks at",
    "Candidates": "the plans that a search looks at",
    "Checkpoint": "a training state on disk, or the folder of a run's states",
    "Events": "a stream of timestamped edges",
    "Failure": "what went wrong on a rank, as another process reads it",
    "LayerPlan": "what a planner decided for one layer",
    "LinkHead": "scores a link between two embeddings",
    "MilpResult": "what an integer program's solver found",
    "ModelSpec": "the shape of a model, from which bytes follow",
    "Negatives": "draws negative destinations",
    "Outcome": "what one of several ways took",
    "Packing": "what was packed where, and how full it is",
    "Piece": "the part of a tensor that one rank holds",
    "Plan": "what a planner decided",
    "Prediction": "what a simulator says that a plan takes",
    "Profile": "measured times that plans are made from",
    "Recipe": "a run as a file describes it",
    "Run": "a training run that has been set up",
    "Sampling": "how tokens are chosen",
    "Schedule": "what happens in which order",
    "Settings": "how a stream is learnt",
    "Size": "how much a demo does",
    "Solution": "what a planner found for one problem",
    "Span": "one piece of work, with its start and its end",
    "Stage": "consecutive layers of a model on one rank",
    "TimeEncoding": "cosines of a time difference",
    "Timing": "measured seconds of one of several, in turns",
    "Trainer": "trains a model over ranks",
    "Trace": "what happened in one operation or step, recorded",
    "Workload": "the requests that a plan is made for",
}

# Exported class names that mean two things, and what they mean where. They keep their names for
# those who import them.
EXPORTED_CLASHES = {
    "CheckpointCallback": {"bytecheckpoint": "the callback of Lightning, and that of transformers"},
    "CostModel": {
        "hybridflow": "a model that scores harm, and in `hybridflow.mapping` one of times"
    },
    "Engine": {
        "diffusionpipe": "trains a job by a plan, one rank's part of it",
        "hybridflow": "starts ranks and runs tasks on them",
        "hydraulis": "trains a model on documents, a planned step at a time",
    },
    "Graph": {
        "adaqp": "nodes with features and labels, and their edges",
        "qsync": "a model's operators and who reads whose output",
    },
    "Job": {
        "bytecheckpoint": "one save on one rank, from the copy in memory to the commit",
        "diffusionpipe": "a training: backbone, frozen functions, inputs and loss",
    },
    "Layer": {
        "hybridflow": "one layer of a decoder, a rank's shard of it",
        "lancet": "a gate and its experts, which may lie on several ranks",
    },
    "Mesh": {
        "hybridflow": "a worker group's ranks in training and in generation",
        "shared": "ranks as a box with named axes",
    },
    "Op": {
        "lancet": "one operation of a training step, on one of two queues",
        "mspipe": "what a memory server is asked to do",
        "qsync": "one operator of a model",
    },
    "Pipeline": {
        "llmpq": "the stages of a model on their ranks, on the way to answers",
        "mspipe": "the stages of a training step, several steps under way",
    },
    "Round": {
        "gnnflow": "one increment of a stream: evaluated, then trained on",
        "shared": "what one rank does in one round of an exchange",
    },
}
