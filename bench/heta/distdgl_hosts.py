"""Starts DistDGL's servers and trainers in the hosts of a lab, and takes turns with them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from shared.comms import NetLab

SCRIPT = Path(__file__).with_name("distdgl.py")


class DistDgl:
    """DistDGL on one server and one trainer a host; a context manager.

    Args:
        lab: an entered lab.
        folder: what `distdgl.py prepare` wrote.
        batch_size: seeds of a step over all trainers.
        num_samplers: sampler processes of a trainer; 0 samples in the trainer.
        port: of the servers; the trainers' own rendezvous is on the next one.
    """

    def __init__(
        self, lab: NetLab, folder: Path, batch_size: int, num_samplers: int, port: int
    ) -> None:
        self._trainers: list[subprocess.Popen[str]] = []
        self._servers: list[subprocess.Popen[str]] = []
        config = folder / f"hosts-{port}.txt"
        config.write_text("".join(f"{lab.address(h)} {port}\n" for h in range(lab.hosts)))
        common = {
            **os.environ,
            "DGL_DIST_MODE": "distributed",
            "DGL_IP_CONFIG": str(config),
            "DGL_CONF_PATH": str(folder / "graph.json"),
            "DGL_NUM_SERVER": "1",
            "DGL_NUM_SAMPLER": str(num_samplers),
            "DGL_NUM_CLIENT": str(lab.hosts * (1 + num_samplers)),
            "DGL_KEEP_ALIVE": "0",
            "DGL_GRAPH_FORMAT": "csc",
            "DGLBACKEND": "pytorch",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "veth0",
            "HETA_BATCH": str(batch_size),
        }
        log = (folder / f"log-{port}.txt").open("w")
        master = f"{lab.address(0)}:{port + 1}"
        for host in range(lab.hosts):
            words = [*lab.command(host), sys.executable, str(SCRIPT), "work", str(folder)]
            words += [str(host), str(lab.hosts), master]
            for role in ("server", "client"):
                child = subprocess.Popen(
                    words, env={**common, "DGL_ROLE": role, "DGL_SERVER_ID": str(host)},
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                )  # fmt: skip
                (self._servers if role == "server" else self._trainers).append(child)
        self.num_train = [self._read(child)["ready"] for child in self._trainers]

    def steps(self, count: int) -> tuple[list[float], list[list[float]]]:
        """Trains for some steps; seconds of the slowest trainer and losses of each."""
        for child in self._trainers:
            assert child.stdin is not None, "started with pipes"
            child.stdin.write(json.dumps({"steps": count}) + "\n")
            child.stdin.flush()
        answers = [self._read(child) for child in self._trainers]
        slowest = [max(times) for times in zip(*(a["seconds"] for a in answers), strict=True)]
        return slowest, [a["losses"] for a in answers]

    def _read(self, child: subprocess.Popen[str]) -> dict[str, Any]:
        assert child.stdout is not None, "started with pipes"
        for line in child.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"a trainer of DistDGL ended with status {child.wait()}; see its log")

    def __enter__(self) -> "DistDgl":
        return self

    def __exit__(self, *error: object) -> None:
        for child in (*self._trainers, *self._servers):
            child.kill()
        for child in (*self._trainers, *self._servers):
            child.wait()
