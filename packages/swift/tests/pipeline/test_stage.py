"""A pipeline's steps, against one process that computes all stages."""

import copy
from types import SimpleNamespace

import pytest
import torch
from small_stages import (
    BATCH,
    CLASSES,
    DIM,
    MICRO_BATCHES,
    batch,
    build,
    loss_of,
    make_stage,
    state_of,
    train,
)
from torch import nn

from shared.comms import Group, RankPool
from shared.comms import init as worlds
from shared.errors import ConfigError, DataError
from shared.kernels.philox import stream_key
from swift import BoundaryLog, Stage, undoable
from swift.pipeline.records import Key, Kind
from swift.pipeline.stage import PipelineStage


@pytest.fixture(scope="module")
def pool():
    with RankPool(3) as ranks:
        yield ranks


def same(one, two):
    assert len(one) == len(two)
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def train_in_one_process(num_stages, chunk, stop):
    """Losses and each stage's final state, by plain autograd."""
    made = [build(index, num_stages) for index in range(num_stages)]
    losses = []
    for iteration in range(stop):
        inputs, targets = batch(iteration)
        parameters = [p for module, _ in made for p in module.parameters()]
        total, total_loss = [None] * len(parameters), 0.0
        for first in range(0, MICRO_BATCHES, chunk):
            sums = [None] * len(parameters)
            for k in range(first, min(first + chunk, MICRO_BATCHES)):
                x = inputs.chunk(MICRO_BATCHES)[k]
                for index, (module, _) in enumerate(made):
                    torch.manual_seed(stream_key(5, iteration, index, k))
                    x = module(x)
                loss = loss_of(x, targets.chunk(MICRO_BATCHES)[k]) / MICRO_BATCHES
                total_loss += loss.detach()
                for at, grad in enumerate(torch.autograd.grad(loss, parameters)):
                    sums[at] = grad if sums[at] is None else sums[at] + grad
            for at, grad in enumerate(sums):
                total[at] = grad if total[at] is None else total[at] + grad
        losses.append(total_loss)
        for parameter, grad in zip(parameters, total, strict=True):
            parameter.grad = grad
        for _, opt in made:
            opt.step()
    return losses, [[p.detach().clone() for p in module.parameters()] for module, _ in made]


def on_a_stage(folder, chunk):
    stage = make_stage(folder, Group.world(), chunk=chunk)
    losses = train(stage, 3)
    sent = (
        stage.writer.logged_bytes if stage.writer.find_gap(Kind.ACTIVATION, 0, 0, 1) is None else 0
    )
    receipts = [
        stage.writer.digest_of(Key(kind, 2, MICRO_BATCHES - 1)) is not None for kind in Kind
    ]
    return losses, state_of(stage)[: len(stage.opt.parameters)], sent, receipts


@pytest.mark.parametrize("chunk", [1, 2, 4, MICRO_BATCHES])
def test_stages_step_as_one_process_that_sums_in_chunks(pool, tmp_path, chunk):
    losses, weights = train_in_one_process(3, chunk, 3)
    found = pool.run(on_a_stage, tmp_path, chunk).results
    assert [each[0] for each in found[:2]] == [[None] * 3] * 2
    torch.testing.assert_close(torch.stack(found[2][0]), torch.stack(losses), rtol=1e-6, atol=0)
    for rank in range(3):
        assert same(found[rank][1], weights[rank]), f"stage {rank}"
    message = 3 * BATCH * DIM * 4
    assert [each[2] for each in found] == [message, 2 * message, message]
    # By kind: activation, gradient, and the receipts of both.
    assert [each[3] for each in found] == [
        [True, False, False, True],
        [True, True, True, True],
        [False, True, True, False],
    ]


class Appended(nn.Module):
    """Appends learned rows last: autograd gives them a view of the gradient that the next stage sent."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2, DIM))

    def forward(self, x):
        return torch.cat([x * 2.0, self.rows])


class Shifted(nn.Module):
    """Adds a learned shift first: its gradient is a view of that which is sent to the stage before."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(DIM, 4))
        self.out = nn.Linear(DIM, 1)

    def forward(self, x):
        return self.out((x.view(-1) + self.shift.view(-1)).view(x.shape))


def with_views_as_gradients(folder):
    """Gradients that arrive and leave share memory with parameters' own, to which others are added."""
    group, kinds = Group.world(), (nn.Identity, Appended, Shifted)
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(2 * MICRO_BATCHES, DIM, generator=draw)

    def make(index):
        torch.manual_seed(index)
        return nn.Linear(DIM, DIM) if not index else kinds[index]()

    def loss(out, _):
        return (out**2).mean()

    module = make(group.rank)
    opt = undoable(torch.optim.SGD(module.parameters(), 0.0))
    log = BoundaryLog(folder).open("run", group.rank)
    stage = PipelineStage(
        module, opt, index=group.rank, num_stages=3, group=group, loss=loss,
        micro_batches=MICRO_BATCHES, chunk=MICRO_BATCHES, log=log,
    )  # fmt: skip
    stage.step(inputs, torch.zeros(MICRO_BATCHES))
    digests = {
        kind: [log.digest_of(Key(kind, 0, k)) for k in range(MICRO_BATCHES)]
        for kind in (Kind.GRADIENT, Kind.GRADIENT_RECEIPT)
    }
    whole = nn.Sequential(*(make(index) for index in range(3)))
    mine = list(whole[group.rank].parameters())
    # Not by backward(), which would add to parameters' gradients that share memory with one another.
    total = sum(loss(whole(part), None) for part in inputs.chunk(MICRO_BATCHES))
    expected = torch.autograd.grad(total / MICRO_BATCHES, mine)
    return digests, [one.grad for one in module.parameters()], expected


def test_gradients_that_share_memory_with_a_message_do_not_change_it(pool, tmp_path):
    found = pool.run(with_views_as_gradients, tmp_path).results
    for _, grads, expected in found:
        for grad, one in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, one, rtol=1e-5, atol=1e-7)
    for sender, receiver in ((1, 0), (2, 1)):
        sent, received = (
            found[rank][0][kind]
            for rank, kind in ((sender, Kind.GRADIENT), (receiver, Kind.GRADIENT_RECEIPT))
        )
        assert None not in sent
        assert sent == received, f"from stage {sender}"


def test_chunk_sums_differ_from_a_sum_in_one_go():
    # Else the tests of chunks could not fail.
    _, one = train_in_one_process(3, MICRO_BATCHES, 3)
    _, two = train_in_one_process(3, 2, 3)
    assert not all(same(a, b) for a, b in zip(one, two, strict=True))


def with_sparse_gradients():
    group = Group.world()
    torch.manual_seed(0)
    module = nn.Embedding(7, DIM, sparse=True) if group.rank == 0 else nn.Linear(DIM, DIM)
    opt = undoable(torch.optim.SGD(module.parameters(), 0.1))
    before = next(module.parameters()).detach().clone()
    stage = PipelineStage(
        module, opt, index=group.rank, num_stages=3, group=group,
        loss=lambda out, _: (out**2).mean(), micro_batches=2, chunk=2,
    )  # fmt: skip
    stage.step(torch.arange(4), torch.zeros(4))
    return (next(module.parameters()) != before).any(1).tolist()


def test_a_stage_may_have_sparse_gradients(pool):
    assert pool.run(with_sparse_gradients).results[0] == [True] * 4 + [False] * 3


class Named(nn.Module):
    """Takes a batch as keyword arguments, as Hugging Face models do; returns a tuple of one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, DIM)

    def forward(self, input_ids, attention_mask):
        return (self.table(input_ids) * attention_mask.unsqueeze(-1),)


def with_named_inputs():
    group = Group.world()
    torch.manual_seed(0)
    module = Named() if group.rank == 0 else nn.Linear(DIM, DIM)
    opt = undoable(torch.optim.SGD(module.parameters(), 0.1))
    before = [p.detach().clone() for p in module.parameters()]
    stage = PipelineStage(
        module, opt, index=group.rank, num_stages=3, group=group,
        loss=lambda out, wanted: ((out - wanted["y"]) ** 2).mean(), micro_batches=2,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.arange(4).view(4, 1) + torch.arange(3),
        "attention_mask": torch.ones(4, 3),
    }
    loss = stage.step(inputs, {"y": torch.ones(4, 3, DIM)})
    changed = [not torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True)]
    return loss is not None, all(changed)


def test_batches_may_be_mappings_and_stages_return_tuples_of_one(pool):
    assert pool.run(with_named_inputs).results == [(False, True), (False, True), (True, True)]


def of_torchs_pipelining():
    from torch.distributed.pipelining import SplitPoint, pipeline

    group = Group.world()
    torch.manual_seed(3)
    whole = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(3)])
    spec = {"1": SplitPoint.BEGINNING, "2": SplitPoint.BEGINNING}
    module = pipeline(whole, mb_args=(torch.ones(2, DIM),), split_spec=spec).get_stage_module(
        group.rank
    )
    reference = copy.deepcopy(whole)
    stage = PipelineStage(
        module, undoable(torch.optim.SGD(module.parameters(), 1.0)), index=group.rank, num_stages=3,
        group=group, loss=lambda out, y: ((out - y) ** 2).mean(), micro_batches=2,
    )  # fmt: skip
    x, y = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1)), torch.zeros(4, DIM)
    loss = stage.step(x, y)
    expected = ((reference(x) - y) ** 2).mean()
    expected.backward()
    grads = [p.grad for p in stage.opt.parameters]
    return loss, expected.detach(), grads, [p.grad for p in reference[group.rank].parameters()]


def test_stages_of_torchs_pipelining_are_taken(pool):
    for rank, (loss, expected, grads, wanted) in enumerate(pool.run(of_torchs_pipelining).results):
        torch.testing.assert_close(grads, wanted)
        if rank == 2:
            torch.testing.assert_close(loss, expected)


def alone(**settings):
    module = nn.Linear(DIM, CLASSES)
    opt = undoable(torch.optim.SGD(module.parameters(), 0.1))
    given = {"index": 0, "num_stages": 1, "loss": loss_of, "micro_batches": 2} | settings
    return PipelineStage(module, opt, group=None, **given)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"micro_batches": 0},
            "micro_batches of at least 1 and chunk of 1 to micro_batches, got 0",
        ),
        ({"chunk": 3}, "got 2 and 3"),
        ({"index": 1}, r"expected a stage of 0..0, got 1"),
        ({"loss": None}, "stage 0 is the last and needs a loss"),
        ({"logged": [True]}, "each of 0 boundaries, got 1"),
    ],
)
def test_settings_that_fit_nothing_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        alone(**settings)


def test_a_stage_that_cannot_undo_is_refused():
    module = nn.Linear(DIM, CLASSES)
    opt = undoable(torch.optim.SGD(module.parameters(), 0.1), mode="commit")
    run = SimpleNamespace(rank=0, world_size=1, reads_whole_batches=False)
    stage = Stage(lambda index: (module, opt), run, loss=loss_of, micro_batches=2)
    with pytest.raises(ConfigError, match=r"stage 0: .* got mode='commit'"):
        stage.assign(0, 1)


@pytest.mark.parametrize(
    ("inputs", "targets", "text"),
    [
        (
            torch.ones(3, DIM),
            torch.zeros(3, dtype=torch.long),
            r"inputs .* 2 equal .* got \[3, 6\]",
        ),
        (torch.ones(2, DIM), torch.zeros(3, dtype=torch.long), r"targets of tensors .* got \[3\]"),
        (torch.ones(0, DIM), torch.zeros(0, dtype=torch.long), r"got \[0, 6\]"),
        ({"x": 3}, torch.zeros(2, dtype=torch.long), "got int"),
        ((), torch.zeros(2, dtype=torch.long), "reads the inputs and got none"),
    ],
)
def test_batches_that_do_not_split_are_refused_before_anything_is_computed(inputs, targets, text):
    stage = alone()
    before = state_of(stage)
    with pytest.raises(ConfigError, match=text):
        stage.step(inputs, targets)
    assert same(before, state_of(stage))


class Pair(nn.Module):
    def __init__(self, out):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.ones(DIM)), out

    def forward(self, x):
        return self.out(x, self.weight)


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (lambda x, w: (x * w, x), "got tuple"),
        (lambda x, w: x.detach(), "got one that needs no gradient"),
    ],
)
def test_outputs_that_no_stage_can_take_are_refused(out, text):
    module = Pair(out)
    stage = PipelineStage(
        module, undoable(torch.optim.SGD(module.parameters(), 0.1)), index=0, num_stages=2,
        group=None, micro_batches=2,
    )  # fmt: skip
    with pytest.raises(DataError, match=text):
        stage.step(torch.ones(4, DIM))


def test_a_stage_that_is_used_before_the_loop_says_where_it_is_built():
    run = SimpleNamespace(rank=0, world_size=2, reads_whole_batches=False)
    stage = Stage(lambda index: build(index, 2), run, loss=loss_of, micro_batches=2)
    assert run.reads_whole_batches
    for use in (lambda: stage.module, lambda: stage.opt, stage.step):
        with pytest.raises(
            ConfigError, match=r"expected the stage inside run.loop, where it is built"
        ):
            use()


def test_a_checkpoint_that_is_told_twice_costs_no_log(tmp_path):
    """As after a recovery to its step: the interval before it is kept all the same."""
    run = SimpleNamespace(rank=0, world_size=1, reads_whole_batches=False)
    stage = Stage(
        lambda index: build(index, 1), run, loss=loss_of, micro_batches=2, log=BoundaryLog(tmp_path)
    )
    with worlds.alone() as group:
        stage.assign(0, 1)
        stage.regroup(group)
        for step in (4, 8, 8):
            stage.committed(step)
        left = sorted(path.name for path in tmp_path.rglob("*.log"))
        stage.close()
    assert left == ["000001.log", "000002.log"]
    assert list(tmp_path.iterdir()) == []


class ByNorm(torch.optim.SGD):
    """Steps by gradients over the norm of all of them."""

    @torch.no_grad()
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def test_an_optimizer_that_would_see_one_stages_gradients_is_refused():
    def build(index):
        module = nn.Linear(2, 2)
        return module, undoable(ByNorm(module.parameters(), 0.1))

    def stage():
        return Stage(
            build,
            SimpleNamespace(rank=0, world_size=2, reads_whole_batches=False),
            loss=loss_of,
            micro_batches=1,
        )

    stage().assign(0, 1)
    text = (
        "stage 1: expected an optimizer that steps each parameter by itself, got ByNorm, in which"
    )
    with pytest.raises(ConfigError, match=text):
        stage().assign(1, 2)
