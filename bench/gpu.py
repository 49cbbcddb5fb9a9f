"""The yard on one GPU: Triton kernels, integers against numba first, then bandwidth against a copy; and steps.

Kernels need torch >= 2.9, triton, numba, jaxtyping and pytest, nothing else of the yard; steps of hydraulis, memo and
lancet need transformers, a peer of memo's trl, and those of diffusionpipe diffusers:

    PYTHONPATH=shared/src python bench/gpu.py --out bench/results

Runs the tests marked `gpu` of shared/tests, then measures each kernel beside a device copy in the
same run, in turns. Appends each claim to `history.jsonl` in `--out` and replaces `gpu-<device>.md` there,
both after each part of the rows, so that a run that is stopped has lost one part at most;
what another machine has written goes to bench/results by appending its lines to the history there.
A part of the rows, `--only memo` for instance, leaves the report as it is. Kernels take a few minutes on one
H100-class GPU, steps of up to half a million tokens longer. Exit status 1 when a test or a check fails, 2 without a
CUDA device.

`--rehearse` runs the same code at tiny sizes in Triton's interpreter: it measures nothing and
writes nothing, and shows that this file still fits the kernels.
"""

import argparse
import datetime
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "shared/src"
sys.path.insert(0, str(SOURCES))

from definition import Definition
from gpu_adam import adam_rows
from gpu_clock import Figure, Row, measure
from gpu_documents import document_rows
from gpu_hetero import hetero_rows
from gpu_log_probs import log_probs_rows
from gpu_matmul import weight_matmul_rows
from gpu_report import benchmark_name, claim_run, render_gpu_report
from gpu_route import route_rows
from gpu_scaled_matmul import lowered_layer_rows, scaled_matmul_rows
from gpu_steps import step_rows
from history import append_history
from machine import commit, describe_machine, versions

POLICIES: tuple[Literal["recent", "uniform"], ...] = ("recent", "uniform")
ROUNDINGS: tuple[Literal["stochastic", "nearest"], ...] = ("stochastic", "nearest")
TESTS = "shared/tests/kernels/test_on_gpu.py"


def quantise_rows(device: str, num_rows: int, turns: int) -> list[Row]:
    """Quantise and dequantise at 2, 4 and 8 bits, D = 128, and at a width that is no power of 2."""
    import torch

    from shared.kernels.quantize import dequantize, packed_width, quantize

    rows = []
    for dim, widths in ((128, (2, 4, 8)), (602, (2, 8))):
        count = num_rows * 128 // dim
        x = torch.randn(count, dim, device=device)
        out = torch.empty_like(x)
        copy = (lambda x=x, out=out: out.copy_(x)), 2 * x.numel() * 4
        for bits in widths:
            packed = quantize(x, bits, key=1)
            error = (dequantize(*packed) - x).abs()
            correct = bool((error <= packed.params[:, 1:] * 1.001 + 1e-6).all())
            moved = x.numel() * 4 + count * (packed_width(dim, bits) + 8)
            for rounding in ROUNDINGS:
                rows.append(
                    measure(
                        f"quantise {bits} bits, {rounding}",
                        f"{count} x {dim} float32",
                        partial(
                            quantize,
                            x,
                            bits,
                            key=1,
                            rounding=rounding,
                            data=packed.data,
                            params=packed.params,
                        ),
                        bytes_moved=moved,
                        copy=copy,
                        correct=correct,
                        turns=turns,
                    )
                )
            rows.append(
                measure(
                    f"dequantise {bits} bits",
                    f"{count} x {dim} float32",
                    lambda packed=packed, out=out: dequantize(*packed, out=out),
                    bytes_moved=moved,
                    copy=copy,
                    correct=correct,
                    turns=turns,
                )
            )
    return rows


def spmm_rows(device: str, num_nodes: int, turns: int) -> list[Row]:
    """SpMM over a random graph of degree 30 against torch's CSR matmul."""
    import torch

    from shared.kernels.segment import CSR, spmm

    rows = []
    src, dst = torch.randint(0, num_nodes, (2, 30 * num_nodes), device=device)
    coo = CSR.from_coo(dst, src, num_nodes, num_nodes)
    weight = torch.rand(coo.nnz, device=device)
    csr = CSR(coo.indptr, coo.indices, num_nodes, weight)
    theirs = torch.sparse_csr_tensor(csr.indptr, csr.indices, weight, (num_nodes, num_nodes))
    for dim in (50, 128, 256):
        x = torch.randn(num_nodes, dim, device=device)
        out = torch.empty_like(x)
        exact = theirs @ x
        correct = bool(torch.allclose(spmm(csr, x), exact, rtol=1e-4, atol=1e-3))
        rows.append(
            measure(
                "spmm, weighted sum",
                f"{num_nodes} nodes, {csr.nnz} edges, D = {dim}",
                lambda x=x, out=out: spmm(csr, x, out=out),
                # Each edge's row counted once: caches may serve some, so this can pass the copy.
                bytes_moved=csr.nnz * (dim * 4 + 12) + out.numel() * 4 + num_nodes * 8,
                copy=((lambda x=x, out=out: out.copy_(x)), 2 * x.numel() * 4),
                correct=correct,
                turns=turns,
                baseline=("torch CSR matmul", lambda x=x: theirs @ x),
            )
        )
    return rows


def gather_rows(device: str, num_rows: int, turns: int) -> list[Row]:
    """Rows by a random index and back, against torch's index_select and index_add."""
    import torch

    from shared.kernels.gather import gather, scatter_add

    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(num_rows, 128, device=device).to(dtype)
        index = torch.randperm(num_rows, device=device)
        out = torch.empty_like(x)
        shape = f"{num_rows} x 128 {str(dtype).removeprefix('torch.')}"
        size = x.numel() * x.element_size()
        copy = (lambda x=x, out=out: out.copy_(x)), 2 * size
        rows.append(
            measure(
                "gather",
                shape,
                lambda x=x, index=index, out=out: gather(x, index, out),
                bytes_moved=2 * size + 8 * num_rows,
                copy=copy,
                correct=torch.equal(gather(x, index), x[index]),
                turns=turns,
                baseline=(
                    "torch.index_select",
                    lambda x=x, index=index, out=out: torch.index_select(x, 0, index, out=out),
                ),
            )
        )
        if dtype == torch.float32:
            total, theirs = torch.zeros_like(x), torch.zeros_like(x)
            added = scatter_add(torch.zeros_like(x), index, x)
            rows.append(
                measure(
                    "scatter_add",
                    shape,
                    lambda x=x, index=index, total=total: scatter_add(total, index, x),
                    bytes_moved=3 * size + 8 * num_rows,
                    copy=copy,
                    correct=torch.equal(added[index], x),
                    turns=turns,
                    baseline=(
                        "torch.index_add_",
                        lambda x=x, index=index, theirs=theirs: theirs.index_add_(0, index, x),
                    ),
                )
            )
    return rows


def temporal_rows(device: str, num_events: int, turns: int) -> list[Row]:
    """Newest and uniform neighbours, edges on the device and, over the bus, in pinned host memory."""
    from dataclasses import replace

    import torch

    from shared.kernels.temporal import Adjacency, sample

    random = torch.Generator().manual_seed(0)
    num_nodes = max(num_events // 100, 4)
    ends = torch.randint(0, num_nodes, (2, num_events), generator=random)
    times = torch.arange(num_events)
    host = Adjacency.from_edges(
        ends.T.reshape(-1),
        ends.flip(0).T.reshape(-1),
        times.repeat_interleave(2),
        num_nodes=num_nodes,
    )
    names = ("table", "num_blocks", "directory", "since", "neighbors", "times", "eids")
    near = Adjacency(**{name: getattr(host, name).to(device) for name in names})
    pinned = {name: getattr(host, name) for name in ("neighbors", "times", "eids")}
    if device == "cuda":
        pinned = {name: column.pin_memory() for name, column in pinned.items()}
    roots = torch.randint(0, num_nodes, (max(num_events // 10, 2),), generator=random)
    bounds = torch.randint(0, num_events, roots.shape, generator=random)
    on_device = roots.to(device), bounds.to(device)
    x = torch.empty(max(num_events, 16), dtype=torch.int64, device=device)
    out = torch.empty_like(x)
    rows = []
    for policy in POLICIES:
        expected = sample(host, roots, bounds, 10, policy=policy)
        for place, adjacency in (("device", near), ("pinned host", replace(near, **pinned))):
            found = sample(adjacency, *on_device, 10, policy=policy)
            columns = ("nodes", "times", "dt", "eids", "row")
            rows.append(
                measure(
                    f"temporal sample, {policy}",
                    f"{len(roots)} roots, {len(found.row)} found, edges on the {place}",
                    partial(sample, adjacency, *on_device, 10, policy=policy),
                    # Of a root 48 bytes and two probes; of an edge 16 read and 40 written.
                    bytes_moved=64 * len(roots) + 56 * len(found.row),
                    copy=((lambda x=x, out=out: out.copy_(x)), 16 * x.numel()),
                    correct=all(
                        torch.equal(getattr(found, name).cpu(), getattr(expected, name))
                        for name in columns
                    ),
                    turns=turns,
                )
            )
    return rows


def attention_rows(device: str, num_roots: int, turns: int) -> list[Row]:
    """Attention over ten neighbours a root, and with its gradients, against batched products."""
    from types import SimpleNamespace

    import torch

    from shared.kernels.attention import attend, reference

    dim, edge_dim, time_dim, heads, fanout = 100, 16, 100, 2, 10
    num_inputs, num_edges = dim + edge_dim + time_dim, fanout * num_roots
    rows = torch.randn(num_roots, dim, device=device)
    leaves = {
        "query": torch.randn(num_roots, heads, num_inputs, device=device) / 10,
        "bias": torch.zeros(num_roots, heads, device=device),
        "rows": rows,
        "frequency": 10 ** torch.linspace(0, -9, time_dim, device=device),
        "phase": torch.zeros(time_dim, device=device),
    }
    edges: Any = SimpleNamespace(
        starts=torch.arange(0, num_edges + 1, fanout, device=device),
        neighbors=torch.randint(0, num_roots, (num_edges,), device=device),
        edge_rows=torch.randn(num_edges, edge_dim, device=device),
        edge_index=torch.randperm(num_edges, device=device),
        dt=torch.rand(num_edges, device=device, dtype=torch.float64) * 1e6,
    )
    weight = torch.randn(num_roots, heads, num_inputs, device=device)
    learnt = [leaf.requires_grad_() for leaf in leaves.values()]

    def forward(form: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [form(**leaves, edges=edges, slope=1.0)]

    def both(form: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        out = form(**leaves, edges=edges, slope=1.0)
        return list(torch.autograd.grad((out * weight).sum(), learnt))

    def equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        return bool((ours - theirs).abs().max() <= 1e-4 * max(1.0, float(theirs.abs().max())))

    # An edge's row and features, its two indices and its span; each row counted once an edge.
    laid_out = num_edges * (4 * (dim + edge_dim) + 24)
    of_query = 4 * num_roots * heads * num_inputs
    out = torch.empty_like(rows)
    found = []
    for name, run, bytes_moved in (
        ("attention", forward, laid_out + 2 * of_query),
        # Backward they are read again and gradients of rows added; queries, results and their
        # gradients are read, and gradients of queries written.
        ("attention, with gradients", both, 2 * laid_out + 8 * num_edges * dim + 6 * of_query),
    ):
        found.append(
            measure(
                name,
                f"{num_roots} roots, {num_edges} edges, D = {dim} + {edge_dim} + {time_dim}",
                partial(run, attend),
                bytes_moved=bytes_moved,
                copy=((lambda: out.copy_(rows)), 8 * rows.numel()),
                correct=all(map(equal, run(attend), run(reference.attend))),
                turns=turns,
                baseline=("batched products in torch", partial(run, reference.attend)),
            )
        )
    return found


def run_tests() -> tuple[bool, str]:
    """The GPU tests in a child process; whether they passed, and pytest's last line."""
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "MESHYARD_KERNELS")}
    env["PYTHONPATH"] = os.pathsep.join(p for p in (str(SOURCES), env.get("PYTHONPATH", "")) if p)
    # Neither the yard's configuration nor its conftest: both ask for plugins a GPU box may lack.
    options = ["-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-q", "-W", "ignore", TESTS],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    print(done.stdout[-4000:], done.stderr[-2000:], flush=True)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
    # A run in which every test was skipped proves nothing, although pytest exits 0.
    return done.returncode == 0 and " passed" in f" {last}", last


def describe_run(of_commit: str) -> dict[str, Any]:
    """What a claim says of the run that measured it."""
    import torch

    device = torch.cuda.get_device_properties(0)
    definition = Definition(Path(__file__))
    return {
        "revision": definition.revision,
        "command": "hatch run bench-gpu",
        "commit": of_commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "machine": f"{device.name}, {device.total_memory / 2**30:.0f} GiB; {describe_machine()}",
        "versions": versions(definition, ROOT),
    }


def keep(rows: list[Row | Figure], out: Path, of_commit: str) -> None:
    """Appends the claims to the history in `out`."""
    import torch

    run, name = describe_run(of_commit), benchmark_name(torch.cuda.get_device_name(0))
    append_history(out / "history.jsonl", [claim_run(row, run, name) for row in rows])


def write_report(
    rows: list[Row | Figure],
    out: Path,
    of_commit: str,
    tests: str,
    took_s: float,
    failed: list[str],
) -> None:
    """Replaces the device's report in `out`."""
    import torch

    device = torch.cuda.get_device_name(0)
    text = render_gpu_report(device, rows, describe_run(of_commit), tests, took_s, failed)
    (out / f"{benchmark_name(device)}.md").write_text(text, encoding="utf-8")


def parts_of(device: str) -> dict[str, Callable[[], list[Any]]]:
    """Rows by what they are of, at sizes of a GPU or of the rehearsal."""
    from gpu_cache import cache_rows
    from gpu_diffusion import diffusion_rows
    from gpu_memo import memo_rows, memory_rows
    from gpu_moe import moe_rows

    if device == "cpu":
        return {
            "quantise": partial(quantise_rows, device, 20, 2),
            "spmm": partial(spmm_rows, device, 20, 2),
            "gather": partial(gather_rows, device, 20, 2),
            "temporal": partial(temporal_rows, device, 200, 2),
            "attention": partial(attention_rows, device, 20, 2),
            "log-probs": partial(log_probs_rows, device, 20, 300, 2),
            "weight-matmul": partial(weight_matmul_rows, device, (70, 256), 2),
            "route": partial(route_rows, device, 50, 2),
            "scaled-matmul": partial(scaled_matmul_rows, device, (24,), 2),
            "qsync": partial(lowered_layer_rows, device, 16, (16,), ("fp32", "bf16"), 2),
            "documents": partial(document_rows, device, 100, 2),
            "hydraulis": partial(step_rows, device, 512, 2),
            "diffusionpipe": partial(diffusion_rows, device, 2, 2),
            "lancet": partial(moe_rows, device, 64, 2),
            "adam": partial(adam_rows, device, 1500, 2),
            "hetero": partial(hetero_rows, device, 20, 40, 2),
            "cache": partial(cache_rows, device, 80, 0.001, 4, [2, 2], 2),
            "memo-memory": partial(memory_rows, device, 1 << 20, 64),
            "memo": partial(memo_rows, device, (64,), (64,)),
        }
    # A gigabyte of float32: far beyond any level-two cache.
    return {
        "quantise": partial(quantise_rows, device, 2_000_000, 20),
        "spmm": partial(spmm_rows, device, 200_000, 20),
        "gather": partial(gather_rows, device, 2_000_000, 20),
        "temporal": partial(temporal_rows, device, 20_000_000, 20),
        "attention": partial(attention_rows, device, 200_000, 20),
        "log-probs": partial(log_probs_rows, device, 4_096, 151_936, 20),
        "weight-matmul": partial(weight_matmul_rows, device, (8_192, 28_672), 20),
        "route": partial(route_rows, device, 1 << 16, 20),
        "scaled-matmul": partial(scaled_matmul_rows, device, (4_096, 8_192, 16_384), 20),
        "qsync": partial(
            lowered_layer_rows,
            device,
            16_384,
            (1_024, 2_048, 4_096),
            ("fp32", "bf16", "int8", "fp8"),
            20,
        ),
        "documents": partial(document_rows, device, 32_768, 20),
        "hydraulis": partial(step_rows, device, 16_384, 10),
        "diffusionpipe": partial(diffusion_rows, device, 16, 10),
        "lancet": partial(moe_rows, device, 8_192, 10),
        "adam": partial(adam_rows, device, 100_000_000, 20),
        "hetero": partial(hetero_rows, device, 200_000, 20_000_000, 20),
        "cache": partial(cache_rows, device, 4_000_000, 0.2, 2_048, [10, 10], 20),
        "memo-memory": partial(memory_rows, device, 1 << 30, 16_384),
        "memo": partial(memo_rows, device, (16_384, 32_768, 65_536, 131_072), (32_768, 65_536)),
        "memo-long": partial(memo_rows, device, (262_144, 524_288), ()),
    }


def main() -> int:
    """Tests, measures, writes; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results", metavar="DIR")
    parser.add_argument("--commit", default=commit(ROOT), help="of sources copied without git")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="some of the rows")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, interpreter, no files")
    args = parser.parse_args()
    started = time.time()
    if args.rehearse:
        # Before anything imports triton or decides on a form.
        os.environ.update(TRITON_INTERPRET="1", MESHYARD_KERNELS="triton")
    import torch

    parts = parts_of("cpu" if args.rehearse else "cuda")
    unknown = set(args.only) - set(parts)
    if unknown:
        parser.error(f"--only: expected some of {', '.join(parts)}, got {', '.join(unknown)}")
    chosen = args.only or list(parts)
    if args.rehearse:
        rows = [row for name in chosen for row in parts[name]()]
        return 0 if all(row.correct for row in rows) else 1
    if not torch.cuda.is_available():
        print("bench-gpu: expected a CUDA device, found none; --rehearse needs none")
        return 2
    passed, tests = run_tests()
    rows: list[Row | Figure] = []
    failed: list[str] = []
    for name in chosen:
        try:
            added = parts[name]()
        except Exception:  # noqa: BLE001  a part that fails leaves the others' rows to be measured
            traceback.print_exc()
            failed.append(name)
            continue
        rows += added
        took_s = time.time() - started
        # After every part: a run that is stopped has lost one part at most.
        keep(added, args.out, args.commit)
        if not args.only:
            write_report(rows, args.out, args.commit, tests, took_s, failed)
        print(f"bench-gpu: {name} kept, {took_s:.0f} s", flush=True)
    if failed:
        print(f"bench-gpu: failed: {', '.join(failed)}")
    return 0 if passed and not failed and all(row.correct for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
