"""A rank's part of a replica: some layers of the model, of which it may hold a shard.

The layers are the model's own, called by the forward pass of its own base model, in which only these
layers are left. Tensor-parallel shards are the same modules with smaller parameters; the two exchanges of
Megatron-LM (arXiv 1909.08053) stand before and behind each block that the model's plan splits.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from hydraulis.planner.replicas import ParameterPlacement
from hydraulis.runtime.attention import attend
from hydraulis.runtime.loss import sum_losses
from hydraulis.runtime.replicas.exchange import LoadedParameters
from hydraulis.runtime.replicas.shards import ends, style_of
from hydraulis.runtime.steps import Row
from shared.comms import Group
from shared.comms.tensor_parallel import copy_to, sum_from
from shared.errors import ConfigError
from shared.topology.boxes import Box

__all__ = ["ModelStage", "outline"]


def outline(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters have no memory; buffers are copied."""
    memo: dict[int, Any] = {
        id(one): nn.Parameter(
            torch.empty(one.shape, dtype=one.dtype, device="meta"), requires_grad=one.requires_grad
        )
        for one in model.parameters()
    }
    return copy.deepcopy(model, memo)


class ModelStage:
    """The layers of a pipeline stage on one tensor-parallel rank.

    Attributes:
        is_first, is_last: whether it begins with tokens, and ends with the loss.
        group: the ranks that hold its shards; None for one.
    """

    def __init__(
        self,
        outlined: nn.Module,
        held: Mapping[str, tuple[ParameterPlacement, Box]],
        layers: range,
        group: Group | None,
    ) -> None:
        """Builds it without memory for parameters.

        Args:
            outlined: of the whole model, see `outline`; left as it is.
            held: by name, parameters with what this rank holds of them.
            layers: of the stage.
            group: the ranks that hold its shards; None for one.

        Raises:
            ConfigError: ranks share a layer that is not a plain product.
        """
        # The copy shares the parameters without memory, by which their names are known.
        names = {id(one): name for name, one in outlined.named_parameters()}
        memo: dict[int, Any] = {id(one): one for one in outlined.parameters()}
        model: Any = copy.deepcopy(outlined, memo)
        self._model, self._held, self.group = model, held, group
        base, head = model.base_model, model.get_output_embeddings()
        before, name, behind = ends(model)
        of_layers = getattr(base, name)
        self._num_layers = len(of_layers)
        self.is_first, self.is_last = not layers.start, layers.stop == self._num_layers
        if group is not None:
            self._share(group, names)
        setattr(base, name, nn.ModuleList([of_layers[at] for at in layers]))
        for at in layers:
            of_layers[at].register_forward_pre_hook(partial(self._wait_before, at))
        for at in () if self.is_first else before:
            setattr(base, at, nn.Identity())
        for at in () if self.is_last else behind:
            setattr(base, at, nn.Identity())
        if not self.is_last:
            model.set_output_embeddings(nn.Identity())
        self._head = head
        self._slots = [
            (module, leaf, names[id(one)], one)
            for module in model.modules()
            for leaf, one in module.named_parameters(recurse=False)
        ]
        self._loaded: dict[str, nn.Parameter] = {}
        self._waits_for: LoadedParameters | None = None

    @property
    def width(self) -> int:
        """Hidden units of the states between stages."""
        return self._model.config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the states between stages."""
        return self._slots[0][3].dtype

    @property
    def names(self) -> list[str]:
        """Parameters that it holds, whole or in part."""
        return list(dict.fromkeys(name for _, _, name, _ in self._slots))

    def load(self, parameters: LoadedParameters) -> None:
        """Takes what it computes with; each layer waits for its own before it first computes."""
        values = parameters.values
        self._loaded, self._waits_for = {}, parameters
        for name in self.names:
            placement, box = self._held[name]
            value, is_trained = values[name], placement.is_trained
            if placement.sharing == "first" and not box.numel:
                value, is_trained = value.new_zeros(placement.shape), False
            self._loaded[name] = nn.Parameter(value, requires_grad=is_trained)
        for module, leaf, name, _ in self._slots:
            setattr(module, leaf, self._loaded[name])

    def release(self) -> dict[str, Tensor]:
        """Gives the gradients of what it was loaded with, zeros where there were none, and its memory.

        Raises:
            CommError: a rank died before all it was loaded with was there.
        """
        self._wait(self._num_layers)
        found = {
            name: torch.zeros_like(one) if one.grad is None else one.grad
            for name, one in self._loaded.items()
            if one.requires_grad
        }
        for module, leaf, _, empty in self._slots:
            setattr(module, leaf, empty)
        self._loaded, self._waits_for = {}, None
        return found

    def attending(self) -> AbstractContextManager[None]:
        """Lets its attention go by document: forward and backward passes belong inside."""
        return attend(self._model)

    def forward(
        self, row: Row, states: Float[Tensor, "1 tokens dim"] | None
    ) -> Float[Tensor, "1 tokens dim"] | Float[Tensor, ""]:
        """States for the next stage; on the last one the sum of losses.

        Args:
            row: this rank's tokens.
            states: of the stage before; None on the first one.
        """
        given = {"inputs_embeds": states}
        if states is None:
            given = {"input_ids": row.ids[None]}
            self._wait(-1)
        found = self._model.base_model(
            **given, position_ids=row.positions[None], use_cache=False, packing=row.packing
        ).last_hidden_state
        if not self.is_last:
            # Where nothing so far is trained, the next stage still sends a gradient back.
            return found.requires_grad_(found.requires_grad or torch.is_grad_enabled())
        first = 0 if self.group is None else self._first_row(self._head.weight)
        return sum_losses(
            found[0], row.labels, self._head.weight, first_token=first, group=self.group
        )

    def _wait_before(self, layer: int, _module: nn.Module, _args: Any) -> None:
        # What is behind the layers is small, and computes right after the last one.
        is_end = layer + 1 == self._num_layers
        self._wait(self._num_layers if is_end else layer)

    def _wait(self, layer: int) -> None:
        if self._waits_for is not None:
            self._waits_for.wait(layer)

    def _first_row(self, weight: Tensor) -> int:
        name = next(name for name, one in self._loaded.items() if one is weight)
        return self._held[name][1].offsets[0]

    def _share(self, group: Group, names: Mapping[int, str]) -> None:
        """Puts the exchanges of tensor parallelism into the model."""
        modules = dict(self._model.named_modules())
        blocks: dict[int, nn.Module] = {}
        for name, module in modules.items():
            style = style_of(self._model, name)
            if style in ("colwise", "rowwise") and type(module) is not nn.Linear:
                raise ConfigError(
                    f"{name}: expected a linear layer that ranks can share, got "
                    f"{type(module).__name__}; train adapters without tensor parallelism"
                )
            if style == "colwise":
                block = modules[name.rpartition(".")[0]]
                blocks[id(block)] = block
            elif style == "rowwise":
                module.register_forward_hook(partial(_sum_output, group))
        for block in blocks.values():
            block.register_forward_pre_hook(partial(_copy_input, group), with_kwargs=True)
        if not self.is_first:
            return
        embedding: Any = self._model.get_input_embeddings()
        start = self._held[names[id(embedding.weight)]][1].offsets[0]
        self._model.set_input_embeddings(_VocabularyRows(embedding, start, group))


class _VocabularyRows(nn.Module):
    """An embedding of which each rank holds some rows."""

    def __init__(self, whole: nn.Embedding, start: int, group: Group) -> None:
        super().__init__()
        self.weight, self._start, self._group = whole.weight, start, group
        self._padding = whole.padding_idx

    def forward(self, ids: Int64[Tensor, "1 tokens"]) -> Float[Tensor, "1 tokens dim"]:
        local = ids - self._start
        inside = (local >= 0) & (local < len(self.weight))
        padding = None if self._padding is None else self._padding - self._start
        if padding is not None and not 0 <= padding < len(self.weight):
            padding = None
        rows = nn.functional.embedding(local.where(inside, 0), self.weight, padding)
        return sum_from(rows * inside[..., None], self._group)


def _copy_input(
    group: Group, _module: nn.Module, args: Sequence[Any], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a split block's first products read: its first argument."""
    if args:
        return (copy_to(args[0], group), *args[1:]), given
    return (), {**given, "hidden_states": copy_to(given["hidden_states"], group)}


def _sum_output(group: Group, _module: nn.Module, _args: Any, out: Tensor) -> Tensor:
    return sum_from(out, group)
