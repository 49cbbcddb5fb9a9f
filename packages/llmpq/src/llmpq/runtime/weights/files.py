"""The tensors of a model's folder by name, each read when it is asked for."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmpq.runtime.weights.quantization import Quantization, read_quantization
from shared.errors import ConfigError, DataError
from shared.files import read_json, read_model_config
from shared.kernels import digest

__all__ = ["WeightFiles", "digest_file", "is_matrix", "open_weights", "read_header"]

_BLOCK_BYTES = 8 << 20
"""Bytes of a tensor above which it is read some rows at a time."""
_MOST_HEADER_BYTES = 1 << 30
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of weights that are numbers by themselves; those of 8 bits are codes, to which a scale belongs."""
_STORED = re.compile(
    r"scale|zero_?point|qzeros|qweight|absmax|SCB|g_idx|packed|quant_|codebook", re.IGNORECASE
)
"""Ends of names of tensors that belong to a stored form of a weight."""


class WeightFiles:
    """The tensors of a model's folder by name; each is read when it is asked for.

    Attributes:
        read_bytes: bytes of tensors read so far.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Opens model.safetensors, or else the files that model.safetensors.index.json lists.

        transformers prefers the single file too, and takes from an index the names of the files alone:
        either may be left over from an earlier save.

        Raises:
            ConfigError: there is neither, or the model is stored in a form that is not read.
            DataError: a file is damaged.
        """
        self._folder, self._stack = folder, stack
        self._open: dict[str, Any] = {}
        self.read_bytes = 0
        self._quantization: Quantization | None = None
        chosen = "model.safetensors"
        if (folder / "config.json").exists():
            self._quantization = read_quantization(folder)
            chosen = read_model_config(folder)[0].get("transformers_weights") or chosen
        index = folder / "model.safetensors.index.json"
        if not (folder / chosen).exists() and index.exists():
            chosen = index.name
        if not (folder / chosen).exists():
            raise ConfigError(
                f"{folder}: expected model.safetensors or its index, got neither; convert the "
                f"model's weights to safetensors"
            )
        names = {chosen: chosen}
        if chosen.endswith(".index.json"):
            names = _read_index(folder / chosen)
        self._headers: dict[str, dict[str, Any]] = {}
        self._file_of: dict[str, str] = {}
        self._missing_files: list[str] = []
        self._stand_ins: dict[str, str] = {}
        for file in sorted(set(names.values())):
            if not (folder / file).exists():  # on a rank of its own stage, perhaps
                self._missing_files.append(file)
                self._file_of |= {name: at for name, at in names.items() if at == file}
                continue
            for name, entry in read_header(folder / file).items():
                self._file_of[name], self._headers[name] = file, entry

    def has(self, name: str) -> bool:
        """Whether a tensor is in the files."""
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as it is stored.

        Raises:
            DataError: no file has it.
        """
        return tuple(self._headers[self._known(name)]["shape"])

    def read(self, name: str) -> Tensor:
        """Reads a tensor; a stored weight is turned into numbers.

        Raises:
            DataError: no file has it, or it is stored in a form that is not read.
        """
        parts = self._parts(name)
        if parts:
            module = name.removesuffix(".weight")
            stored = {part: self._read_plain(f"{module}.{part}") for part in parts}
            assert self._quantization is not None, "it named the parts"
            return self._quantization.decompress(module, stored, is_matrix(module))
        self._check_type(self._known(name))
        return self._read_plain(name)

    def copy(self, name: str, dtype: torch.dtype) -> Tensor:
        """Reads a tensor into memory of its own, a large one some rows at a time.

        Raises:
            DataError: no file has it, it is not finite, or it is stored in a form that is not read.
        """
        if self._parts(name):
            return _checked(self.read(name), name).to(dtype)
        known = self._known(name)
        self._check_type(known)
        rows = self._file(self._file_of[known]).get_slice(known).get_shape()
        out = torch.empty(rows, dtype=dtype)
        if out.nbytes <= _BLOCK_BYTES:
            return out.copy_(_checked(self.read(name), known))
        step = max(1, _BLOCK_BYTES // out[:1].nbytes)
        for low in range(0, rows[0], step):
            part = self._file(self._file_of[known]).get_slice(known)[low : low + step]
            _checked(part, known)
            out[low : low + step] = part
            self.read_bytes += part.nbytes
            del part
            self.release()
        return out

    def are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same numbers; they are read some rows at a time."""
        if self._parts(one) or self._parts(other):
            return torch.equal(self.read(one), self.read(other))
        first, second = self._known(one), self._known(other)
        if self.shape(one) != self.shape(other):
            return False
        rows = self.shape(one)[0]
        step = max(1, _BLOCK_BYTES // (4 * max(1, self.shape(one)[-1])))
        for low in range(0, rows, step):
            both = [
                self._file(self._file_of[name]).get_slice(name)[low : low + step]
                for name in (first, second)
            ]
            if not torch.equal(*both):
                return False
        return True

    def tie(self, embedding: str, head: str) -> None:
        """Reads the head in the embedding's place where the files hold it alone, as transformers does."""
        if self.has(head) and not self.has(embedding):
            self._stand_ins[embedding] = head

    def check(self, model: nn.Module, optional: str | None = None) -> None:
        """Compares names, types and shapes of all tensors with a model's, without reading weights.

        Args:
            model: the whole model, on the meta device.
            optional: name of a tensor that may be missing: a tied head.

        Raises:
            DataError: a tensor is missing, has another shape, is no floating-point number, or belongs
                to a stored form that is not read; names it and its file.
        """
        expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        matrices = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        stored = {
            name: [f"{name.rpartition('.')[0]}.{part}" for part in self._parts(name)] or [name]
            for name in expected
        }
        known = {self._find(full) for names in stored.values() for full in names}
        for name in sorted(self._headers.keys() - known):
            self._check_left_over(name, matrices)
        for name, wanted in expected.items():
            missing = [full for full in stored[name] if not self.has(full)]
            if missing and name != optional and not self._missing_files:
                raise DataError(
                    f"{self._folder}: expected the tensor {missing[0]}, but no file has it; repair the "
                    f"folder, or get the model anew"
                )
            found = self._find(name)
            if stored[name] == [name] and found in self._headers:
                self._check_type(found)
                shape = tuple(self._headers[found]["shape"])
                if shape != wanted:
                    raise DataError(
                        f"{name}: expected {list(wanted)}, as config.json says, got {list(shape)} in "
                        f"{self._folder / self._file_of[found]}"
                    )

    def digest(self) -> str:
        """64 hexadecimal digits of all that the files hold, whatever names the files have.

        All bytes are read: a model that differs in a single number has other digits.
        """
        found = hashlib.sha256()
        for name in sorted(self._headers):
            entry = self._headers[name]
            digits = _digest_range(self._folder / self._file_of[name], *entry["range"])
            found.update(json.dumps([name, entry["dtype"], entry["shape"], digits]).encode())
        return found.hexdigest()

    def release(self) -> None:
        """Closes the files; memory of tensors that nobody holds any more is returned.

        Files are mapped, and what has been read of a mapping counts as this process's memory until
        all of its tensors are gone. They are opened anew when more is read.
        """
        self._open.clear()
        self._stack.close()

    def _read_plain(self, name: str) -> Tensor:
        known = self._known(name)
        tensor = self._file(self._file_of[known]).get_tensor(known)
        self.read_bytes += tensor.nbytes
        return tensor

    def _parts(self, name: str) -> list[str]:
        """Names of the parts in which a weight is stored; none where it is plain."""
        module, _, last = name.rpartition(".")
        if self._quantization is None or last != "weight":
            return []
        # A matrix that the description covers may have been left plain, as a head often is.
        if not any(self.has(f"{module}.{part}") for part in ("weight_scale", "weight_packed")):
            return []
        return self._quantization.needs(module, is_matrix(module))

    def _check_type(self, known: str) -> None:
        dtype = self._headers.get(known, {"dtype": "F32"})["dtype"]
        if dtype not in _FLOATS:
            raise DataError(
                f"{self._folder / self._file_of[known]}: expected weights of floating-point numbers "
                f"({', '.join(_FLOATS)}), got {known} of type {dtype}: the model is quantised in a form "
                f"that config.json does not describe; give the folder of the model before that"
            )

    def _check_left_over(self, name: str, matrices: set[str]) -> None:
        """Refuses a tensor that the model has no place for, but that a matrix's numbers depend on."""
        module, _, last = name.rpartition(".")
        if self._quantization is not None and self._quantization.describes(module, last):
            return
        words = name.split(".")
        owners = {".".join(words[:end]) for end in range(1, len(words))}
        bare = {matrix.partition(".")[2] for matrix in matrices}
        is_of_matrix = bool(owners & (matrices | bare)) and last != "bias"
        if is_of_matrix or _STORED.search(last):
            entry = self._headers[name]
            raise DataError(
                f"{self._folder / self._file_of[name]}: expected the tensors of the model that "
                f"config.json describes, got {name} ({entry['dtype']}) too, as a quantised model or "
                f"one with adapters has it; give the folder of the model with plain weights"
            )

    def _find(self, name: str) -> str | None:
        # Bare models are saved without the head's prefix.
        names = (name, name.partition(".")[2], self._stand_ins.get(name))
        return next((known for known in names if known in self._file_of), None)

    def _known(self, name: str) -> str:
        known = self._find(name)
        if known is None:
            raise DataError(f"{self._folder}: expected the tensor {name}, but no file has it")
        return known

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._open:
            path = self._folder / name
            try:
                self._open[name] = self._stack.enter_context(safe_open(path, framework="pt"))
            except Exception as error:
                raise DataError(f"{path}: expected a safetensors file: {error}") from error
        return self._open[name]


def is_matrix(module: str) -> bool:
    """Tells matrices from embeddings, whose names say so in every family."""
    return "embed" not in module.rpartition(".")[2]


def _read_index(path: Path) -> dict[str, str]:
    tree = read_json(path, "an index of weights")
    names = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(names, dict) or not names:
        raise DataError(f'{path}: expected a "weight_map" of tensors to files; save the model anew')
    return names


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Reads what a safetensors file holds: "dtype", "shape" and "range" of bytes, by name.

    Raises:
        DataError: it is no safetensors file, or is cut short.
    """
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"its header claims {length:,} bytes")
            tree = json.loads(file.read(length))
        tree.pop("__metadata__", None)
        first, size, found = 8 + length, path.stat().st_size, {}
        for name, entry in tree.items():
            low, high = entry["data_offsets"]
            if first + high > size:
                raise ValueError(f"{name} ends at byte {first + high:,} of {size:,}")
            found[name] = {
                "dtype": entry["dtype"], "shape": list(entry["shape"]),
                "range": (first + low, first + high),
            }  # fmt: skip
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(
            f"{path}: expected a safetensors file: {error}; copy or save it anew"
        ) from error
    return found


def digest_file(path: str | Path) -> str:
    """64 hexadecimal digits of a file's content."""
    return _digest_range(Path(path), 0, Path(path).stat().st_size)


def _digest_range(path: Path, low: int, high: int) -> str:
    """Digests some bytes of a file; a cryptographic digest would take four times as long."""
    found = hashlib.sha256()
    block = torch.empty(min(_BLOCK_BYTES, high - low), dtype=torch.uint8)
    with open(path, "rb") as file:
        file.seek(low)
        while low < high:
            part = block[: high - low]
            if file.readinto(part.numpy().data) < len(part):
                raise DataError(
                    f"{path}: expected {high:,} bytes, but it was cut short while it was read"
                )
            found.update(digest.digest(part).to_bytes(8, "little"))
            low += len(part)
    return found.hexdigest()


def _checked(part: Tensor, name: str) -> Tensor:
    """A tensor of finite numbers; no mask of its size is made."""
    if part.numel() and not all(bool(end.isfinite()) for end in part.aminmax()):
        raise DataError(f"{name}: expected finite weights, got NaN or infinity; repair the model")
    return part


@contextmanager
def open_weights(folder: str | Path) -> Iterator[WeightFiles]:
    """Opens a model's weights, and closes the files at the end."""
    with ExitStack() as stack:
        yield WeightFiles(Path(folder), stack)
