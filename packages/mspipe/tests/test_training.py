"""Training that was cut anywhere goes on as if it had not been."""

import itertools
import time

import pytest
import torch

from mspipe.data.events import Events
from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.server import MemoryServer
from mspipe.pipeline.stages import Stages
from mspipe.training import Settings, fit, restore
from shared.errors import CommError, ConfigError, DataError


def made(toy, events, folder, *, place="cpu", settings=None, **how):
    pipe = toy.pipeline(events, place=place, **how)
    optimizer = torch.optim.Adam(pipe.model.parameters(), 1e-2)
    settings = settings or Settings(epochs=3, batch_size=40, save_every=3)
    train, validate = events.split(0.8)
    return pipe, fit(pipe, optimizer, train, validate, settings, checkpoint=folder, progress=False)


def curve(epochs):
    return [(e.index, e.losses, e.scores) for e in epochs]


class Cut(Exception):
    pass


def before_training(pipe, act):
    """Has `act` called with the number of each iteration, from 1 and over all runs, before it is trained."""
    numbers = itertools.count(1)

    class Watched(Stages):
        def train(self, work):
            act(next(numbers))
            return super().train(work)

    pipe.stages = Watched


def cut_after(pipe, number):
    """Has every iteration after the pipeline's first `number` ones raise, as a crash would."""

    def cut(count):
        if count > number:
            raise Cut

    before_training(pipe, cut)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["tgn", "apan"])
@pytest.mark.parametrize("mode", ["sync", "forward"])
def test_resumes_to_the_same_curve_bit_for_bit(toy, tmp_path, name, mode):
    events = toy.stream()
    whole, run = made(toy, events, None, name=name, mode=mode)
    expected = curve(run)
    assert len(expected) == 3
    for number in (2, 5, 13, 22, None):
        pipe, run = made(toy, events, tmp_path, name=name, mode=mode)
        if number is None:
            assert curve(run) == expected
            continue
        cut_after(pipe, number)
        with pytest.raises(Cut):
            list(run)
    for one, other in zip(whole.model.parameters(), pipe.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(whole.memory.snapshot()["rows"], pipe.memory.snapshot()["rows"])
    # And once it is done, all of it is told again.
    assert curve(made(toy, events, tmp_path, name=name, mode=mode)[1]) == expected


@pytest.mark.unchecked
def test_a_killed_server_costs_what_was_not_saved(toy, tmp_path):
    events = toy.stream()
    expected = curve(made(toy, events, None)[1])
    with MemoryServer() as server:
        server.start()
        pipe, run = made(toy, events, tmp_path, place=server.address)
        before_training(pipe, lambda count: server.close() if count == 9 else None)
        with pytest.raises(CommError, match=r"tcp://"):
            list(run)
        pipe.memory.close()
    with MemoryServer() as server:
        server.start()
        pipe, run = made(toy, events, tmp_path, place=server.address)
        assert curve(run) == expected
        pipe.memory.close()


@pytest.mark.unchecked
def test_more_passes_can_be_asked_for(toy, tmp_path):
    events = toy.stream()
    settings = [Settings(epochs=n, batch_size=40) for n in (1, 3)]
    first = curve(made(toy, events, tmp_path, settings=settings[0])[1])
    both = curve(made(toy, events, tmp_path, settings=settings[1])[1])
    assert both[:1] == first
    assert both == curve(made(toy, events, None, settings=settings[1])[1])


def test_weights_and_memory_of_a_run_that_has_ended_are_restored(toy, tmp_path):
    events = toy.stream()
    train, _ = events.split(0.8)
    settings = Settings(epochs=2, batch_size=40)
    with pytest.raises(DataError, match=r"has done 0 of 2 passes; resume it first"):
        restore(toy.pipeline(events), train, settings, tmp_path)
    pipe, run = made(toy, events, tmp_path, settings=settings)
    epochs = list(run)
    other = toy.pipeline(events, seed=1)
    assert curve(restore(other, train, settings, tmp_path)) == curve(epochs)
    assert torch.equal(other.memory.snapshot()["rows"], pipe.memory.snapshot()["rows"])
    for one, two in zip(other.model.parameters(), pipe.model.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(DataError, match="was written with batch_size 40"):
        restore(other, train, Settings(epochs=2, batch_size=41), tmp_path)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["tgn", "jodie"])
def test_a_run_that_counted_time_from_zero_resumes_so(toy, tmp_path, name):
    early = toy.stream(200)
    events = Events(early.src, early.dst, early.t + 1000, early.features)

    def run_from_zero(folder):
        pipe, run = made(toy, events, folder, name=name)
        pipe.memory.start = pipe.sampler.begin = 0.0
        return pipe, run

    expected = curve(run_from_zero(None)[1])
    assert expected != curve(made(toy, events, None, name=name)[1])
    pipe, run = run_from_zero(tmp_path)
    cut_after(pipe, 4)
    with pytest.raises(Cut):
        list(run)
    # A file of a run that knew no start.
    state = torch.load(tmp_path / "training.pt", weights_only=True)
    del state["begin"], state["memory"]["start"]
    torch.save(state, tmp_path / "training.pt")
    pipe, run = made(toy, events, tmp_path, name=name)
    cut_after(pipe, 4)
    with pytest.raises(Cut):
        list(run)
    assert curve(made(toy, events, tmp_path, name=name)[1]) == expected


def test_a_checkpoint_that_is_damaged_or_of_another_run_is_refused(toy, tmp_path):
    events = toy.stream()
    list(itertools.islice(made(toy, events, tmp_path)[1], 1))
    for other, told in (
        ({"settings": Settings(batch_size=41)}, "batch_size 40, this run has 41"),
        ({"name": "jodie"}, "model 'TGN', this run has 'JODIE'"),
    ):
        with pytest.raises(DataError, match=told):
            list(made(toy, events, tmp_path, **other)[1])
    with pytest.raises(DataError, match="events 480, this run has 400"):
        list(made(toy, events[:500], tmp_path)[1])
    other = Events(events.src, events.dst, events.t, events.features + 1)
    with pytest.raises(DataError, match="was written with digest '"):
        list(made(toy, other, tmp_path)[1])
    path = tmp_path / "training.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged"):
        list(made(toy, events, tmp_path)[1])


def test_settings_that_make_no_sense():
    for name in ("epochs", "batch_size", "save_every"):
        with pytest.raises(ConfigError, match=f"{name}: expected 1 or more"):
            Settings(**{name: 0})


def test_nothing_to_learn_from(toy):
    events = toy.stream()
    pipe = toy.pipeline(events)
    optimizer = torch.optim.Adam(pipe.model.parameters())
    with pytest.raises(DataError, match="at least one event"):
        next(fit(pipe, optimizer, events[:0]))
    assert isinstance(pipe.memory, NodeMemory)


@pytest.mark.parametrize(
    ("bias", "loss"), [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "inf")]
)
def test_losses_that_are_none(toy, bias, loss):
    events = toy.stream()
    pipe = toy.pipeline(events)
    optimizer = torch.optim.Adam(pipe.model.parameters())
    with torch.no_grad():
        pipe.model.head.out.bias.fill_(bias)
    with pytest.raises(DataError, match=f"batch 0: expected a finite loss, got {loss}; lower"):
        next(fit(pipe, optimizer, events, progress=False))


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(toy, tmp_path, synced):
    events = toy.stream()
    settings = Settings(epochs=1, batch_size=100, save_every=100)
    list(made(toy, events, tmp_path, settings=settings)[1])
    assert synced.replaced == [(tmp_path / "training.pt", True)]


@pytest.mark.unchecked
@pytest.mark.parametrize("mode", ["sync", "forward"])
def test_a_rate_leaves_out_the_first_batch_and_what_an_earlier_process_did(toy, tmp_path, mode):
    events = toy.stream()
    settings = Settings(epochs=2, batch_size=40, save_every=3)
    num_events = len(events.split(0.8)[0])

    def slow_at(number):
        return lambda count: time.sleep(0.4 if count == number else 0)

    pipe, run = made(toy, events, tmp_path, mode=mode, settings=settings)
    before_training(pipe, slow_at(1))
    first, second = run
    warm_s = (num_events - 40) / first.events_per_s
    assert 0 < warm_s <= first.seconds - 0.4
    assert second.events_per_s == pytest.approx(num_events / second.seconds)
    # Here nine batches of a pass are an earlier process's, and three are left of it.
    pipe, run = made(toy, events, tmp_path / "cut", mode=mode, settings=settings)
    cut_after(pipe, 10)
    with pytest.raises(Cut):
        next(run)
    pipe, run = made(toy, events, tmp_path / "cut", mode=mode, settings=settings)
    resumed = next(run)
    assert resumed.losses == first.losses
    assert resumed.events_per_s * resumed.seconds >= num_events - 10 * 40
    assert resumed.events_per_s * resumed.seconds < num_events


def test_one_batch_has_no_rate(toy):
    events = toy.stream()
    _, run = made(toy, events, None, settings=Settings(epochs=1, batch_size=len(events)))
    assert [epoch.events_per_s for epoch in run] == [0.0]
