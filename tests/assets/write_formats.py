"""Writes one small file or folder of every format that the packages save and read again.

All of it was written with version 0.1.0, through public names and command lines only, and lies in one
zip a package (`adaqp.zip`, `bytecheckpoint.zip`, `gnnflow.zip`, `heta.zip`, `hybridflow.zip`,
`mspipe.zip`, `lancet.zip`, `shared.zip`). `expected.json` holds what was in memory then, and how a run without interruption went
on; tensors stand there as hashes of their bytes. `tests/test_formats.py` reads everything and compares.

- `bytecheckpoint`: `run`, step 3 of a run of two ranks: a module, AdamW, a DTensor and a flat shard cut
  in two, values that JSON has not, states of random generators, and a `LoaderState`.
- `adaqp`: `parts`, a graph cut in two; `checkpoint`, a trainer's after epoch 3, with the traces of the
  adaptive policy; `links.json`, `assignment.json` and `solution.json`.
- `gnnflow`: `graph.safetensors`, an undirected graph whose oldest edges have expired; `node.npy` and
  `edge.safetensors`, features; `continual`, a continual trainer's checkpoint after round 2, with its
  optimizer; `parts.npy`, what `gnnflow partition` writes.
- `heta`: `parts`, a graph's relations on two hosts, and `run`, what `heta train` saves after epoch 2.
- `mspipe`: `training`, the checkpoint of a run interrupted in its second pass; `memory.safetensors`, a
  node memory.
- `hybridflow`: `run`, what `hybridflow train grpo-sort` on two tensor-parallel ranks saves after step 2,
  of the weights in `model`; `extra`, a checkpoint of batches; `mapping.json`, a mapping; `placed.yaml`,
  a recipe with its models placed.
- `lancet`: `plan.json`, what a backend saves after a step of a layer of experts on two ranks.
- `shared`: `demo.json`, a demo's claims, and `cluster.yaml`, a cluster.

To write them anew, run `python tests/assets/write_formats.py` where the packages are installed; only a
change of a format's version needs it. `expected.json` repeats to the byte on one machine; the archives
do not, since seconds and random ids of checkpoints are in them. One file, though long, so that whoever
looks at an asset finds at one place what it was made from.
"""

import hashlib
import json
import os
import random
import runpy
import shutil
import sys
import tempfile
import zipfile
from contextlib import chdir, redirect_stdout, suppress
from datetime import timedelta
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import adaqp
import bytecheckpoint as bcp
import gnnflow
import heta
import hybridflow as hy
import lancet
import mspipe
from shared.claims import Claim, write_demo
from shared.comms import Group, RankPool
from shared.topology import Cluster, Device, Link

HERE = Path(__file__).parent
PACKAGES = (
    "bytecheckpoint",
    "adaqp",
    "gnnflow",
    "heta",
    "mspipe",
    "hybridflow",
    "lancet",
    "shared",
)
TIMEOUT = timedelta(seconds=60)


def digest(tensor: Tensor) -> str:
    """Type, shape and a hash of a tensor's elements."""
    plain = tensor.detach().cpu().contiguous()
    hashed = hashlib.sha256(plain.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return f"{str(plain.dtype).removeprefix('torch.')}{list(plain.shape)} {hashed}"


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Hashes of tensors by name."""
    return {name: digest(tensor) for name, tensor in tensors.items()}


def run_command(package: str, *arguments: object) -> tuple[int, str]:
    """Runs a package's command line in this process; its exit status and what it printed."""
    before, printed = sys.argv, StringIO()
    sys.argv = [package, *map(str, arguments)]
    try:
        with redirect_stdout(printed):
            runpy.run_module(package, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0), printed.getvalue()
    finally:
        sys.argv = before
    return 0, printed.getvalue()


# -- bytecheckpoint -------------------------------------------------------------------------

TABLE = torch.arange(15, dtype=torch.float64).view(5, 3) / 7
FLAT = torch.arange(12, dtype=torch.bfloat16).view(4, 3)
EXTRA = {
    "step": 3,
    "tuple": (1, "two", None),
    "bytes": b"\x00\xff",
    "infinite": float("-inf"),
    "complex": 1.5 - 2j,
    "by number": {3: "three", "$": [True]},
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
}


def bytecheckpoint_state(rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """A state of that many ranks before it is trained or loaded."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    table, flat = torch.zeros_like(TABLE), torch.zeros_like(FLAT)
    state: dict[str, Any] = {"table": table, "flat": flat}
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        half = FLAT.numel() // world_size
        mine = torch.zeros(half, dtype=FLAT.dtype)
        state = {
            "table": distribute_tensor(table, mesh, [Shard(0)]),
            "flat": bcp.FlatShard(mine, FLAT.shape, rank * half),
        }
    return state | {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "data": bcp.LoaderState(10, dataset="ten", seed=3, rank=rank, world_size=world_size),
        "extra": dict.fromkeys(EXTRA),
        "rng": bcp.rng_state(),
    }


def draw_numbers() -> list[float]:
    """What Python's, NumPy's and torch's generators give next."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def _save_bytecheckpoint(folder: str) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    state = bytecheckpoint_state(rank, 2)
    model, optimizer = state["model"], state["optimizer"]
    for step in range(3):
        model(torch.full((2, 4), 0.5 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    local = state["table"].to_local()
    local.copy_(TABLE[:3] if rank == 0 else TABLE[3:])
    shard = state["flat"]
    shard.tensor.copy_(FLAT.flatten()[shard.start : shard.start + len(shard.tensor)])
    seen = list(islice(state["data"], 2))
    state["extra"] = EXTRA
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + rank)
    with bcp.Checkpointer(folder) as checkpointer:
        checkpointer.save(3, state)
    moments = {
        f"{at}.{key}": value
        for at, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
    }
    return {
        "model": digests(model.state_dict()),
        "optimizer": digests(moments),
        "numbers": draw_numbers(),
        "seen": seen,
    }


def write_bytecheckpoint(folder: Path, pool: RankPool) -> dict[str, Any]:
    """A run's folder; what was in it, and samples that no rank has seen yet."""
    found = pool.run(_save_bytecheckpoint, str(folder / "run")).results
    seen = [index for one in found for index in one["seen"]]
    return {
        "model": found[0]["model"],
        "optimizer": found[0]["optimizer"],
        "numbers": [one["numbers"] for one in found],
        "left": sorted(set(range(10)) - set(seen)),
    }


# -- adaqp ----------------------------------------------------------------------------------

LINKS = (1.25e7, 2e-4)


def adaqp_graph() -> adaqp.Graph:
    """A graph of four blocks."""
    return adaqp.data.sbm(60, blocks=4, degree=5, feat=6, seed=3)


def adaqp_policy() -> adaqp.Adaptive:
    """Widths are chosen after two epochs, and again after six."""
    return adaqp.Adaptive(every=6, first_at=2, group_size=10)


def adaqp_trainer(dg: adaqp.DistGraph) -> adaqp.Trainer:
    """A GCN of two layers on a rank's share."""
    torch.manual_seed(0)
    model = adaqp.nn.gcn(dg, [dg.feat.shape[1], 5, dg.num_classes], dropout=0.5)
    return adaqp.Trainer(dg, model, torch.optim.Adam(model.parameters(), 1e-2), seed=4)


def adaqp_assignment() -> adaqp.Assignment:
    """Three groups of messages on two channels."""
    return adaqp.Assignment(
        beta=[4.0, 1.0, 0.25],
        channel=[0, 1, 1],
        bytes=[[10, 20, 40], [30, 60, 120], [5, 10, 20]],
        bits=[2, 4, 8],
        round_of=[0, 0],
        s_per_byte=[1e-3, 2e-3],
        latency_s=[1e-4, 2e-4],
        lam=0.5,
        hidden_s=0.01,
    )


def _train_adaqp(parts: str, checkpoint: str) -> dict[str, Any]:
    dg = adaqp.load(parts)
    with dg.messages(adaqp_policy(), links=adaqp.LinkTable.uniform(2, *LINKS)):
        trainer = adaqp_trainer(dg)
        trainer.fit(3)
        trainer.save(checkpoint)
        model = digests(trainer.model.state_dict())
        losses = list(trainer.fit(4).loss)
    return {"model": model, "losses": losses, "nodes": dg.global_ids.tolist()}


def write_adaqp(folder: Path, pool: RankPool) -> dict[str, Any]:
    """A partition, a checkpoint of training on it, and JSON; losses, and whose each node is."""
    adaqp.partition(adaqp_graph(), 2, "random", out=folder / "parts", seed=1)
    found = pool.run(_train_adaqp, str(folder / "parts"), str(folder / "checkpoint")).results
    problem = adaqp_assignment()
    solution = adaqp.assign(problem)
    (folder / "links.json").write_text(adaqp.LinkTable.uniform(2, *LINKS).to_json())
    (folder / "assignment.json").write_text(problem.to_json())
    (folder / "solution.json").write_text(solution.to_json())
    return found[0] | {
        "nodes": [one["nodes"] for one in found],
        "bits": solution.bits.tolist(),
        "objective": solution.objective,
    }


# -- gnnflow --------------------------------------------------------------------------------

NODE_ROWS = torch.arange(60, dtype=torch.float32).view(20, 3) / 10
ROOTS, ROOT_TIMES = [0, 3, 13, 19], [5000, 6000, 7000, 7200]


def gnnflow_events() -> gnnflow.Events:
    """120 events a minute apart, each with two numbers."""
    draw = np.random.default_rng(5)
    src, dst = draw.integers(0, 12, 120), draw.integers(12, 20, 120)
    rows = draw.standard_normal((120, 2)).astype(np.float32)
    return gnnflow.Events(src, dst, 60 * np.arange(120) + 1, features=rows)


def gnnflow_neighbors(graph: gnnflow.TemporalGraph) -> dict[str, list[list[int]]]:
    """What two samplers find of the same roots: rows, nodes, times and ids of edges, hop by hop."""
    found = {}
    for policy in ("recent", "uniform"):
        sampler = gnnflow.TemporalSampler(graph, [3, 2], policy=policy, seed=7)
        blocks = sampler.sample(ROOTS, ROOT_TIMES).blocks()
        found[policy] = [
            column.tolist()
            for block in blocks
            for column in (block.row, block.nodes, block.times, block.eids)
        ]
    return found


def gnnflow_trainer(checkpoint: Path | None) -> gnnflow.ContinualTrainer:
    """A trainer that keeps its optimizer from round to round."""
    torch.manual_seed(1)
    graph = gnnflow.TemporalGraph(undirected=True)
    return gnnflow.ContinualTrainer(
        gnnflow.models.GraphSAGE(dim=6, node_dim=3, edge_dim=2, num_layers=1),
        graph,
        gnnflow.TemporalSampler(graph, [4], policy="uniform", seed=2),
        gnnflow.FeatureStore(node=NODE_ROWS, edge=gnnflow_events().features),
        every=21,
        replay=0.2,
        batch_size=16,
        fresh_optimizer=False,
        seed=3,
        checkpoint=checkpoint,
        progress=False,
    )


def gnnflow_round(found: gnnflow.Round) -> list[float]:
    """What a round decided, without the seconds it took."""
    names = ("index", "time", "num_events", "num_replayed", "loss", "ap", "auc", "mrr")
    return [getattr(found, name) for name in names]


def write_gnnflow(folder: Path) -> dict[str, Any]:
    """A graph, features, a continual checkpoint and a partition."""
    events = gnnflow_events()
    graph = gnnflow.TemporalGraph(undirected=True, min_block=2, max_block=8)
    for first in range(0, 120, 40):
        one = events[first : first + 40]
        graph.add_edges(one.src, one.dst, one.t, one.eid)
    graph.expire(before=600)
    graph.save(folder / "graph.safetensors")
    np.save(folder / "node.npy", NODE_ROWS.numpy())
    assert events.features is not None
    save_file({"edge": events.features}, folder / "edge.safetensors")
    trainer = gnnflow_trainer(folder / "continual")
    list(islice(trainer.run(events), 2))
    columns = (column.tolist() for column in (events.src, events.dst, events.t))
    rows = "".join(f"{src},{dst},{t}\n" for src, dst, t in zip(*columns, strict=True))
    with tempfile.TemporaryDirectory() as temporary:
        table = Path(temporary) / "events.csv"
        table.write_text("src,dst,t\n" + rows)
        run_command("gnnflow", "partition", table, "--parts", 2, "--out", folder / "parts.npy")
    return {
        "edges": [column.tolist() for column in graph.edges()],
        "neighbors": gnnflow_neighbors(graph),
        "model": digests(trainer.model.state_dict()) | digests(trainer.head.state_dict()),
        "rounds": [gnnflow_round(one) for one in gnnflow_trainer(None).run(events)],
    }


# -- mspipe ---------------------------------------------------------------------------------


class _Interrupted(Exception):
    """A run that ends in the middle."""


class StoppingAdam(torch.optim.Adam):
    """Adam that interrupts training before its step `stop_at`, counted from 0."""

    stop_at: int | None = None

    def step(self, closure: Any = None) -> Any:
        """A step, or the interruption."""
        if self.stop_at == 0:
            raise _Interrupted
        if self.stop_at is not None:
            self.stop_at -= 1
        return super().step(closure)


def mspipe_events() -> mspipe.Events:
    """200 events of 16 nodes, each with two numbers."""
    return mspipe.data.zipf(16, 200, seed=4, edge_dim=2)


def mspipe_run(checkpoint: Path | None, stop_at: int | None = None) -> tuple[Any, Any]:
    """A pipeline, and its passes; batch 9 of 16 is in the middle of the second pass."""
    events = mspipe_events()
    torch.manual_seed(2)
    model = mspipe.models.TGN(dim=4, edge_dim=2, time_dim=2, fanout=3)
    memory = mspipe.NodeMemory(events.num_nodes, model.dim, model.mail_dim)
    sampler = mspipe.Sampler(events, [model.fanout])
    pipe = mspipe.Pipeline(model, memory, sampler, events.features, mode="sync")
    optimizer = StoppingAdam(model.parameters(), 1e-2)
    optimizer.stop_at = stop_at
    train, validate = events.split(0.8)
    settings = mspipe.Settings(epochs=2, batch_size=40, seed=5, save_every=2)
    passes = mspipe.fit(
        pipe, optimizer, train, validate, settings, checkpoint=checkpoint, progress=False
    )
    return pipe, passes


def mspipe_pass(found: mspipe.Epoch) -> list[Any]:
    """What a pass decided, without the seconds it took."""
    return [found.index, found.losses, found.scores]


def write_mspipe(folder: Path) -> dict[str, Any]:
    """A checkpoint of an interrupted run, and a memory."""
    with suppress(_Interrupted):
        # Four batches a pass: two of the second pass are saved, a third is lost.
        list(mspipe_run(folder / "training", stop_at=7)[1])
    pipe, passes = mspipe_run(None)
    whole = [mspipe_pass(one) for one in passes]
    pipe.memory.save(folder / "memory.safetensors")
    return {
        "passes": whole,
        "memory": digest(pipe.memory.snapshot()["rows"]),
    }


# -- hybridflow -----------------------------------------------------------------------------

TRAIN = [
    *("grpo-sort", "--set", "model=model", "batch_size=16", "num_samples=4"),
    *("optimizer.schedule=constant",),
]
ON_TWO = [
    *("placement.engine=local", "placement.num_ranks=2", "placement.train=1-2-1"),
    *("placement.generate=1-2",),
]
MAP = ["map", "--gpus", 16, "--actor", "13B", "--critic", "7B", "--batch", 64, "--json"]


def hybridflow_extra() -> dict[str, Any]:
    """What a loop may remember: JSON, a tensor, and a batch of columns of all kinds."""
    batch = hy.Batch(
        tokens=torch.arange(6).view(3, 2),
        response=hy.Ragged.of([torch.tensor([1.5, 2.5]), torch.tensor([3.5]), torch.empty(0)]),
        text=["one", "two", "three"],
        meta={"temperature": 0.5},
    )
    return {"step": 7, "nested": [{"rolls": batch}], "mask": torch.tensor([True, False])}


def metrics_of(folder: Path) -> list[list[float]]:
    """Steps, rewards, losses and norms of gradients that a run wrote."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[line[name] for name in ("step", "reward", "loss", "grad_norm")] for line in lines]


def _write_model(folder: Path) -> None:
    config = hy.PRESETS["tiny-llama"] | {
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    layer, draw = "model.layers.0.", torch.Generator().manual_seed(6)
    shapes = {f"{layer}self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj.weight": (8, 8) for name in ("gate", "up", "down")}
    shapes |= {"model.embed_tokens.weight": (16, 8), "lm_head.weight": (16, 8)}
    weights = {name: torch.randn(shape, generator=draw) / 4 for name, shape in shapes.items()}
    norms = (f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm")
    weights |= {f"{name}.weight": torch.ones(8) for name in norms}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def write_hybridflow(folder: Path) -> dict[str, Any]:
    """A recipe's checkpoint, one of batches, a mapping and a placed recipe."""
    _write_model(folder / "model")
    with tempfile.TemporaryDirectory() as temporary, chdir(folder):
        out = Path(temporary)
        run_command("hybridflow", "train", *TRAIN, "steps=4", "--out", out / "whole")
        saved = [*ON_TWO, "steps=2", "--checkpoint", "run", "--out", out / "parts"]
        run_command("hybridflow", "train", *TRAIN, *saved)
        dcp_to_torch_save("run/step-000002/actor", out / "actor.pt")
        stored = torch.load(out / "actor.pt", weights_only=True)
        whole, parts = metrics_of(out / "whole"), metrics_of(out / "parts")
    np.testing.assert_allclose(parts, whole[:2], rtol=1e-4, atol=1e-6)
    hy.Checkpoint(folder / "extra").save(7, {}, hybridflow_extra())
    (folder / "mapping.json").write_text(run_command("hybridflow", *MAP)[1])
    placed = ["--recipe", "grpo-sort", "--gpus", 2, "--out", folder / "placed.yaml"]
    run_command("hybridflow", "map", *placed)
    return {
        "metrics": whole,
        "weights": {
            name.removeprefix("actor."): digest(tensor)
            for name, tensor in stored.items()
            if name.endswith(".weight") and ".optimizer." not in name
        },
    }


# -- lancet ---------------------------------------------------------------------------------


class ExpertsBetween(nn.Module):
    """A layer of experts between two linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = lancet.moe.Layer(8, 16, 4, gate="top_k", k=2)

    def forward(self, tokens: Tensor) -> Tensor:
        """A loss."""
        added, balance = self.experts(self.first(tokens))
        return self.last(tokens + added).square().mean() + 0.01 * balance


def _plan_lancet(path: str) -> dict[str, Any]:
    torch.manual_seed(0)
    group = Group.world()
    model = lancet.parallelize(ExpertsBetween(), group)
    backend = lancet.Backend(group, partition=None)
    step: Any = torch.compile(model, backend=backend, fullgraph=True)
    step(torch.randn(6, 8)).backward()
    if group.rank == 0:
        backend.save_plan(path)
    plans = [graph.plan for graph in backend.report().graphs if graph.plan is not None]
    return {
        "plans": [
            {
                "graph": plan.graph,
                "before_s": plan.before_s,
                "makespan_s": plan.makespan_s,
                "exposed_before_s": plan.exposed_before_s,
                "exposed_s": plan.exposed_s,
            }
            for plan in plans
        ],
        "orders": [list(plan.order) for plan in plans],
    }


def write_lancet(folder: Path, pool: RankPool) -> dict[str, Any]:
    """A backend's plan; its seconds and its order."""
    return pool.run(_plan_lancet, str(folder / "plan.json")).results[0]


# -- shared ---------------------------------------------------------------------------------

FIGURES = {"curve": [1.5, 2.0, 2.25], "labels": ["one", "two"]}


def shared_claims() -> list[Claim]:
    """A measured claim, and a simulated one without a finite ratio."""
    about: dict[str, Any] = {
        "baseline_name": "the plain way",
        "detail": "equal",
        "source": "a demo",
    }
    common = about | {"higher_is_better": True, "correct": True}
    return [
        Claim(name="rate", unit="GB/s", ours=5.0, baseline=2.0, **common),
        Claim(name="gain", unit="points", ours=3.0, baseline=0.0, kind="simulated", **common),
    ]


def shared_cluster() -> Cluster:
    """Two hosts of two devices."""
    local = Link(alpha_s=1e-6, beta_s_per_byte=1e-10)
    network = Link(alpha_s=1e-4, beta_s_per_byte=1e-9)
    device = Device(
        name="toy",
        kind="cpu",
        flops_per_s=1e12,
        flops_fp32_per_s=5e11,
        memory_bytes=2**30,
        memory_bytes_per_s=1e11,
    )
    return Cluster.uniform(2, 2, device, local=local, network=network)


def write_shared(folder: Path) -> None:
    """A demo's claims, and a cluster."""
    write_demo(folder, "toy", shared_claims(), FIGURES)
    shared_cluster().to_yaml(folder / "cluster.yaml")


def unpack(package: str, folder: Path) -> Path:
    """Unpacks a package's assets into a folder; where they lie then."""
    with zipfile.ZipFile(HERE / f"{package}.zip") as archive:
        archive.extractall(folder / package)
    return folder / package


def _pack(folder: Path) -> None:
    # Equal files make equal archives, which a time would prevent.
    with zipfile.ZipFile(HERE / f"{folder.name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(str(file.relative_to(folder)))
            archive.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED, 9)


# -- heta -----------------------------------------------------------------------------------


def heta_graph() -> heta.HeteroGraph:
    """Papers with features, and authors whose rows are learned."""
    random = torch.Generator().manual_seed(3)

    def draw(num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
        src = torch.randint(num_src, (90,), generator=random)
        return src, torch.randint(num_dst, (90,), generator=random)

    is_train = torch.arange(30) % 4 > 0
    return heta.HeteroGraph(
        {"paper": 30, "author": 12},
        {
            ("author", "writes", "paper"): draw(12, 30),
            ("paper", "cites", "paper"): draw(30, 30),
            ("paper", "written_by", "author"): draw(30, 12),
        },
        {"paper": torch.randn(30, 5, generator=random)},
        target="paper",
        label=torch.randint(3, (30,), generator=random),
        masks={"train": is_train, "val": ~is_train},
        node_ids={"paper": [f"doi:{number}" for number in range(30)]},
    )


def train_heta(folder: Path, epochs: int) -> list[float]:
    """Trains until an epoch, resuming where the run stopped; the losses of all epochs."""
    arguments = ("--epochs", epochs, "--checkpoint", folder / "run", "--json", "-q")
    status, printed = run_command("heta", "train", folder / "parts", *arguments)
    assert status == 0
    return [epoch["loss"] for epoch in json.loads(printed)["epochs"]]


def write_heta(folder: Path) -> dict[str, Any]:
    """Writes what heta saves."""
    graph = heta_graph()
    settings: dict[str, Any] = {"hidden": 4, "fanouts": [3, 3], "batch_size": 8}
    heta.plan(graph, parts=2, strategy="raf", **settings).write(graph, folder / "parts")
    train_heta(folder, 2)
    whole = Path(shutil.copytree(folder, folder.with_name("whole")))
    losses = train_heta(whole, 4)
    shutil.rmtree(whole)
    return {"losses": losses}


def main() -> None:
    """Replaces all assets."""
    torch.set_num_threads(1)
    # Some formats keep the path that they were written to: one that is nobody's.
    work = Path(tempfile.gettempdir(), "meshyard-formats")
    shutil.rmtree(work, ignore_errors=True)
    folders = {name: work / name for name in PACKAGES}
    for folder in folders.values():
        folder.mkdir(parents=True)
    with RankPool(2, timeout=TIMEOUT) as pool:
        expected = {
            "bytecheckpoint": write_bytecheckpoint(folders["bytecheckpoint"], pool),
            "adaqp": write_adaqp(folders["adaqp"], pool),
        }
        plan = write_lancet(folders["lancet"], pool)
    expected["gnnflow"] = write_gnnflow(folders["gnnflow"])
    expected["heta"] = write_heta(folders["heta"])
    expected["mspipe"] = write_mspipe(folders["mspipe"])
    expected["hybridflow"] = write_hybridflow(folders["hybridflow"])
    expected["lancet"] = plan
    write_shared(folders["shared"])
    for folder in folders.values():
        _pack(folder)
    shutil.rmtree(work)
    lines = [
        f'"{package}": {{\n'
        + ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in found.items())
        + "\n}"
        for package, found in expected.items()
    ]
    (HERE / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    # Triton decides on its import how kernels run, and some machines have no GPU.
    if not shutil.which("nvidia-smi"):
        os.environ.setdefault("TRITON_INTERPRET", "1")
    main()
