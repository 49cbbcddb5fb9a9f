"""Sharded data parallelism with replicas: FSDP2 and DTensor modules that can lose ranks.

Ranks stand in a table of replicas by shards: rank r has position r % shards in replica r // shards. Along
a row torch shards the module (`fully_shard`, `distribute_module`); down a column ranks hold the same
local tensors, and this package averages their gradients and updates as `DataParallel` does. A newcomer
is refilled by its column.

torch's modules hold on to their process groups. When groups change, the module is built again on the
meta device, in no time, and the local tensors that the rank has move into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shared.comms import Group
from shared.comms.collectives import Reduction, start_all_reduce
from shared.comms.init import alone, recorded, wait_in
from shared.errors import CommError, ConfigError
from swift.injection import reach
from swift.training.data import Placed, reseed
from swift.training.reducer import DataParallel
from swift.training.rest import Stateful
from swift.undo.torch_step import local, part_of
from swift.undo.undoable import Undoable

__all__ = ["Build", "Sharded"]

Build = Callable[[Any], tuple[nn.Module, Undoable]]
"""Function of torch's DeviceMesh of one replica; returns its sharded module and the optimizer."""


class Sharded(DataParallel):
    """A module sharded over some ranks and replicated over the others, and its optimizer.

    Example::

        def build(mesh):
            model = make_model()
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return model, swift.undoable(torch.optim.AdamW(model.parameters()))
        sharded = swift.Sharded(build, run, shards=2)
        def step(i):
            batch = data[i]
            sharded.backward(loss_of(sharded(batch.x), batch.y))
        run.loop(step, sharded, until=1000)

    Attributes:
        module: the built one; another one after a failure.
        optimizer: of `build`'s first call; it stays, and gets the parameters of later builds.
        stateful: what `stateful` made.
    """

    def __init__(
        self,
        build: Build,
        run: Placed,
        *,
        shards: int,
        bucket_mb: float = 8.0,
        clip_norm: float | None = None,
        stateful: Callable[[Undoable], Sequence[Stateful]] | None = None,
        seed: int = 0,
    ) -> None:
        """Builds once on the meta device, to see what there will be.

        Args:
            build: makes the module and its optimizer for a one-dimensional mesh of `shards` ranks. It is
                called again when groups change, on the meta device, where nothing is loaded
                (`torch.get_default_device()` tells). Generators are seeded before.
            run: of `swift.join`.
            shards: ranks of one replica, neighbours in the order of ranks; divides their number.
            bucket_mb: see `DataParallel`; of the gradients of this rank's shard.
            clip_norm: see `DataParallel`; of the whole module's gradients.
            stateful: makes schedulers and whatever else the step function changes, from the optimizer.
            seed: of building.

        Raises:
            ConfigError: ranks cannot be divided into replicas; a parameter that needs gradients is no
                DTensor over the mesh; the module holds tensors that are no parameters or buffers; or
                the optimizer cannot undo, or steps all parameters at once.
        """
        if shards < 1 or run.world_size % shards:
            raise ConfigError(
                f"shards: expected a divisor of the {run.world_size} ranks, got {shards}; give whole "
                f"replicas, as -n {shards * (run.world_size // max(shards, 1) + 1)}"
            )
        self.shards = shards
        self._build, self._seed = build, seed
        self._has_values = run.rank is not None  # a spare's come from others
        self._is_placed = False
        self._fresh: tuple[nn.Module, Undoable] | None = None
        self._begun: Reduction | None = None
        with alone() as group:
            module, optimizer = self._make(group, on_meta=True)
        if optimizer.mode == "commit":
            raise ConfigError(
                "mode: expected one that can undo, got 'commit': a vote cannot complete the step of a "
                "shard whose other replicas are lost; use swift.undoable(optimizer, mode='exact')"
            )
        if optimizer.is_coupled:
            raise ConfigError(
                f"optimizer: expected one that steps each parameter by itself, got "
                f"{type(optimizer.optimizer).__name__}, in which parameters change each other's steps, "
                f"and of which a rank has shards; use it in swift.DataParallel, or another one here"
            )
        self.stateful = () if stateful is None else tuple(stateful(optimizer))
        super().__init__(
            module,
            optimizer,
            run,
            bucket_mb=bucket_mb,
            clip_norm=clip_norm,
            stateful=self.stateful,
        )
        self._entries.constants.update(self._find_constants(module, optimizer))

    def _begin_backward(self) -> None:
        if self._begun is not None:
            # Until all ranks have begun this step, another column may have to take the last one back,
            # and so this one, for which it needs the gradients that this backward pass overwrites.
            self._begun.wait()
            self.optimizer.confirm()
        reach("backward")

    # What the training loop calls (`swift.training.trainable`).

    def describe(self) -> Mapping[str, Any]:
        """See `Trainable`."""
        own = {"shards": self.shards, "bucket_bytes": self._bucket_bytes, "can_shrink": False}
        return {**super().describe(), **own}

    def warm(self) -> None:
        """See `Trainable`."""
        with alone() as group:
            value = torch.zeros(2, 4, dtype=self.optimizer.parameters[0].dtype)
            self._try(group.shard_rows(value, value))

    def replica_sets(self, world_size: int) -> list[list[int]]:
        """See `Trainable`."""
        return [list(range(at, world_size, self.shards)) for at in range(self.shards)]

    def assign(self, rank: int, world_size: int) -> None:
        """See `Trainable`."""
        self._entries.prefix = f"shard{rank % self.shards}/"

    def regroup(self, group: Group) -> None:
        """See `Trainable`."""
        if self._begun is not None:
            with suppress(CommError):
                self._begun.wait()
            self._begun = None
        super().regroup(group)
        replica, at = divmod(group.rank, self.shards)
        first = replica * self.shards
        with recorded():
            row = Group.of(range(first, first + self.shards), members_only=True)
            column = range(at, group.world_size, self.shards)
            self._replicas = Group.of(column, members_only=True)
            self._averager.join(self._replicas)
            is_built_anew = self._is_placed or not self._has_values
            fresh = self._make(row, on_meta=is_built_anew)
        if self._is_placed:
            self._fresh = fresh  # what is undone yet belongs to the tensors as they are
        else:
            self._place(*fresh)

    def begin(self, step: int) -> None:
        """See `Trainable`."""
        super().begin(step)
        assert self._world is not None, "regrouped before"
        self._begun = start_all_reduce(self._world, torch.zeros(1, device=self._world.device))

    def confirm(self, step: int) -> None:
        """See `Trainable`."""
        super().confirm(step)
        if self._fresh is not None:
            self._place(*self._fresh)
            self._fresh = None

    def _make(self, row: Group, *, on_meta: bool) -> tuple[nn.Module, Undoable]:
        """Builds the module over a replica's ranks."""
        mesh = row.device_mesh()
        reseed(self._seed, 0, 0)
        with torch.device("meta") if on_meta else nullcontext():
            module, optimizer = self._build(mesh)
        if row.backend == "gloo" and row.world_size > 1:
            wait_in(module)
        for name, one in module.named_parameters():
            if one.requires_grad and getattr(one, "device_mesh", None) != mesh:
                raise ConfigError(
                    f"build: expected {name} as a DTensor over the mesh given, got "
                    f"{'one over another' if hasattr(one, 'device_mesh') else 'a plain tensor'}; call "
                    f"fully_shard(module, mesh=mesh) for the root module too, or distribute_module"
                )
        for path, one in module.named_modules():
            for name, value in vars(one).items():
                if isinstance(value, Tensor):
                    raise ConfigError(
                        f"build: expected tensors as parameters and buffers, which a newcomer is given, "
                        f"got the attribute {f'{path}.{name}'.lstrip('.')}; make it by "
                        f"register_buffer({name!r}, ..., persistent=False)"
                    )
        return module, optimizer

    def _describe_frozen(self) -> str:
        """They are sent, as a newcomer has no shard of them."""
        return ""

    def _find_constants(self, module: nn.Module, optimizer: Undoable) -> dict[str, Tensor]:
        known = {id(one) for one in optimizer.parameters}
        return {name: one for name, one in module.named_parameters() if id(one) not in known}

    def _place(self, module: nn.Module, optimizer: Undoable) -> None:
        """Takes a build; on the meta device it gets the memory that this rank has, or new one."""
        assert self._replicas is not None, "regrouped before"
        device, own = self._replicas.device, self._entries
        constants, buffers = self._find_constants(module, optimizer), dict(module.named_buffers())
        # A first build may have made state, as Adagrad does.
        source = self.optimizer if self._is_placed else optimizer
        states = [
            _moved(source.optimizer.state.get(held, {}), new, device)
            for held, new in zip(source.parameters, optimizer.parameters, strict=True)
        ]
        pairs: Iterator[tuple[Tensor, Tensor]] = chain[tuple[Tensor, Tensor]](
            zip(optimizer.parameters, self.optimizer.parameters, strict=True),
            ((new, own.constants[name]) for name, new in constants.items()),
            ((new, own.rest.buffers[name]) for name, new in buffers.items()),
        )
        for new, held in pairs:
            if new.is_meta:
                _fill(new, _memory(held, new, device))
        self.module = module
        self.optimizer.rebind(optimizer.parameters, states)
        own.constants.update(constants)
        own.rest.rebind(module)
        self._averager.take_gradients(self.optimizer.parameters)
        self._is_placed = True


def _memory(held: Tensor, place: Tensor, device: torch.device) -> Tensor:
    """This rank's part of a tensor; where that has no memory, some for `place`."""
    part = local(held)
    return torch.empty_like(local(place), device=device) if part.is_meta else part


def _moved(state: Mapping[str, Any], parameter: Tensor, device: torch.device) -> dict[str, Any]:
    """The state of a parameter that is now over another mesh."""
    mesh = getattr(parameter, "device_mesh", None)
    return {
        name: part_of(one, _memory(one, one, device), mesh) if isinstance(one, Tensor) else one
        for name, one in state.items()
    }


def _fill(place: Tensor, memory: Tensor) -> None:
    """Gives a tensor on the meta device its memory; who holds the tensor keeps it."""
    filled = part_of(place, memory, getattr(place, "device_mesh", None))
    if isinstance(place, nn.Parameter):
        filled = nn.Parameter(filled, requires_grad=place.requires_grad)
    torch.utils.swap_tensors(place, filled)
