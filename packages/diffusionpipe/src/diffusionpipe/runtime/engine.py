"""Trains a job as a plan says: the frozen parts of the next batch run inside this one's step.

After DiffusionPipe (arXiv 2405.01248): a synchronous pipeline of the backbone, whose idle periods
hold the frozen forward passes of the next iteration. Weights after a step are those of one process,
up to rounding: the loss is the mean over the whole batch, and random draws are keyed by seed, step
and sample, whatever the stages, micro-batches, replicas and placement.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from diffusionpipe.job.batches import take_two
from diffusionpipe.job.draws import decide
from diffusionpipe.job.job import Batch, Job
from diffusionpipe.planner.plan import Plan
from diffusionpipe.runtime.agreement import (
    Form,
    add_losses,
    check_alike,
    check_form,
    compare_batches,
    describe_batch,
    sketch_weights,
)
from diffusionpipe.runtime.checkpoint import load_state, save_state
from diffusionpipe.runtime.executor import Executor
from diffusionpipe.runtime.instructions import Program, check_splits, compile_programs
from diffusionpipe.runtime.links import Links, group_replicas
from diffusionpipe.runtime.records import RunReport, collect_report
from diffusionpipe.runtime.stages import BadValues, GradientSums, StageCompute, Trace, trace_job
from diffusionpipe.runtime.weights import WeightShares
from shared.comms import Group
from shared.errors import CommError, ConfigError, DataError, MeshyardError

__all__ = ["Engine"]

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class _Running(NamedTuple):
    """What the first batch's shapes allow to build."""

    executor: Executor
    compute: StageCompute
    sums: GradientSums
    links: Links
    form: Form


class _Read(NamedTuple):
    """A batch, its number of samples, and what waits until all ranks are known to have read it too."""

    batch: Batch | None
    num_rows: int
    agree: Callable[[], None]


class Engine:
    """One rank's part of a training run; every rank of the world makes one and calls it alike.

    Before step 0 a rank gives back the memory of the weights that only other ranks need: they are NaN
    from then on, and `export` collects them.

    Attributes:
        job: what is trained.
        plan: how.
        seed: of all draws.
        rank: this process's.
        optimizer: of this rank's parameters; None where its stages have none that train.
        step: number of steps done, and so the index of the next.
    """

    def __init__(self, job: Job, plan: Plan, optimizer: MakeOptimizer, seed: int = 0) -> None:
        """Takes this rank's stages of the job.

        Args:
            job: the same on every rank, with the same weights, and no other engine's.
            plan: the same on every rank.
            optimizer: makes an optimizer of a list of parameters: this rank's. One that mixes
                parameters would give other weights than one process.
            seed: of all draws.

        Raises:
            ConfigError: the plan is for other ranks, another job or torch, the job cannot be trained, or
                `optimizer` makes none.
            CommError: ranks were given unlike plans, jobs or seeds, or one of them cannot go on.
        """
        self.job, self.plan, self.seed, self.step = job, plan, seed, 0
        world = Group.world() if Group.exists() else None
        self._group = world if world is not None and world.world_size > 1 else None
        # Small messages of the host go over connections of their own.
        self._control = None if self._group is None else Group.control()
        self.rank = 0 if self._group is None else self._group.rank
        self._trained, self._fingerprints = job.trained, job.list_fingerprints()
        problem, self.optimizer = None, None
        try:
            self._check_plan()
            job.validate()
            self._weights = WeightShares(job, plan)
            self._parameters = {
                name: self._trained[name]
                for stage in plan.stages_of(self.rank)
                for name in self._weights.trained[stage]
            }
            self.optimizer = self._make_optimizer(optimizer)
        except MeshyardError as error:
            problem = error
        facts = {"plan": plan.fingerprint(), **self._fingerprints, "seed": seed}
        check_alike(self._control, facts, problem)
        self._running: _Running | None = None
        self._is_loaded = False

    def steps(self, batches: Iterable[Batch]) -> Iterator[float]:
        """Trains a step a batch; every rank calls it alike.

        The next batch is read before a step runs, as its frozen parts are encoded inside the step.
        With the last batch nothing is encoded ahead.

        Args:
            batches: whole batches, the same on every rank: of the plan's number of samples, or fewer.
                After `load` they begin with that of step `step`.

        Yields:
            A step's loss: the mean over the batch, the same on every rank.

        Raises:
            DataError: a batch is empty, has more samples than the plan's, or is unlike the first one.
            DivergenceError: the loss or a gradient is NaN or infinite; names the step, stage and
                samples. No weight was changed.
            CommError: a rank died or the timeout passed; names the ranks, stages and micro-batch. Or
                ranks have unlike batches or weights.
            ConfigError: the plan does not fit the job's values.
        """
        stream = iter(batches)
        current = self._read(stream, self.step)
        current.agree()
        if current.batch is None:
            return
        running = self._running = self._running or self._build(current.batch)
        executor, compute = running.executor, running.compute
        executor.recorder.begin(-1)
        compute.begin(self.step - 1, None, current.batch)
        executor.encode_ahead(current.num_rows)
        while current.batch is not None:
            following = self._read(stream, self.step + 1)
            executor.recorder.begin(self.step)
            compute.begin(self.step, current.batch, following.batch)
            try:
                executor.run(
                    current.num_rows,
                    following.num_rows or None,
                    program=int(self._is_estimating()),
                    agree=following.agree,
                )
                loss = self._update(running)
            finally:
                running.sums.clear()
            executor.recorder.end()
            self.step += 1
            current = following
            yield loss

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Saves the trained weights, their optimizer state and the step; every rank calls it.

        The folder is one of torch.distributed.checkpoint, on a file system that all ranks see.

        Raises:
            OSError: the folder cannot be written; what was there is unchanged.
            CommError: a rank died.
        """
        facts = {"step": self.step, "seed": self.seed}
        save_state(folder, self._parameters, self.optimizer, facts, self._control)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Resumes from `save`, under this plan or another; every rank calls it.

        `steps` then goes on with step `step`: skip as many batches as that. The look-ahead is
        encoded again.

        Raises:
            DataError: there is no checkpoint of this job; nothing was changed.
            ConfigError: it was written with another seed or kind of optimizer; nothing was changed.
            CommError: a rank died.
        """
        shapes = {name: tuple(value.shape) for name, value in self._trained.items()}
        self.step = load_state(
            folder, self._parameters, self.optimizer, shapes, self.seed, self._control
        )
        self._is_loaded = True

    def export(self, folder: str | os.PathLike[str]) -> None:
        """Writes the pipeline's or backbone's folder with the trained weights; every rank calls it.

        Rank 0 holds all weights meanwhile.

        Raises:
            OSError: the folder cannot be written.
            CommError: a rank died, or rank 0 could not write.
        """
        self._weights.gather(self._control)
        problem = None
        if not self.rank:
            try:
                self.job.export(os.fspath(folder))
            except Exception as error:  # noqa: BLE001 - raised behind the exchange, by which others end
                problem = error
            if self._running is not None:
                self._weights.free(0)
        check_alike(self._control, {}, problem)

    def report(self) -> RunReport:
        """Collects what all ranks did in all steps so far; every rank calls it.

        Raises:
            ConfigError: no step was run yet.
            CommError: a rank died.
        """
        running = self._running
        if running is None or not running.executor.recorder.steps:
            raise ConfigError("expected steps to report on, got none yet; run some first")
        return collect_report(
            self._control, running.executor.recorder, running.links.sent_bytes, self.plan
        )

    def _read(self, stream: Iterator[Batch], step: int) -> _Read:
        """Reads the batch of a step, and starts to compare it with other ranks'."""
        batch, num_rows, problem = next(stream, None), 0, None
        try:
            if batch is not None:
                num_rows = self._count_rows(batch, step)
        except DataError as error:
            problem = error
        agree = compare_batches(self._control, step, batch, -1 if problem else num_rows)
        if problem is not None:
            # So that ranks whose batch is right end too.
            with suppress(CommError):
                agree()
            raise problem
        return _Read(batch, num_rows, agree)

    def _count_rows(self, batch: Batch, step: int) -> int:
        count = self.job.num_samples(batch)
        if not 0 < count <= self.plan.batch_size:
            raise DataError(
                f"batch of step {step}: expected 1 to {self.plan.batch_size} samples, the plan's "
                f"batch, got {count}; cut batches to that size, or plan for larger ones"
            )
        if self._running is not None:
            check_form(describe_batch(batch), self._running.form, step)
        return count

    def _update(self, running: _Running) -> float:
        """Agrees on the loss and changes this rank's weights."""
        executor, compute, sums = running.executor, running.compute, running.sums
        with executor.recorder.time("wait", name="sums and agreement"):
            try:
                sums.wait()
            except CommError as error:
                error.add_note(f"rank {self.rank} was at the sums of gradients in step {self.step}")
                raise
            bad = [BadValues("gradients", stage, ()) for stage in sums.find_bad_stages()]
            problems = [*compute.health.find_problems(), *bad]
            loss = add_losses(self._control, self.step, float(compute.loss), problems)
        with executor.recorder.time("update"):
            if self.optimizer is not None:
                self.optimizer.step()
        return loss

    def _build(self, batch: Batch) -> _Running:
        """Checks the job, builds what depends on the shapes of values, and frees others' weights."""
        problem, trace, programs = None, None, []
        sizes: dict[str, float] = {}
        try:
            rows = take_two(batch)
            self._weights.add_frozen(rows)
            self.job.check(rows, seed=self.seed)
            trace = trace_job(self.job, rows)
            # Loaded weights are those of this rank's stages only, so results may differ.
            if self._is_loaded:
                sizes = trace.frozen_sizes
            else:
                sizes = trace.frozen_sizes | trace.result_sizes | sketch_weights(self._trained)
            programs = self._compile(trace)
        except MeshyardError as error:
            problem = error
        check_alike(self._control, sizes, problem)
        assert trace is not None, "a problem was raised"
        self._weights.free(self.rank)
        plan = self.plan
        stages, own = trace.flow.cut_stages(plan), plan.stages_of(self.rank)
        parameters = {
            stage: [self._trained[name] for name in self._weights.trained[stage]] for stage in own
        }
        sums = GradientSums(parameters, group_replicas(plan), plan.bucket_bytes)
        sums.clear()
        compute = StageCompute(self.job, trace.flow, stages, own, sums, self.seed)
        links = Links(programs, trace.shapes, plan.batch_size)
        executor = Executor(programs, stages, links, compute)
        return _Running(executor, compute, sums, links, describe_batch(batch))

    def _compile(self, trace: Trace) -> list[Program]:
        """This rank's programs: of a plain step, and of one with self-conditioning."""
        programs = []
        for order in filter(None, (self.plan.order, self.plan.estimate_order)):
            every = compile_programs(replace(self.plan, order=order), trace.flow)
            messages = [message for program in every for message in program.messages]
            check_splits(self.plan, messages, trace.shapes)
            programs.append(every[self.rank])
        return programs

    def _check_plan(self) -> None:
        num_ranks = 1 if self._group is None else self._group.world_size
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if self._group is None and started > 1:
            raise ConfigError(
                f"ranks: expected a world of the {started} ranks that were started, got none; call "
                "shared.comms.init_from_env() before the engine is made"
            )
        if self.plan.num_ranks != num_ranks:
            raise ConfigError(
                f"plan: expected a plan for {num_ranks} ranks, got one for {self.plan.num_ranks}; "
                f"start as many, as `torchrun --nproc-per-node={self.plan.num_ranks}`, or plan for "
                "these"
            )
        for name, own in self._fingerprints.items():
            planned = self.plan.fingerprints.get(name, own)
            if planned != own:
                raise ConfigError(
                    f"plan: expected one made for this {name} ({own}), got one made for another "
                    f"({planned}); profile the job as it is here, and plan anew"
                )
        if self.job.self_conditioning and not self.plan.estimate_order:
            raise ConfigError(
                "plan.estimate_order: expected orders of steps with self-conditioning, got none; make "
                "the plan from this job"
            )

    def _make_optimizer(self, make: MakeOptimizer) -> torch.optim.Optimizer | None:
        if isinstance(make, torch.optim.Optimizer):
            raise ConfigError(
                "optimizer: expected what makes one, as lambda p: torch.optim.AdamW(p, 1e-4), got a "
                f"made {type(make).__name__}; each rank makes its own, of its stages' parameters"
            )
        own = list(self._parameters.values())
        return make(own) if own else None

    def _is_estimating(self) -> bool:
        """Whether this step predicts twice."""
        return bool(self.job.self_conditioning) and decide(
            self.seed, self.step, self.job.self_conditioning
        )
