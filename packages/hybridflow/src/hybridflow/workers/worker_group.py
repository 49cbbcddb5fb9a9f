"""A worker group: one node of the dataflow, one worker object on each rank of a pool."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from hybridflow.workers.batch.layout import Layout
from hybridflow.workers.dispatch import MethodRoute
from hybridflow.workers.future import Future
from hybridflow.workers.pool import ResourcePool
from hybridflow.workers.protocols import BUILT_IN, Mesh, Remote
from hybridflow.workers.worker import Context, Worker
from shared.errors import ConfigError, RankFailure

__all__ = ["WorkerGroup"]


class WorkerGroup:
    """Workers of one class on the ranks of a pool; their remote methods are methods of the group.

    Example:
        >>> class Adder(Worker):
        ...     @remote(protocol="dp")
        ...     def add(self, batch, number):
        ...         return Batch(sum=batch["x"] + number)
        >>> with Workers.inline(2) as workers:
        ...     group = WorkerGroup(Adder, workers.pool(2))
        ...     group.add(Batch(x=torch.arange(4)), 10).result()["sum"]
        tensor([10, 11, 12, 13])
    """

    def __init__(
        self,
        kind: type[Worker],
        pool: ResourcePool,
        *args: Any,
        layout: str | Layout | None = None,
        generate: str | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Makes a worker on each rank.

        Args:
            kind: a subclass of `Worker`, defined at the top level of a file.
            pool: the ranks; groups on one pool share its devices.
            *args: arguments of each worker's `__init__`.
            layout: "p-t-d" of training; all ranks are replicas when not given.
            generate: "p-t" of generation; training's layout when not given.
            name: of the group; the class's name by default.
            **kwargs: arguments of each worker's `__init__`.

        Raises:
            ConfigError: if the layout does not fill the pool; raised before any worker is made.
            RankFailure: if a worker's `__init__` raises.
        """
        train = Layout(dp=pool.num_ranks) if layout is None else Layout.parse(layout)
        train.check(pool.num_ranks)
        self.mesh = Mesh.of(train, generate)
        self.kind, self.pool, self.is_removed = kind, pool, False
        self._methods: dict[str, tuple[Remote, MethodRoute]] = {}
        self.name = pool.workers.name(name or kind.__name__)
        context = Context(name=self.name, ranks=pool.ranks, mesh=self.mesh)
        try:
            self._call_executor("create", self.name, kind, context, args, kwargs).result()
        except RankFailure:
            # Removes the workers of ranks that did not fail.
            with suppress(RankFailure):
                self._call_executor("remove", self.name).result()
            raise
        pool.workers.groups.append(self)

    def _call_executor(self, method: str, *args: Any) -> Future:
        everyone = range(self.mesh.num_ranks)
        route = MethodRoute(
            target="", method=method, ranks=self.pool.ranks, protocol=BUILT_IN["one-to-all"],
            shares=[None] * len(everyone), collectors=everyone,
        )  # fmt: skip
        return self.pool.workers.call(route, args, {})

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a remote method on the group's ranks.

        Args:
            method: name of a method marked by `remote`.
            *args: batches and futures of batches are split as the method's protocol says.
            **kwargs: likewise.

        Returns:
            A future, or the answer if the method is marked as blocking.

        Raises:
            ConfigError: if there is no such method, the protocol does not fit the group, or the
                group was removed.
        """
        if self.is_removed:
            raise ConfigError(f"group {self.name} was removed from its ranks; make another group")
        mark, route = self._method(method)
        future = self.pool.workers.call(route, args, kwargs)
        return future.result() if mark.is_blocking else future

    def _method(self, method: str) -> tuple[Remote, MethodRoute]:
        if method not in self._methods:
            mark = getattr(getattr(self.kind, method, None), "remote_mark", None)
            if mark is None:
                offered = [
                    name
                    for name in dir(self.kind)
                    if hasattr(getattr(self.kind, name), "remote_mark")
                ]
                raise ConfigError(
                    f"{self.name} has no remote method {method!r}; it has {', '.join(offered)}. "
                    f"Mark a method with @hybridflow.remote(protocol=...) to call it on a group"
                )
            shares, collectors = mark.protocol.checked(self.mesh)
            route = MethodRoute(
                target=self.name, method=method, ranks=self.pool.ranks, protocol=mark.protocol,
                shares=shares, collectors=collectors,
            )  # fmt: skip
            self._methods[method] = (mark, route)
        return self._methods[method]

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        try:
            self._method(method)
        except ConfigError as error:
            raise AttributeError(str(error)) from error

        found = partial(self.call, method)
        # Cached as an attribute, as a lookup that falls through to __getattr__ is slower.
        self.__dict__[method] = found
        return found

    def remove(self) -> None:
        """Closes the workers and removes them from their ranks."""
        self._call_executor("remove", self.name).result()
        self.is_removed = True
        self.pool.workers.groups.remove(self)

    def __repr__(self) -> str:
        return f"{self.name}({self.mesh.train} on ranks {list(self.pool.ranks)})"
