"""Folders of parts: one for each host, complete in itself, with its description written last.

`part0/tensors.safetensors` holds edges as compressed rows, features, labels and masks;
`part0/part.json` describes them. A host reads its own folder only, from a disk or by fsspec.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from heta.graph.hetero_graph import HeteroGraph
from heta.graph.relation_codes import sparse_relation_code
from heta.graph.schema import Relation, Schema
from shared.errors import DataError
from shared.files import atomic_folder, read_json
from shared.kernels.segment import CSR

__all__ = ["TargetNames", "read_part", "read_target_names", "write_parts"]

_FORMAT = 1
_TENSORS, _ABOUT = "tensors.safetensors", "part.json"
_NAMES = "names.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetNames:
    """What the user calls the target's nodes and classes.

    Attributes:
        num_nodes: nodes of the target.
        ids: texts by node; None where nodes have numbers only.
        classes: texts by class; empty where classes have numbers only.
    """

    num_nodes: int
    ids: list[str] | None
    classes: list[str]


def write_parts(
    plan: Any,
    graph: HeteroGraph,
    folder: str | os.PathLike[str],
    owners: dict[str, Any] | None = None,
) -> None:
    """Writes a folder for each part that computes something of its own.

    With "replicate" all hosts read part 0. With "edge-cut" each has all edges, and its own nodes' rows.

    Args:
        plan: the plan, made for this graph.
        graph: the whole graph.
        folder: a folder, or an fsspec URL; parts of an earlier plan in it are replaced.
        owners: the rank that owns each node's rows, by type; "edge-cut" only.

    Raises:
        DataError: the graph is another one than the plan's, or was changed since.
    """
    if plan.schema != graph.schema:
        raise DataError(
            "graph: expected the one that was planned, its types, relations, counts or widths differ; "
            "plan again"
        )
    graph.check_unchanged()
    fingerprint = f"{plan.fingerprint()}-{graph.fingerprint()}"
    num_folders = count_folders(plan.strategy, plan.num_parts)
    with _target(folder) as fresh:
        for index in range(num_folders):
            part = plan.parts[index]
            tensors, about = _collect(graph, part, owners, index)
            about |= {
                "format": _FORMAT,
                "index": index if plan.strategy == "raf" else 0,
                "num_parts": plan.num_parts if plan.strategy == "raf" else 1,
                "host": index,
                "num_hosts": plan.num_parts,
                "strategy": plan.strategy,
                "layers": plan.layers,
                "hidden": plan.hidden,
                "head_dim": plan.head_dim,
                "uses_dst": plan.uses_dst,
                "fanouts": list(plan.fanouts),
                "batch_size": plan.batch_size,
                "row_owner": dict(plan.row_owner),
                "fingerprint": fingerprint,
            }
            own = fresh / f"part{index}"
            own.mkdir()
            save_file(tensors, own / _TENSORS, {"fingerprint": fingerprint})
            about["num_bytes"] = (own / _TENSORS).stat().st_size
            (own / _ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")
        ids = graph.node_ids.get(graph.target)
        names = TargetNames(
            num_nodes=graph.num_nodes[graph.target],
            ids=None if ids is None else [str(name) for name in ids],
            classes=list(graph.class_names),
        )
        (fresh / _NAMES).write_text(json.dumps(asdict(names)) + "\n", encoding="utf-8")
        (fresh / "plan.json").write_text(plan.to_json() + "\n", encoding="utf-8")


def count_folders(strategy: str, num_hosts: int) -> int:
    """Counts the folders that differ: with "replicate" all hosts read the same one."""
    return 1 if strategy == "replicate" else num_hosts


def _collect(
    graph: HeteroGraph, part: Any, owners: dict[str, Any] | None, host: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of one part, and its own entries of the description."""
    schema = graph.schema
    below = frozenset().union(*part.relations[1:])
    held = [r for r in schema.relations if r in below or r in part.roots]
    types = {schema.target, *(t for relation in held for t in (relation[0], relation[2]))}
    tensors: dict[str, Tensor] = {}
    for number, relation in enumerate(schema.relations):
        if relation not in held:
            continue
        csr = graph.csr(relation)
        if relation not in below and relation in part.shares:
            csr = _keep_share(csr, *part.shares[relation])
        tensors[f"indptr:{number}"] = csr.indptr
        # Half the bytes to read for each sampled edge.
        is_small = csr.num_cols < 2**31
        tensors[f"indices:{number}"] = csr.indices.int() if is_small else csr.indices
    for node_type in sorted(types):
        number = schema.types.index(node_type)
        owner = None if owners is None else torch.as_tensor(owners[node_type], dtype=torch.int16)
        if owner is not None:
            tensors[f"owner:{number}"] = owner
        if node_type in part.feature_types:
            rows = graph.feat[node_type]
            tensors[f"feat:{number}"] = (
                rows if owner is None else rows[owner == host]
            ).contiguous()
        code = sparse_relation_code(graph, node_type)
        assert code.weight is not None, "a code has values"
        tensors[f"code_indptr:{number}"], tensors[f"code_relation:{number}"] = (
            code.indptr,
            code.indices,
        )
        tensors[f"code_value:{number}"] = code.weight
    if graph.label is not None:
        tensors["label"] = graph.label
    tensors |= {f"mask:{name}": mask for name, mask in graph.masks.items()}
    numbers = {relation: i for i, relation in enumerate(schema.relations)}
    return tensors, {
        "schema": schema.to_json(),
        "roots": [numbers[relation] for relation in part.roots],
        "shares": [[numbers[relation], *share] for relation, share in part.shares.items()],
        "relations": [sorted(numbers[relation] for relation in hop) for hop in part.relations],
        "num_classes": graph.num_classes,
    }


def _keep_share(csr: CSR, index: int, count: int) -> CSR:
    """The entries of rows index, index + count, ...; the other rows are empty."""
    rows = torch.arange(csr.num_rows)
    is_kept = rows % count == index
    lengths = csr.indptr.diff() * is_kept
    kept = torch.repeat_interleave(is_kept, csr.indptr.diff())
    return CSR(
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), csr.indices[kept], csr.num_cols
    )


def read_target_names(folder: str | os.PathLike[str]) -> TargetNames:
    """Reads what the user calls the target's nodes and classes.

    Raises:
        DataError: the folder holds no parts.
    """
    with _source(folder) as fetch:
        return TargetNames(**read_json(fetch(_NAMES), "names, as Plan.write writes them"))


def read_part(folder: str | os.PathLike[str], choose: Callable[[int], int]) -> dict[str, Any]:
    """Reads the fields of a part.

    Args:
        folder: the folder, or an fsspec URL.
        choose: gives the folder's number, from the number of folders.

    Raises:
        DataError: there is no part, one is incomplete, or of another format.
    """
    with _source(folder) as fetch:
        # Any part of the folder tells how many there are.
        plan = read_json(fetch("plan.json"), "a plan, as Plan.write writes it")
        name = f"part{choose(count_folders(plan['strategy'], plan['num_parts']))}"
        about = read_json(fetch(f"{name}/{_ABOUT}"), "a part, as Plan.write writes it")
        path = fetch(f"{name}/{_TENSORS}")
        if about.get("format") != _FORMAT:
            raise DataError(
                f"{folder}/{name}: expected format {_FORMAT}, got {about.get('format')!r}; write the "
                f"plan again with this version of heta"
            )
        size = path.stat().st_size if path.exists() else 0
        if size != about["num_bytes"]:
            raise DataError(
                f"{folder}/{name}/{_TENSORS}: expected {about['num_bytes']} bytes, got {size}; copy the "
                f"folder again, or write the plan again"
            )
        try:
            with safe_open(path, "pt") as file:
                about_file = file.metadata() or {}
            tensors = load_file(path)
        except SafetensorError as error:
            raise DataError(f"{folder}/{name}/{_TENSORS}: cannot be read: {error}") from error
        if about_file.get("fingerprint") != about["fingerprint"]:
            raise DataError(
                f"{folder}/{name}: expected {_TENSORS} of the same plan as {_ABOUT}, "
                f"{about['fingerprint']}, got {about_file.get('fingerprint')}; copy the folder again"
            )
    return _assemble(about, tensors)


def _assemble(about: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    schema = Schema.from_json(about["schema"])
    relations, types = schema.relations, schema.types
    structure: dict[Relation, CSR] = {}
    for number, relation in enumerate(relations):
        if f"indptr:{number}" in tensors:
            structure[relation] = CSR(
                tensors[f"indptr:{number}"],
                tensors[f"indices:{number}"],
                schema.num_nodes[relation[0]],
            )

    def by_type(prefix: str) -> dict[str, Tensor]:
        keys = {node_type: f"{prefix}:{number}" for number, node_type in enumerate(types)}
        return {node_type: tensors[key] for node_type, key in keys.items() if key in tensors}

    values, columns = by_type("code_value"), by_type("code_relation")
    codes = {
        node_type: CSR(indptr, columns[node_type], len(relations), values[node_type])
        for node_type, indptr in by_type("code_indptr").items()
    }
    return {
        "index": about["index"],
        "num_parts": about["num_parts"],
        "host": about["host"],
        "num_hosts": about["num_hosts"],
        "schema": schema,
        "strategy": about["strategy"],
        "layers": about["layers"],
        "hidden": about["hidden"],
        "head_dim": about.get("head_dim"),
        "uses_dst": about["uses_dst"],
        "fanouts": tuple(about["fanouts"]),
        "batch_size": about["batch_size"],
        "roots": tuple(relations[number] for number in about["roots"]),
        "shares": {relations[number]: (index, count) for number, index, count in about["shares"]},
        "relations": tuple(frozenset(relations[n] for n in hop) for hop in about["relations"]),
        "feat": by_type("feat"),
        "row_owner": about["row_owner"],
        "node_owner": by_type("owner"),
        "label": tensors.get("label"),
        "masks": {key[5:]: mask for key, mask in tensors.items() if key.startswith("mask:")},
        "codes": codes,
        "num_classes": about["num_classes"],
        "fingerprint": about["fingerprint"],
        "structure": structure,
    }


@contextmanager
def _target(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A fresh local folder that becomes `folder`, or is copied to it if that is a URL."""
    if "://" not in os.fspath(folder):
        path = Path(folder)
        if path.exists() and (
            not path.is_dir() or (any(path.iterdir()) and not (path / "plan.json").exists())
        ):
            raise DataError(
                f"{path}: expected a new folder or one with an earlier plan, it holds other files; "
                f"choose another folder"
            )
        with atomic_folder(path) as fresh:
            yield fresh
        return
    import fsspec

    with tempfile.TemporaryDirectory() as local:
        yield Path(local)
        files, root = fsspec.core.url_to_fs(os.fspath(folder))
        # A part is complete once its description is there.
        written = sorted(Path(local).rglob("*"), key=lambda path: path.suffix == ".json")
        for path in written:
            if path.is_file():
                target = f"{root}/{path.relative_to(local)}"
                files.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
                files.put_file(str(path), target)


@contextmanager
def _source(folder: str | os.PathLike[str]) -> Iterator[Callable[[str], Path]]:
    """A function that gives the local path of a file below `folder`."""
    if "://" not in os.fspath(folder):
        yield lambda name: Path(folder) / name
        return
    import fsspec

    files, root = fsspec.core.url_to_fs(os.fspath(folder))
    with tempfile.TemporaryDirectory() as local:

        def fetch(name: str) -> Path:
            target = Path(local) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                files.get_file(f"{root}/{name}", str(target))
            except FileNotFoundError as error:
                raise DataError(
                    f"{folder}/{name}: expected a part's file, there is nothing"
                ) from error
            return target

        yield fetch
