"""Mistakes that a user makes on the first day, with the exit status and the words to expect.

`PROG` is the package's program. Files that these lines name are there (`first_day.inputs`) unless
they are called nowhere.
"""

__all__ = ["MISTAKES"]

Mistake = tuple[str, int, str]

MISTAKES: dict[str, list[Mistake]] = {
    "all": [
        ("PROG", 2, "subcommand"),
        ("PROG wlak", 2, "wlak"),
        ("PROG demo --fulll", 2, "--full"),
        ("PROG demo --out events.csv", 1, "events.csv"),
    ],
    "adaqp": [
        ("PROG train nowhere", 1, "nowhere"),
        ("PROG train parts --lr fast", 2, "fast"),
        ("PROG train parts --policy.name exakt", 2, "exact"),
        ("PROG partition nowhere.npz --out more", 1, "nowhere.npz"),
        ("PROG partition sbm --parts 0 --out more", 1, "parts"),
        ("PROG plan parts --rate fast", 1, "fast"),
    ],
    "bytecheckpoint": [
        ("PROG ls nowhere", 1, "nowhere"),
        ("PROG inspect nowhere", 1, "nowhere"),
        ("PROG diff nowhere elsewhere", 1, "nowhere"),
        ("PROG convert nowhere new --to onnx", 2, "safetensors"),
        ("PROG convert events.csv new --to torch", 1, "events.csv"),
    ],
    "gnnflow": [
        ("PROG train nowhere.csv", 1, "nowhere.csv"),
        ("PROG train empty.csv", 1, "empty.csv"),
        ("PROG train other.csv", 1, "src"),
        ("PROG train events.csv --epochs 0", 1, "epochs"),
        ("PROG train events.csv --placement cuda", 1, "cuda"),
        ("PROG train zipf:10", 1, "zipf"),
        ("PROG continual events.csv --every soon", 1, "soon"),
    ],
    "hybridflow": [
        ("PROG train nowhere", 1, "nowhere"),
        ("PROG train grpo-sort --set stesp=3", 1, "steps"),
        ("PROG train grpo-sort --set steps=-1", 1, "steps"),
        ("PROG train grpo-sort --set steps", 1, "KEY=VALUE"),
        ("PROG map --gpus 13", 1, "gpus"),
        ("PROG export grpo-sort --checkpoint nowhere --out new", 1, "nowhere"),
    ],
    "hydraulis": [
        ("PROG plan nowhere.txt --ranks 4 --cap 100", 1, "nowhere.txt"),
        ("PROG plan lengths.txt --ranks 0 --cap 8192", 1, "rank"),
        ("PROG plan lengths.txt --ranks 4 --cap 1", 1, "at most 4 tokens"),
        ("PROG compare --model nowhere", 1, "nowhere"),
        ("PROG compare --device H1000", 1, "H100"),
    ],
    "llmpq": [
        ("PROG plan nowhere --cluster cluster.yaml --prompts prompts.jsonl", 1, "nowhere"),
        ("PROG plan ./model --cluster nowhere.yaml --prompts prompts.jsonl", 1, "nowhere.yaml"),
        ("PROG plan ./model --cluster cluster.yaml --prompts nowhere.jsonl", 1, "nowhere.jsonl"),
        ("PROG simulate nowhere.json", 1, "nowhere.json"),
        ("PROG export nowhere.json --to onnx", 2, "onnx"),
    ],
    "memo": [
        ("PROG fit --model nowhere", 1, "nowhere"),
        ("PROG fit --model llama-7b --device H1000", 1, "H100"),
        ("PROG fit --model llama-7b --store much", 1, "much"),
        ("PROG pack nowhere.pickle", 1, "nowhere.pickle"),
        ("PROG replay events.csv", 1, "events.csv"),
    ],
    "mspipe": [
        ("PROG train nowhere.csv", 1, "nowhere.csv"),
        ("PROG train empty.csv", 1, "empty.csv"),
        ("PROG train other.csv", 1, "src"),
        ("PROG train events.csv --device cuda", 1, "cuda"),
        ("PROG train events.csv --place tcp://127.0.0.1:9", 1, "127.0.0.1"),
        ("PROG plan --stages 1,2", 1, "five"),
    ],
    "swift": [
        ("PROG run nowhere.py", 1, "nowhere.py"),
        ("PROG run -n 0 train.py", 1, "-n"),
        ("PROG status --at 127.0.0.1:9", 1, "127.0.0.1"),
        ("PROG plan-logs nowhere.json --budget 2GB", 1, "nowhere.json"),
        ("PROG verify-log nowhere", 1, "nowhere"),
    ],
}
