"""Trains TGN on a table of events and tests it beside EdgeBank, which only remembers pairs.

    python train_on_your_events.py events.csv --epochs 3
    python train_on_your_events.py                               # a small generated stream
    python train_on_your_events.py --place tcp://10.0.0.2:7000   # memory on another machine,
                                                                 # mspipe serve-memory runs there

The table has columns src, dst and t (other names: --src user --dst item --t when): ids, which may be
texts, and times in seconds or dates; other columns of numbers become features of the events.
"""

import argparse

import numpy as np
import torch

import mspipe as ms


def generate_visits(num_events: int = 1_500) -> ms.Events:
    """Customers 0 to 39 visit shops 40 to 59, mostly of their own quarter of the town."""
    random = np.random.default_rng(0)
    customer = random.integers(0, 40, num_events)
    quarter = np.where(random.random(num_events) < 0.9, customer % 4, random.integers(0, 4))
    shop = 40 + 5 * quarter + random.integers(0, 5, num_events)
    # What was bought tells the quarter; memory has to keep it for the next visit.
    bought = np.eye(4, dtype=np.float32)[quarter]
    return ms.Events(customer, shop, np.arange(num_events), bought, label="generated visits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("events", nargs="?", help="a Parquet or CSV file")
    parser.add_argument("--place", default="cpu", help="where memory lies")
    parser.add_argument("--dim", type=int, default=16, help="numbers of a node's state")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=4)
    for name in ("src", "dst", "t"):
        parser.add_argument(f"--{name}", default=name, help="name of the column")
    arguments = parser.parse_args()
    events = generate_visits()
    if arguments.events:
        names = {"src": arguments.src, "dst": arguments.dst, "t": arguments.t}
        events = ms.data.read_events(arguments.events, **names)
    train, test = events.split(0.8)

    torch.manual_seed(0)
    model = ms.models.TGN(arguments.dim, events.edge_dim, fanout=5)
    memory = ms.NodeMemory(events.num_nodes, model.dim, model.mail_dim, place=arguments.place)
    # mode="forward" is the default: transfers overlap with training and results stay exact.
    pipe = ms.Pipeline(model, memory, ms.Sampler(events, [model.fanout]), events.features)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    settings = ms.Settings(epochs=arguments.epochs, batch_size=arguments.batch_size)
    for epoch in ms.fit(pipe, optimizer, train, settings=settings, progress=False):
        print(f"epoch {epoch.index}: loss {epoch.loss:.6f}")
    print(pipe.report())  # what the stages took, and what training waited for

    # Memory is now as of the first test event, as evaluate needs it, and it stays so.
    scores = ms.evaluate(pipe, test, history=train, num_negatives=10)
    print("TGN: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
    bank = ms.EdgeBank()
    bank.remember(train)
    known = bank.score(test.src, test.dst, test.t).float().mean()
    print(f"EdgeBank: has seen {known:.0%} of the test's pairs")
    memory.close()


if __name__ == "__main__":
    main()
