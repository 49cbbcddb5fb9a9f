"""What mitigation does within a run: which states the model gets, and how often the weight is fitted."""

import pytest
import torch

from mspipe.data.batching import batches
from mspipe.pipeline.mitigation import Mitigation
from mspipe.pipeline.stages import Stages

STALE = {"mode": "stale", "max_staleness": 4, "is_fixed": True}


class Noted(Mitigation):
    """Mixes to a number of its own, and notes the states that it mixes and the fits."""

    def __init__(self, events, mix=None, **settings):
        super().__init__(events, **settings)
        self.mix, self.mixes, self.fits = mix, [], []

    def mixed(self, own, times, others, is_there):
        mix, is_mixed, mean = super().mixed(own, times, others, is_there)
        if self.mix is not None:
            mix = torch.full_like(mix, self.mix)
        self.mixes.append((mix, is_mixed))
        return mix, is_mixed, mean

    def fit(self, stale, mean, fresh):
        self.fits.append(len(stale))
        super().fit(stale, mean, fresh)


def test_the_model_gets_the_mixed_states(toy):
    events = toy.stream(900, num_src=60)
    mitigation = Noted(events, quantile=0.5, mix=123.0)
    pipe = toy.pipeline(events, mitigation=mitigation, **STALE)
    update, num_given = pipe.model.update, []

    def noted(state):
        num_given.append(int((state.memory == 123.0).all(1).sum()))
        return update(state)

    pipe.model.update = noted
    for _ in pipe.train(batches(events, 40)):
        pass
    num_mixed = sum(len(mix) for mix, _ in mitigation.mixes)
    assert num_mixed > 100
    assert sum(num_given) == num_mixed


@pytest.mark.unchecked
def test_a_mix_changes_the_losses_and_a_weight_of_one_does_not(toy):
    events = toy.stream(900, num_src=60)

    def losses(**settings):
        mitigation = Mitigation(events, quantile=0.5, **settings) if settings else None
        return toy.train(
            toy.pipeline(events, mitigation=mitigation, **STALE), events, epochs=1, size=40
        )

    without = losses()
    assert losses(weight=1.0) == without
    mixed = losses(weight=0.0)
    assert mixed != without
    assert mixed != losses(weight=0.5)


def test_the_weight_is_fitted_once_an_iteration_however_many_writes_were_missed(toy):
    events = toy.stream(900, num_src=60)
    mitigation = Noted(events, quantile=0.0)
    pipe = toy.pipeline(events, mitigation=mitigation, **STALE)
    before, num_fits = 0, []
    for _ in pipe.train(batches(events, 40)):
        num_fits.append(len(mitigation.fits) - before)
        before = len(mitigation.fits)
    assert max(num_fits) == 1
    assert sum(num_fits) > 10
    assert sum(mitigation.fits) > 2 * len(mitigation.fits), "all that is known is fitted"


def test_the_weight_is_fitted_to_all_missed_writes_of_mixed_states(toy):
    events = toy.stream(900, num_src=60)
    mitigation, num_missed = Noted(events, quantile=0.0), []

    class Counted(Stages):
        def train(self, work):
            num_mixes = len(mitigation.mixes)
            found = super().train(work)
            if len(mitigation.mixes) > num_mixes:
                is_mixed = mitigation.mixes[-1][1]
                num_missed.append(int(work.is_missing[work.similar[0]][is_mixed].sum()))
            return found

    pipe = toy.pipeline(events, mitigation=mitigation, stages=Counted, **STALE)
    for _ in pipe.train(batches(events, 40)):
        pass
    assert [count for count in num_missed if count] == mitigation.fits
