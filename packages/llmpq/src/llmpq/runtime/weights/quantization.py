"""Matrices of a folder that is quantised already, read as compressed-tensors describes them.

A folder says in config.json how its matrices are stored. The library compressed-tensors, which
transformers asks too, turns a matrix's stored parts into weights; other methods are refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from llmpq.checks import is_first_rank
from shared.errors import ConfigError, DataError
from shared.files import read_model_config

__all__ = ["Quantization", "read_quantization"]

_LOG = logging.getLogger(__name__)

_INSTALL = "`pip install 'compressed-tensors>=0.15'`"
_PLAIN_FORMAT = "dense"
_WEIGHT_PARTS = frozenset(
    ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale")
)
_ACTIVATION_PARTS = frozenset(
    f"{what}_{part}"
    for what in ("input", "output", "q", "k", "v")
    for part in ("scale", "zero_point", "global_scale")
)


class Quantization:
    """The description of a folder's stored matrices."""

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        """Parses and checks a description.

        Args:
            settings: `quantization_config` of the method compressed-tensors.
            where: the file, for errors.

        Raises:
            ConfigError: compressed-tensors is not installed, or the description is malformed or
                asks for more than turning stored parts into weights.
        """
        try:
            from compressed_tensors.compressors import BaseCompressor
            from compressed_tensors.quantization import QuantizationConfig
        except ImportError as error:
            raise ConfigError(
                f"{where}: the weights are stored by compressed-tensors, which is not installed; do "
                f"{_INSTALL}"
            ) from error
        self._where, self._compressors = where, BaseCompressor
        extra = [key for key in ("sparsity_config", "transform_config") if _asks(settings.get(key))]
        if extra:
            raise ConfigError(
                f"{where}: expected weights that are quantised alone, got {extra[0]} "
                f"{settings[extra[0]]!r:.120}; give the folder of the model before it was compressed"
            )
        try:
            config = QuantizationConfig.model_validate(dict(settings))
        except ValueError as error:
            raise ConfigError(
                f"{where}: expected a quantization_config of compressed-tensors, got "
                f"{' '.join(str(error).split()):.200}; give the folder of the model before it was quantised"
            ) from error
        self._schemes: list[Any] = list(config.config_groups.values())
        self._ignore, self._format = config.ignore or [], config.format
        for scheme in self._schemes:
            self._compressor(scheme)
        rounded = [
            what
            for what, is_asked in (
                ("activations", any(s.input_activations or s.output_activations for s in self._schemes)),
                ("keys and values", config.kv_cache_scheme is not None),
            )
            if is_asked
        ]  # fmt: skip
        if rounded and is_first_rank():
            _tell_unrounded(where, " and ".join(rounded))

    def describes(self, module: str, part: str) -> bool:
        """Whether a module's tensor of this name belongs to the stored form."""
        is_stored = part in _WEIGHT_PARTS and self._scheme(module, is_linear=True) is not None
        return is_stored or part in _ACTIVATION_PARTS

    def needs(self, module: str, is_linear: bool) -> list[str]:
        """Returns the names of the parts that a module's stored weight needs; none if it is plain.

        Args:
            module: the module's name in the whole model.
            is_linear: whether it is a matrix; an embedding otherwise.
        """
        scheme = self._scheme(module, is_linear)
        if scheme is None:
            return []
        parts = list(self._compressor(scheme).compression_param_names(scheme))
        return [part for part in parts if part == "weight" or part in _WEIGHT_PARTS]

    def decompress(self, module: str, parts: Mapping[str, Tensor], is_linear: bool) -> Tensor:
        """Returns the weight of a module from its stored parts, in the type of its scales.

        Args:
            module: the module's name in the whole model.
            parts: tensors by their names in the module.
            is_linear: whether it is a matrix; an embedding otherwise.

        Raises:
            DataError: the parts do not fit each other.
        """
        scheme = self._scheme(module, is_linear)
        try:
            found = self._compressor(scheme).decompress(dict(parts), scheme)
        except (RuntimeError, ValueError, KeyError, AssertionError, TypeError) as error:
            raise DataError(
                f"{module}: expected the parts of a weight as {self._where} describes them, got "
                f"{ {name: list(part.shape) for name, part in parts.items()} }: {error}"
            ) from error
        return found["weight"]

    def _scheme(self, module: str, is_linear: bool) -> Any | None:
        """The group of the description that a module belongs to; None for plain weights."""
        from compressed_tensors.utils.match import is_match

        like = nn.Linear(1, 1, device="meta") if is_linear else nn.Embedding(1, 1, device="meta")
        for scheme in self._schemes:
            if scheme.weights is not None and is_match(module, like, scheme.targets, self._ignore):
                return None if self._form(scheme) == _PLAIN_FORMAT else scheme
        return None

    def _form(self, scheme: Any) -> str:
        form = scheme.format or self._format
        return str(getattr(form, "value", form))

    def _compressor(self, scheme: Any) -> Any:
        form = self._form(scheme)
        try:
            compressor = self._compressors.get_value_from_registry(form)
        except KeyError:
            compressor = None
        if compressor is None or "decompress" not in dir(compressor):
            raise ConfigError(
                f"{self._where}: expected a format that compressed-tensors turns into weights, got "
                f"{form!r}; give the folder of the model before it was quantised"
            )
        return compressor


def read_quantization(folder: str | Path) -> Quantization | None:
    """Reads how a model's matrices are stored; None where they are plain.

    Raises:
        ConfigError: the model is quantised by a method that is not read; names it.
    """
    tree, path = read_model_config(folder)
    settings = tree.get("quantization_config") or tree.get("compression_config")
    for key, part in tree.items():
        if isinstance(part, Mapping) and part.get("quantization_config"):
            raise ConfigError(
                f"{path}: expected quantization_config at the top, got one in {key}, where transformers "
                f"reads none for these models; move it to the top, or delete it if the weights are plain"
            )
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"{path}: expected a mapping in quantization_config, got {settings!r:.80}"
        )
    method = settings.get("quant_method") or next(
        (key for key in ("load_in_8bit", "load_in_4bit") if settings.get(key)), None
    )
    if method != "compressed-tensors" and "config_groups" not in settings:
        raise ConfigError(
            f"{path}: expected plain weights, or weights stored by compressed-tensors, got a model "
            f"that is quantised by {method!r}; give the folder of the model before it was quantised, or "
            f"convert this one to floating-point weights first"
        )
    return Quantization(settings, str(path))


@lru_cache(maxsize=64)
def _tell_unrounded(where: str, what: str) -> None:
    """Logs once for each model what engines that follow its description round too; rank 0 speaks for all."""
    _LOG.warning(
        "%s: the model was made to round %s too; they are not rounded here, so that answers may differ "
        "from those of engines that do",
        where, what,
    )  # fmt: skip


def _asks(settings: Any) -> bool:
    """Whether a part of a description asks for anything."""
    if isinstance(settings, Mapping):
        return settings.get("format", "other") != _PLAIN_FORMAT and bool(settings)
    return bool(settings)
