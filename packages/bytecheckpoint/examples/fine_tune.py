"""Starts from the weights of a checkpoint, with a new head, and exports the result.

python fine_tune.py --base /models/somebodys-model      # a run, a step, DCP's or Hugging Face's folder
"""

import argparse
from pathlib import Path

import torch

import bytecheckpoint as bcp


def make_model(num_outputs: int) -> torch.nn.Module:
    """A body and a head; yours in earnest."""
    body = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh())
    return torch.nn.ModuleDict({"body": body, "head": torch.nn.Linear(32, num_outputs)})


def make_base(path: Path) -> None:
    """Writes weights to start from, where none were given."""
    torch.manual_seed(7)
    bcp.save(path, {"model": make_model(10)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", help="checkpoint to start from; made when left out")
    parser.add_argument(
        "--out", type=Path, default=Path("report/bytecheckpoint/tuned"), help="folder of the result"
    )
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    base = arguments.base or "report/bytecheckpoint/base"
    if not arguments.base and not Path(base).exists():
        make_base(Path(base))

    torch.manual_seed(0)
    model = make_model(2)
    # Only the body's names are asked for: the old head has another shape, and stays unread.
    report = bcp.load(base, {"model": {"body": model["body"]}}, strict=False)
    print(f"loaded {report.num_bytes} bytes, left {', '.join(report.unexpected)}")

    x = torch.randn(256, 6)
    labels = (x.sum(1) > 0).long()
    model["body"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model["head"].parameters(), 5e-2)
    for _ in range(arguments.steps):
        logits = model["head"](model["body"](x))
        loss = torch.nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (logits.argmax(1) == labels).float().mean().item()
    print(f"accuracy {accuracy:.3f}")

    bcp.save(arguments.out, {"model": model}, overwrite=True)
    with bcp.open(arguments.out) as saved, bcp.open(base) as before:
        name = "model.body.0.weight"
        print(f"body unchanged: {torch.equal(saved[name][:], before[name][:])}")
    print(f"for Hugging Face: bytecheckpoint convert {arguments.out} hub --to safetensors")


if __name__ == "__main__":
    main()
