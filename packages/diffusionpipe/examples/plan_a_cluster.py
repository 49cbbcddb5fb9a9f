"""Plans a job for clusters that are not here: two hosts, joined by networks of several rates.

    python plan_a_cluster.py
    python plan_a_cluster.py --rates 100mbit 1gbit 10gbit --batch-size 64

Seconds of layers are measured on this machine; what a step takes on a cluster is predicted. Profile
on the devices that will train.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

import diffusionpipe as dp
from diffusionpipe.data import build_pipeline, iterate_batches, load_digits
from shared.topology import Cluster, Link
from shared.units import format_s, parse_rate

HOSTS = Path(__file__).with_name("two_hosts.yaml")


def main() -> None:
    """Profiles once, then plans for each network."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cluster", type=Path, default=HOSTS, help="hosts and devices, as YAML")
    parser.add_argument("--rates", nargs="+", default=["20mbit", "1gbit", "100gbit"])
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a step, all ranks'")
    parser.add_argument("--image-size", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as a rank of two would have

    job = dp.Job.from_pipeline(build_pipeline(image_size=arguments.image_size))
    batch = next(iterate_batches(load_digits(arguments.image_size), arguments.batch_size))
    profile = dp.profile(job, batch)

    hosts = Cluster.from_yaml(arguments.cluster)
    for rate in arguments.rates:
        network = Link.from_rate(parse_rate(rate), alpha_s=2e-4)
        plan = dp.plan(
            job, profile, replace(hosts, network=network), batch_size=arguments.batch_size
        )
        print(f"{rate}: {plan.placement}, {format_s(plan.predicted_s)} a step (predicted)")
    print()
    print(plan.explain())


if __name__ == "__main__":
    main()
