"""Mistakes that a user makes on the first day, with the exit status and the words to expect.

The words are of the sentence that says what was expected, not the argument that is repeated in it.
`PROG` is the package's program. Files that these lines name are there (`first_day.inputs`) unless
they are called nowhere.
"""

__all__ = ["MISTAKES"]

Mistake = tuple[str, int, str]

MISTAKES: dict[str, list[Mistake]] = {
    "all": [
        ("PROG", 2, "Missing subcommand"),
        ("PROG wlak", 2, "Unrecognized options: wlak"),
        ("PROG demo --fulll", 2, "Perhaps you meant"),
        ("PROG demo --out events.csv", 1, "events.csv: expected a folder, got a file"),
    ],
    "adaqp": [
        ("PROG train nowhere", 1, "nowhere holds no partition; make one"),
        ("PROG train parts --lr fast", 2, "Error parsing --lr"),
        ("PROG train parts --policy.name exakt", 2, "invalid choice 'exakt'"),
        (
            "PROG partition nowhere.npz --out more",
            1,
            "nowhere.npz: expected a file or folder, there",
        ),
        ("PROG partition empty.csv --out more", 1, "empty.csv: expected .pt"),
        ("PROG partition sbm --parts 0 --out more", 1, "parts: expected"),
        ("PROG plan parts --rate fast", 1, "expected a rate"),
        ("PROG plan parts --links nowhere.json", 1, "writes, there is nothing; check the path"),
    ],
    "bytecheckpoint": [
        (
            "PROG ls nowhere",
            1,
            "expected a run's folder of steps or a checkpoint, there is nothing",
        ),
        ("PROG inspect nowhere", 1, "there is nothing"),
        ("PROG diff nowhere elsewhere", 1, "there is nothing"),
        ("PROG convert nowhere new --to onnx", 2, "invalid choice 'onnx'"),
        ("PROG convert events.csv new --to torch", 1, "events.csv"),
    ],
    "gnnflow": [
        ("PROG train nowhere.csv", 1, "nowhere.csv: expected a file or folder, there is nothing"),
        ("PROG train empty.csv", 1, "empty.csv: expected a table, the file is empty"),
        ("PROG train other.csv", 1, "expected column"),
        ("PROG train events.csv --epochs 0", 2, "epochs: expected 1 or more, got 0"),
        ("PROG train events.csv --placement cuda", 1, "cuda"),
        ("PROG train zipf:10", 1, "expected zipf:NODES:EVENTS"),
        ("PROG continual events.csv --every soon", 1, "every: expected"),
    ],
    "heta": [
        ("PROG plan flihgts", 1, "graph: expected flights[:TASK[:DAYS]]"),
        ("PROG plan flights:late51", 1, "task: expected one of late15"),
        ("PROG plan nowhere.yaml", 1, "nowhere.yaml: expected a graph's tables as YAML, there is"),
        ("PROG plan nowhere.py:graph", 1, "graph: expected file.py:function or module:function"),
        ("PROG plan flights:late15 --strategy rfa", 2, "strategy: expected one of auto, raf"),
        ("PROG plan flights:late15 --network-rate fast", 2, "expected a rate"),
        ("PROG partition flights --parts 0 --out more", 2, "parts: expected 1 or more, got 0"),
        ("PROG train nowhere", 1, "nowhere: expected a folder that `heta partition` wrote"),
        ("PROG train parts --model rgnc", 1, "model: expected one of rgcn"),
        ("PROG train parts --epochs 0", 1, "epochs: expected 1 or more, got 0"),
        ("PROG train parts --lr fast", 2, "Error parsing --lr"),
        (
            "PROG train parts --recipe nowhere.yaml",
            1,
            "expected a recipe as YAML, there is nothing",
        ),
        (
            "PROG train parts --ranks 3",
            1,
            "expected a multiple of the plan's 2 parts as ranks, got 3",
        ),
        ("PROG predict parts --checkpoint nowhere", 1, "expected a run that `heta train"),
        ("PROG simulate mag", 1, "published graph: expected one of mag240m"),
    ],
    "hybridflow": [
        ("PROG train nowhere", 1, "nowhere: expected a recipe as YAML, or one of"),
        ("PROG train events.parquet", 1, "expected a recipe as YAML, got bytes that are no UTF-8"),
        (
            "PROG train grpo-sort --set model=nowhere",
            1,
            "expected a model's folder with config.json",
        ),
        ("PROG train grpo-sort --set stesp=3", 1, "there is no such key; did you mean 'steps'"),
        ("PROG train grpo-sort --set steps=-1", 1, "steps: expected"),
        ("PROG train grpo-sort --set steps", 1, "KEY=VALUE"),
        ("PROG recipe show", 2, "expected a file or a name to show, got none"),
        ("PROG map --gpus 13", 1, "gpus: expected"),
        ("PROG export grpo-sort --checkpoint nowhere --out new", 1, "expected a checkpoint"),
        (
            "PROG export grpo-sort --checkpoint run1 --out model",
            1,
            "expected an empty folder or none",
        ),
    ],
    "hydraulis": [
        ("PROG plan nowhere.txt --ranks 4 --cap 100", 1, "expected lengths, a number on each line"),
        ("PROG plan lengths.txt --ranks 0 --cap 8192", 1, "expected ranks and documents, got 0"),
        ("PROG plan lengths.txt --ranks 4 --cap 1", 1, "at most 4 tokens"),
        (
            "PROG compare --model nowhere",
            1,
            "expected a model's folder with config.json, or one of",
        ),
        ("PROG compare --device H1000", 1, "got 'H1000'"),
    ],
    "llmpq": [
        (
            "PROG plan nowhere --cluster cluster.yaml --prompts prompts.jsonl",
            1,
            "nowhere: expected a model's folder with config.json, there is nothing",
        ),
        (
            "PROG plan ./model --cluster nowhere.yaml --prompts prompts.jsonl",
            1,
            "nowhere.yaml: expected a cluster as YAML, there is nothing",
        ),
        (
            "PROG plan ./model --cluster cluster.yaml --prompts nowhere.jsonl",
            1,
            "nowhere.jsonl: expected prompts as JSON Lines, there is nothing",
        ),
        ("PROG simulate nowhere.json", 1, "nowhere.json: expected a plan, there is nothing"),
        ("PROG simulate events.csv", 1, "events.csv: expected a plan as JSON"),
        ("PROG export nowhere.json --to onnx", 2, "invalid choice 'onnx'"),
    ],
    "memo": [
        ("PROG fit --model nowhere", 1, "expected a model's folder with config.json, or one of"),
        ("PROG fit --model llama-7b --device H1000", 1, "got 'H1000'"),
        ("PROG fit --model llama-7b --store much", 1, "budget.store: expected a size such as"),
        ("PROG pack nowhere.pickle", 1, "expected a CUDA memory snapshot, there is nothing"),
        ("PROG replay events.csv", 1, "expected columns id, lower, upper, size"),
        ("PROG replay events.parquet", 1, "expected a pickled snapshot"),
    ],
    "mspipe": [
        ("PROG train nowhere.csv", 1, "nowhere.csv: expected a file or folder, there is nothing"),
        ("PROG train empty.csv", 1, "empty.csv: expected a table, the file is empty"),
        ("PROG train other.csv", 1, "expected column"),
        ("PROG train events.csv --epochs 0", 2, "epochs: expected 1 or more, got 0"),
        ("PROG train events.csv --device cuda", 1, "device: expected"),
        ("PROG train events.csv --place tcp://127.0.0.1:9", 1, "127.0.0.1:9"),
        ("PROG plan --stages 1,2", 1, "memory, train, write), got 2; give all five"),
    ],
    "diffusionpipe": [
        (
            "PROG profile --build build",
            1,
            "build: expected module:function or file.py:function that",
        ),
        ("PROG profile --build nowhere.py:build", 1, "build: expected module:function or file.py"),
        ("PROG profile --bulid jobs.py:use_batch_norm", 2, "Unrecognized options"),
        ("PROG profile --build jobs.py:hand_over_a_unet", 1, "pipeline: expected one of Stable"),
        (
            "PROG profile --build jobs.py:use_batch_norm",
            1,
            "expected no BatchNorm in training mode",
        ),
        (
            "PROG profile --build jobs.py:freeze_nothing",
            1,
            "expected a function without weights that",
        ),
        ("PROG profile --build jobs.py:mix_samples", 1, "expected row i to need row i only"),
        (
            "PROG plan --cluster nowhere.yaml --batch-size 16",
            1,
            "a cluster as YAML, there is nothing",
        ),
        ("PROG plan --cluster events.csv --batch-size 16", 1, "cluster: expected a mapping"),
        (
            "PROG plan --cluster cluster.yaml --batch-size 16 --num-micro-batches 3",
            1,
            "num_micro_batches: expected a divisor of batch_size 16, one of 1, 2, 4, 8, 16, got 3",
        ),
        ("PROG plan --cluster cluster.yaml --batch-size 16 --placement ring", 1, "got 'ring'"),
        ("PROG plan --cluster cluster.yaml", 2, "--batch-size"),
        ("PROG trace --cluster cluster.yaml --plan nowhere.json", 1, "expected a plan, there is"),
        ("PROG train --build jobs.py:train_alone --num-steps 1", 1, "got one for 2; start as many"),
        (
            "PROG simulate --forward 1 1 --backward 2 --num-micro-batches 2",
            1,
            "expected forward_s and backward_s of the same stages",
        ),
    ],
    "lancet": [
        ("PROG profile --build build", 1, "build: expected module:function or file.py:function"),
        ("PROG profile --build nowhere.py:build", 1, "returns a model and a batch, got"),
        ("PROG profile --biuld jobs.py:build", 2, "Unrecognized options"),
        ("PROG explain nowhere.json", 1, "expected a plan, there is nothing"),
        ("PROG explain events.csv", 1, "events.csv: expected a plan as JSON"),
        ("PROG simulate nowhere.json --communication fast", 2, "Error parsing --communication"),
        ("PROG plan nowhere.json --network 0", 1, "expected a plan, there is nothing"),
    ],
    "qsync": [
        ("PROG plan --build build", 1, "build: expected module:function or file.py:function, got"),
        ("PROG plan --build nowhere.py:build", 1, "build: expected a function 'nowhere.py:build'"),
        ("PROG plan --bulid train.py:build", 2, "--build STR"),
        ("PROG diagnose", 1, "expected those of all ranks, at least two files, got none"),
        (
            "PROG diagnose rank0.json rank1.json",
            1,
            "rank0.json: expected a trace of torch.profiler, there is nothing",
        ),
        ("PROG diagnose events.csv other.csv", 1, "expected a complete trace as JSON"),
        (
            "PROG diagnose events.parquet other.csv",
            1,
            "expected a trace of torch.profiler, got bytes",
        ),
        (
            "PROG replay rank0.json --rank-speed fast",
            1,
            "rank_speed: expected a name and its factor",
        ),
    ],
    "swift": [
        ("PROG run nowhere.py", 1, "script: expected a Python file, got nowhere.py"),
        ("PROG run -n 0 train.py", 2, "expected -n of 1 or more"),
        ("PROG status --at 127.0.0.1:9", 1, "127.0.0.1:9"),
        ("PROG plan-logs nowhere.json --budget 2GB", 1, "expected a profile, there is nothing"),
        ("PROG plan-logs events.parquet --budget 2GB", 1, "got bytes that are no UTF-8 text"),
        ("PROG verify-log nowhere", 1, "nowhere"),
    ],
}
