"""Storage of torch.distributed.checkpoint in our format, for programs that keep its calls.

`dcp.save(state, storage_writer=DCPWriter(path))` and `dcp.load(state, storage_reader=
DCPReader(path))` keep torch's planners and collectives, and get checksums, an atomic commit and
reads of only the bytes that are needed. Each rank lays out the items that the planner assigns to
it; the coordinator builds the index from the reports of all ranks.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from bytecheckpoint.formats.dcp import METADATA_NAME, load_entry, read_folder, read_paths
from bytecheckpoint.formats.ranges import Chunk, build_index
from bytecheckpoint.formats.tree import at_path, encode, expand, flatten, nest
from bytecheckpoint.loading.reader import (
    copy_parts,
    find_held_boxes,
    list_wants,
    match_parts,
    plan_units,
    read_units,
)
from bytecheckpoint.loading.source import Source, Summary, open_source
from bytecheckpoint.ranks.trace import Trace
from bytecheckpoint.saving.file_stream import FileStream
from bytecheckpoint.state.values import decode_tree, dump
from bytecheckpoint.storage import open_storage
from bytecheckpoint.storage.files import commit, data_file
from bytecheckpoint.storage.files.dtypes import get_dtype_name, parse_dtype
from bytecheckpoint.storage.files.index import Index
from bytecheckpoint.storage.files.manifest import MANIFEST_NAME, FileRecord, Manifest
from bytecheckpoint.tools.writers.slabs import view_bytes
from shared.errors import ConfigError, DataError
from shared.topology.boxes import Box

__all__ = ["DCPReader", "DCPWriter"]

_NUM_THREADS = 2


class _Task(NamedTuple):
    """What a rank needs for writing: the folder of this save, and its own number."""

    folder: str
    rank: int


class _Written(NamedTuple):
    """A rank's report to the coordinator of a piece that was written."""

    box: Box
    start: int
    file: FileRecord
    hashed_bytes: int


class DCPWriter(StorageWriter):
    """A storage writer for torch.distributed.checkpoint.save and async_save.

    Example:
        >>> import torch, tempfile
        >>> import torch.distributed.checkpoint as dcp
        >>> path = f"{tempfile.mkdtemp()}/step_00000001"
        >>> _ = dcp.save({"w": torch.ones(2)}, storage_writer=DCPWriter(path), no_dist=True)
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Describes the checkpoint; nothing is written yet.

        Args:
            path: its folder, or its URL.
            overwrite: whether to replace a checkpoint there; it stays until the new one is whole.
        """
        super().__init__()
        self._url = os.fspath(path)
        self._overwrite = overwrite
        self._folder = ""
        self._world_size = 1

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's folder."""
        return self._url

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes the path that `dcp.save` was given, if it was given one."""
        if checkpoint_id is not None:
            self._url = os.fspath(checkpoint_id)

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, use_collectives: bool = True, **kwargs: Any
    ) -> None:
        """Nothing to do; refuses saves that ranks do not coordinate.

        Raises:
            ConfigError: `use_collectives` is False.
        """
        if not use_collectives:
            raise ConfigError(
                "expected use_collectives=True: without it no rank knows when all have written, "
                "so nothing can be committed"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The planner's plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names the folder of this save's files, on the coordinator.

        Raises:
            FileExistsError: there is a checkpoint, and it is not to be replaced.
            ConfigError: the planner keeps plans of earlier saves.
        """
        if not all(plan.usable for plan in plans):
            raise ConfigError(
                "expected a planner without enable_plan_caching: its kept plans name the folder "
                "of an earlier save"
            )
        if not self._overwrite and MANIFEST_NAME in open_storage(self._url).list(""):
            raise FileExistsError(
                f"{self._url} holds a checkpoint; save elsewhere, or pass overwrite=True"
            )
        self._folder, self._world_size = commit.draw_folder_name(), len(plans)
        return [
            dataclasses.replace(plan, storage_data=_Task(self._folder, rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items, tensors one at a time.

        Raises:
            DataError: a value is neither a tensor nor JSON-like, or has no plain elements.
            OSError: the storage refused.
        """
        results = []
        pieces = []
        # No other rank learns of a failure, so the failed rank also removes the others' files.
        with commit.discard_on_error(open_storage(self._url), "", plan.storage_data.folder):
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    data = planner.resolve_data(item)
                    assert isinstance(data, io.BytesIO), "values come pickled"
                    tree = _decode_tree(data, item.index.fqn)
                    results.append(WriteResult(item.index, len(dump(tree)), tree))
                else:
                    pieces.append(item)
            results += self._write_tensors(pieces, plan.storage_data, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Commits, on the coordinator, when all ranks have written.

        Raises:
            DataError: the planner's pieces are not whole, disjoint tensors.
            FileExistsError: another job committed there meanwhile.
            OSError: the storage refused.
        """
        storage = open_storage(self._url)
        with commit.discard_on_error(storage, "", self._folder):
            manifest, index, extra = self._assemble(metadata, results)
        with commit.discard_on_error(storage, "", self._folder, may_appear=True):
            commit.commit(storage, "", manifest, index, extra, overwrite=self._overwrite)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path or URL will do."""
        return True

    def _assemble(
        self, metadata: dcp.Metadata, results: list[list[WriteResult]]
    ) -> tuple[Manifest, bytes, bytes]:
        """The manifest, and the contents of the two small files it names."""
        chunks, leaves, written = [], {}, {}
        for result in (result for of_rank in results for result in of_rank):
            name, data = result.index.fqn, result.storage_data
            if isinstance(data, _Written):
                chunks.append(Chunk(name, data.box, data.file.name, data.start))
                written[data.file.name] = (data.file, data.hashed_bytes)
            else:
                leaves[name] = data
        tensors = {
            name: (found.properties.dtype, tuple(found.size))
            for name, found in metadata.state_dict_metadata.items()
            if isinstance(found, dcp.TensorStorageMetadata)
        }
        files = [data_file.size_file(name, hashed) for name, (_, hashed) in sorted(written.items())]
        index = build_index(tensors, chunks, files, self._url)
        paths = read_paths(metadata) or {}
        tree = nest({name: {"$tensor": name} for name in tensors} | leaves, paths)
        entries = {name: paths.get(name, (name,)) for name in leaves}
        encoded = index.encode()
        extra = dump({"tree": tree, "ranks": {}, "trace": [], "dcp": entries})
        manifest = Manifest(
            world_size=self._world_size,
            data=self._folder,
            index=commit.describe_file("index.msgpack", encoded),
            extra=commit.describe_file("extra.json", extra),
            files=[written[file.name][0] for file in files],
        )
        return manifest, encoded, extra

    def _write_tensors(
        self, items: list[WriteItem], task: _Task, planner: SavePlanner
    ) -> list[WriteResult]:
        pieces = []
        for item in items:
            assert item.tensor_data is not None, "an item that is no bytes is a tensor's"
            data = item.tensor_data
            chunk = data.chunk
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if box.numel:
                pieces.append((item, get_dtype_name(data.properties.dtype), box))
        if not pieces:
            return []
        # Larger elements first, so that each piece is aligned without gaps.
        pieces.sort(key=lambda piece: -parse_dtype(piece[1]).itemsize)
        header = data_file.encode_header(
            (item.index.fqn, dtype, box) for item, dtype, box in pieces
        )
        starts, end = [], len(header)
        for _, dtype, box in pieces:
            starts.append(end)
            end += box.numel * parse_dtype(dtype).itemsize
        file = data_file.size_file(f"rank-{task.rank:05d}.safetensors", end)
        with FileStream(open_storage(self._url), task.folder, file) as stream:
            stream.write(header)
            for item, dtype, box in pieces:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor), "what is no tensor is of type BYTE_IO"
                if tuple(tensor.shape) != box.sizes or tensor.dtype != parse_dtype(dtype):
                    raise DataError(
                        f"{item.index.fqn}: expected {dtype} of shape {list(box.sizes)} as the "
                        f"planner said, got {tensor.dtype} of {list(tensor.shape)}"
                    )
                stream.write(view_bytes(tensor))
            record = stream.finish()
        return [
            WriteResult(
                item.index,
                box.numel * parse_dtype(dtype).itemsize,
                _Written(box, start, record, end),
            )
            for (item, dtype, box), start in zip(pieces, starts, strict=True)
        ]


def _decode_tree(data: io.BytesIO, name: str) -> Any:
    # Unpickling is safe here: this process made the pickle.
    data.seek(0)
    return encode(torch.load(data, map_location="cpu", weights_only=False), name)


class DCPReader(StorageReader):
    """A storage reader for torch.distributed.checkpoint.load.

    Reads our checkpoints, DCP folders and folders of safetensors files, and of each only the bytes
    that are wanted. The planner unpickles non-tensor values, so it gets pickles made here; pickles
    from a file reach it only with `trust_pickle`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, verify: bool = True, trust_pickle: bool = False
    ) -> None:
        """Describes the checkpoint; nothing is read yet.

        Args:
            path: its folder, or its URL.
            verify: compare blocks with their checksums, where there are any.
            trust_pickle: allow pickled values in DCP folders to run the code that they name.
        """
        super().__init__()
        self._url = os.fspath(path)
        self._verify, self._trust_pickle = verify, trust_pickle
        self._source: Source | None = None
        self._values: Mapping[str, Any] = {}
        self._names: Mapping[str, str] = {}

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's folder."""
        return self._url

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes the path that `dcp.load` was given, if it was given one."""
        if checkpoint_id is not None:
            self._url = os.fspath(checkpoint_id)
        self._source, self._values, self._names = None, {}, {}

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensors that this process has read from the storage."""
        return self._source.num_bytes_read if self._source is not None else 0

    def read_metadata(self) -> dcp.Metadata:
        """The checkpoint's metadata, each tensor as one chunk; only small files are read.

        Raises:
            FileNotFoundError: there is no checkpoint.
            DataError: it is damaged.
        """
        storage = open_storage(self._url)
        if METADATA_NAME in storage.list(""):
            folder = read_folder(storage, "", trust_pickle=self._trust_pickle)
            summary = Summary(kind="dcp", folder="", index=b"", extra=b"")
            self._source = Source(storage, summary, folder.index, self._verify)
            self._values, paths = folder.entries, folder.paths
            self._names = {name: name for name in folder.index.position}
        else:
            source = Source.of(storage, open_source(storage, ""), verify=self._verify)
            self._source, extra = source, source.extra
            tree = expand(extra, [*source.index.names, *source.index.aliases])
            self._values, self._names, paths = flatten(tree)
            if "dcp" in extra:
                # A planner that does not flatten has whole dictionaries for values.
                entries = {name: at_path(tree, path) for name, path in extra["dcp"].items()}
                self._values = {name: decode_tree(entries[name], str) for name in entries}
        described: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {
            name: dcp.BytesStorageMetadata() for name in self._values
        }
        described |= _describe_tensors(self._source.index, self._names)
        return dcp.Metadata(described, planner_data=paths)

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The planner's plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The planner's plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items of the plan, in few large reads.

        Raises:
            DataError: a file is damaged or missing, or a value's pickle was refused.
        """
        assert self._source is not None, "read_metadata is called first"
        wanted = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._pickle(item.storage_index.fqn))
            else:
                wanted.append(item)
        targets = [planner.resolve_tensor(item).detach() for item in wanted]
        # A tensor is one chunk, so offsets in the chunk are offsets in the tensor.
        places = [
            (
                self._names[item.storage_index.fqn],
                Box(tuple(item.storage_offsets), tuple(item.lengths)),
            )
            for item in wanted
        ]
        _read_boxes(self._source, places, targets)
        for item, target in zip(wanted, targets, strict=True):
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path or URL will do."""
        return True

    def _pickle(self, name: str) -> io.BytesIO:
        source = self._source
        assert source is not None, "read_metadata is called first"
        value = self._values[name]
        if source.summary.kind == "dcp":
            trusts = self._trust_pickle
            value = load_entry(source.storage, "", name, value, trust_pickle=trusts)
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        return data


def _describe_tensors(
    index: Index, names: Mapping[str, str]
) -> dict[str, dcp.TensorStorageMetadata]:
    found = {}
    for name, stored_name in names.items():
        at = index.position[stored_name]
        size = torch.Size(index.shapes[at])
        whole = dcp.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        properties = dcp.TensorProperties(dtype=parse_dtype(index.dtypes[at]))
        found[name] = dcp.TensorStorageMetadata(properties, size, [whole])
    return found


def _read_boxes(source: Source, places: list[tuple[str, Box]], targets: list[torch.Tensor]) -> None:
    wants = list_wants(source.index, places)

    def use(unit: Any, buffer: torch.Tensor) -> None:
        for at in unit.wants:
            want = wants[at]
            held = find_held_boxes(source, unit, want.row, buffer)
            copy_parts(match_parts(held, want, places[want.place][1], targets[want.place]))

    units = plan_units(source, wants)
    read_units(source, units, use, Trace(0), _NUM_THREADS)
