"""Trains TGAT on a table of events, increment by increment, and prints how well it predicts each.

    python train_on_your_events.py events.csv --every 1D
    python train_on_your_events.py                # a small generated stream

The table has columns src, dst and t (other names: --src user --dst item --t when): ids, which may be
texts, and times in seconds or dates; other columns of numbers become edge features.
"""

import argparse

import numpy as np
import torch

import gnnflow as gf


def generate_visits(num_events: int = 2_400) -> gf.Events:
    """Customers 0 to 39 visit shops 40 to 59, mostly of their own quarter of the town."""
    random = np.random.default_rng(0)
    customer = random.integers(0, 40, num_events)
    shop = random.integers(0, 5, num_events) + 40 + 5 * (customer % 4)
    is_elsewhere = random.random(num_events) < 0.1
    shop[is_elsewhere] = random.integers(40, 60, int(is_elsewhere.sum()))
    return gf.Events(customer, shop, np.arange(num_events) * 60, label="generated visits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("events", nargs="?", help="a Parquet or CSV file, or a TGB folder")
    parser.add_argument(
        "--every", default="300", help="increment: a time (1D) or a number of events"
    )
    parser.add_argument("--dim", type=int, default=32, help="columns of embeddings")
    for name in ("src", "dst", "t"):
        parser.add_argument(f"--{name}", default=name, help="name of the column")
    arguments = parser.parse_args()
    events = generate_visits()
    if arguments.events:
        names = {"src": arguments.src, "dst": arguments.dst, "t": arguments.t}
        events = gf.data.read_events(arguments.events, **names)
    every = int(arguments.every) if arguments.every.isdecimal() else arguments.every

    torch.manual_seed(0)
    # A fixed random code tells nodes apart; with features of your own, give those.
    codes = torch.randn(events.num_nodes, arguments.dim)
    features = gf.FeatureStore(node=codes, edge=events.rows_by_id())
    model = gf.models.TGAT(
        arguments.dim, node_dim=arguments.dim, edge_dim=features.edge_dim, num_layers=1
    )
    graph = gf.TemporalGraph(undirected=True)  # a shop's neighbours are its customers
    trainer = gf.ContinualTrainer(
        model,
        graph,
        gf.TemporalSampler(graph, [10]),  # one hop: as many fanouts as the model has layers
        features,
        warmup=0.3,
        every=every,
        batch_size=100,
        epochs=2,
        warmup_epochs=5,
        optimizer=lambda params: torch.optim.Adam(params, lr=3e-3),
        fresh_optimizer=False,
        progress=False,
    )
    for result in trainer.run(events):
        # Scored before it is trained on: this is what the model would have done in production.
        print(
            f"round {result.index}: {result.num_events} events, AP {result.ap:.3f}, "
            f"MRR {result.mrr:.3f}, {result.total_s:.2f} s"
        )


if __name__ == "__main__":
    main()
