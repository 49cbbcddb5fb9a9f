"""Who is a rank: pure decisions of the first supervisor, from what it hears to what it says.

Processes have names. A *world* is a list of them by rank under an epoch. When one is lost, its place
goes to a spare that is ready, and all learn of the next world; without a spare they are told to
wait, and after a deadline the run stops, or goes on with fewer ranks where that is allowed. A rank
that is lost before the first world has nothing yet: it is waited for, and its host starts it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swift.membership.fingerprint import first_difference
from swift.membership.settings import Settings

__all__ = ["Coordinator", "Process", "Say"]

_AT_ONCE_S = 1.0
"""Ranks that are lost within it at one step are one failure."""


@dataclass(slots=True)
class Process:
    """A process of the run.

    Attributes:
        name: unique in the run.
        host: number of its host.
        rank: its place; None on a spare.
        is_ready: whether it waits in the loop.
        is_finished: whether it has done all steps.
        step: steps that it has done.
        fingerprint: what it must have in common with the others; None before it is ready.
        num_failures: losses that the run had counted when the process got its place.
    """

    name: str
    host: int
    rank: int | None
    is_ready: bool = False
    is_finished: bool = False
    step: int = 0
    fingerprint: dict[str, Any] | None = None
    num_failures: int = 0


class Say(NamedTuple):
    """A message to a process."""

    to: str
    message: dict[str, Any]


@dataclass(slots=True)
class Coordinator:
    """The state of a run's membership.

    Attributes:
        settings: what the user asked for.
        store: where ranks meet.
        processes: those that live, by name.
        epoch: of the newest world or interruption; -1 before the first.
        lost: places that are lost since the last world: rank, how, host, and since when (`silent_since_s`).
        ended: None while the run goes on, then why it ended; "" where all is done.
        is_released: whether all ranks have done all steps.
        continued: epochs of worlds whose recovery goes on in a later one, which tells its losses again.
    """

    settings: Settings
    store: tuple[str, int]
    processes: dict[str, Process] = field(default_factory=dict)
    epoch: int = -1
    lost: list[dict[str, Any]] = field(default_factory=list)
    ended: str | None = None
    is_released: bool = False
    continued: set[int] = field(default_factory=set)
    _reference: dict[str, Any] | None = None
    _unrepaired: list[dict[str, Any]] = field(default_factory=list)
    _deadline_s: float | None = None
    _is_spare_expected: bool = True
    _num_ranks: int = 0
    _failures: int = 0
    _num_counted: int = 0
    _counted_s: float = 0.0
    _failed_at: int = -1
    _num_worlds: int = 0
    _world_epoch: int = -1

    def add(self, process: Process) -> None:
        """A process was started; before the first world it may be a rank that was lost."""
        self.processes[process.name] = process
        process.num_failures = self._num_counted
        if self.epoch < 0 and process.rank is not None:
            self.lost = [one for one in self.lost if one["rank"] != process.rank]
            self._deadline_s = self._deadline_s if self.lost else None

    def hear(self, name: str, message: dict[str, Any], now_s: float) -> list[Say]:
        """A process has said something.

        Args:
            name: which.
            message: of kind "ready", "beat" or "finished"; others are no business of membership.
            now_s: the time.

        Returns:
            What to say, in order.
        """
        process = self.processes.get(name)
        if process is None or self.ended is not None:
            return []
        if message["kind"] == "beat":
            process.step = message["step"]
            if message.get("epoch") == self.epoch:
                self._unrepaired.clear()
        elif message["kind"] == "finished" and message["epoch"] == self.epoch:
            process.is_finished = True
            ranks = self._ranks()
            if all(one.is_finished for one in ranks):
                self.is_released = True
                return [Say(one.name, {"kind": "release"}) for one in ranks] + [
                    Say(one.name, _stop("")) for one in self.processes.values() if one.rank is None
                ]
        elif message["kind"] == "ready":
            return self._admit(process, message["fingerprint"], now_s)
        return []

    def lose(
        self,
        names: Sequence[str],
        how: str,
        status: int | None,
        now_s: float,
        silent_s: float = 0.0,
    ) -> list[Say]:
        """Processes have ended, or their host is cut off.

        Args:
            names: which.
            how: "was killed by signal 9", ...
            status: exit status; None if they were killed or cut off.
            now_s: when that was seen.
            silent_s: how long before they were last heard of, where silence is what told it.

        Returns:
            What to say.
        """
        if self.ended is not None:
            return []
        gone = [self.processes.pop(name) for name in names if name in self.processes]
        ranks = [one for one in gone if one.rank is not None]
        if not ranks:
            return []
        if self.is_released:
            if status != 0:
                self.ended = f"rank {ranks[0].rank} {how} after the last step"
            elif not self._ranks():
                self.ended = ""
            return []
        if status is not None:
            why = (
                "its script came to an end without run.loop(step, dp, until=steps), in which ranks "
                "train: call it, with the run of swift.join()"
                if status == 0
                else "a script that fails would fail again, so see its own message above"
            )
            self.ended = f"rank {ranks[0].rank} {how} before all steps were done; {why}"
            return []
        self._count_failure(ranks, now_s)
        since_s = now_s - silent_s
        self.lost += [
            {"rank": one.rank, "how": how, "silent_since_s": since_s, "host": one.host}
            for one in ranks
        ]
        if self.epoch < 0:
            self._deadline_s = self._deadline_s or now_s + self.settings.wait_s
        if self.ended is not None or self.epoch < 0:
            return []
        return self._next_world(now_s, is_new=True)

    def tick(self, now_s: float) -> list[Say]:
        """Time passes.

        Returns:
            What to say.
        """
        expects = self._is_spare_expected or self.epoch < 0
        is_due = not expects or now_s >= (self._deadline_s or now_s)
        if self._deadline_s is None or not is_due or self.ended is not None:
            return []
        left = sorted(self._ranks(), key=lambda one: one.rank or 0)
        if self.epoch < 0 or len(left) < self.settings.min_ranks:
            within = f" in {self.settings.wait_s:g} s" if expects else ""
            what = "spare" if self.epoch >= 0 else "process"
            self.ended = (
                f"no {what} came{within} for rank "
                f"{', '.join(str(one['rank']) for one in self.lost)}; start the run again, and it "
                f"resumes from its last checkpoint, or give more --spares"
            )
            return []
        for rank, process in enumerate(left):
            process.rank = rank
        self._num_ranks = len(left)
        self.epoch += 1
        return self._announce(now_s)

    @property
    def num_losses(self) -> int:
        """Losses in a row without a step between them."""
        return self._failures

    @property
    def num_recoveries(self) -> int:
        """Worlds behind the first one."""
        return max(self._num_worlds - 1, 0)

    def expect_no_spare(self) -> None:
        """No process can become a spare any more: lost ranks are not waited for."""
        self._is_spare_expected = False

    def rank_of(self, name: str) -> int | None:
        """The rank of a process; None of a spare, or of one that is lost."""
        process = self.processes.get(name)
        return None if process is None else process.rank

    def _ranks(self) -> list[Process]:
        return [one for one in self.processes.values() if one.rank is not None]

    def _admit(self, process: Process, fingerprint: dict[str, Any], now_s: float) -> list[Say]:
        process.fingerprint = fingerprint
        if self._reference is None and process.rank is None:
            process.is_ready = True  # the first rank tells whether it fits
            return []
        refusals: list[Say] = []
        if self._reference is None:
            self._reference = fingerprint
            for spare in [one for one in self.processes.values() if one.rank is None]:
                refusals += self._refuse_unlike(spare)
        if process.rank is None and (refused := self._refuse_unlike(process)):
            return refused
        difference = first_difference(self._reference, fingerprint)
        if difference is not None:
            self.ended = (
                f"rank {process.rank} differs from the first rank that was ready: {difference}; "
                f"start all ranks alike"
            )
            return []
        if self.settings.min_ranks < self.settings.num_ranks and not _can_shrink(fingerprint):
            self.ended = (
                f"--min-ranks: expected it for replicas of whole models only, got {self.settings.min_ranks} "
                f"for a model of which each rank holds a part that others lack; start without it"
            )
            return []
        process.is_ready = True
        if self.epoch < 0:
            ready = [one for one in self._ranks() if one.is_ready]
            if len(ready) < self.settings.num_ranks:
                return refusals
            self._num_ranks = self.settings.num_ranks
            self.epoch = 0
            return [*refusals, *self._announce(now_s)]
        return self._next_world(now_s, is_new=False) if self.lost else []

    def _refuse_unlike(self, spare: Process) -> list[Say]:
        """Has a spare that is ready and would not reach the ranks' bits end."""
        if spare.fingerprint is None:
            return []
        difference = first_difference(self._reference, spare.fingerprint)
        if difference is None:
            return []
        del self.processes[spare.name]
        reason = (
            f"a spare on host {spare.host} is refused: it would not reach the same bits: "
            f"{difference}; start it with the code, settings and processor of the ranks"
        )
        return [Say(spare.name, _stop(reason, 1))]

    def _next_world(self, now_s: float, *, is_new: bool) -> list[Say]:
        """Fills lost places; if not all can be, tells the ranks to wait, once for each loss."""
        taken = {one.rank for one in self._ranks()}
        for rank in sorted(set(range(self._num_ranks)) - taken):
            hosts = [one["host"] for one in self.lost if one["rank"] == rank]
            spares = [one for one in self.processes.values() if one.rank is None and one.is_ready]
            if not spares:
                break
            chosen = min(spares, key=lambda one: (one.host not in hosts, one.name))
            chosen.rank, chosen.num_failures = rank, self._num_counted
        ranks = self._ranks()
        for one in ranks:
            one.is_finished = False
        if len(ranks) == self._num_ranks:
            self.epoch += 1
            return self._announce(now_s)
        if not is_new:
            return []
        self.epoch += 1
        self._deadline_s = self._deadline_s or now_s + self.settings.wait_s
        return [
            Say(one.name, {"kind": "interrupt", "epoch": self.epoch, "rank": one.rank})
            for one in ranks
        ]

    def _announce(self, now_s: float) -> list[Say]:
        # With those of worlds that have not come to a step: their recovery goes on in this one.
        if self._unrepaired:
            self.continued.add(self._world_epoch)
        self._world_epoch = self.epoch
        self._unrepaired += self.lost
        self.lost, self._deadline_s = [], None
        # Since when, as seconds before this message: clocks of hosts are not compared.
        lost = [
            {
                **{key: one[key] for key in ("rank", "how", "host")},
                "ago_s": now_s - one["silent_since_s"],
            }
            for one in self._unrepaired
        ]
        self._num_worlds += 1
        return [
            Say(
                one.name,
                {
                    "kind": "world",
                    "epoch": self.epoch,
                    "recovery": self._num_worlds - 1,
                    "rank": one.rank,
                    "world_size": self._num_ranks,
                    "store": list(self.store),
                    "backend": self.settings.backend,
                    "timeout_s": self.settings.timeout_s,
                    "lost": lost,
                },
            )
            for one in self._ranks()
        ]

    def _count_failure(self, lost: Sequence[Process], now_s: float) -> None:
        step = max(one.step for one in [*lost, *self._ranks()])
        # Several at once are one failure; who has come for one that is counted is not lost with it.
        are_old = all(one.num_failures < self._num_counted for one in lost)
        if step == self._failed_at and are_old and now_s - self._counted_s < _AT_ONCE_S:
            return
        self._counted_s = now_s
        self._failures = self._failures + 1 if step == self._failed_at else 1
        self._failed_at = step
        self._num_counted += 1
        if self._failures > self.settings.most_failures:
            where = "before the first step"
            if self.epoch >= 0:
                where = f"at step {step} and none got past it"
            self.ended = (
                f"ranks were lost {self._failures} times {where}; find out what kills them (out of "
                f"memory?) and start again from the last checkpoint"
            )


def _can_shrink(fingerprint: Mapping[str, Any]) -> bool:
    return bool(fingerprint["training"]["can_shrink"])


def _stop(reason: str, status: int = 0) -> dict[str, Any]:
    return {"kind": "stop", "reason": reason, "status": status}
