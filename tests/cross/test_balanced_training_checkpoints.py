"""A hydraulis engine's state saved through bytecheckpoint's storage, and gone on with in another layout."""

from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, LlamaConfig

import hydraulis
from bytecheckpoint import DCPReader, DCPWriter
from shared.comms import RankPool

LENGTHS = (30, 7, 2, 13, 5, 11)


def make_engine(strategy):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).double()
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    return hydraulis.Engine(model, optimizer, max_tokens=64, strategy=strategy)


def texts(number):
    generator = torch.Generator().manual_seed(number)
    return [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]


def train(path, strategy):
    """Losses and weights of a step behind the one that is saved."""
    engine = make_engine(strategy)
    engine.step(texts(0))
    dcp.save(engine.sharded_state_dict(), storage_writer=DCPWriter(path))
    return engine.step(texts(1)).loss, engine.state_dict()


def resume(path, strategy):
    engine = make_engine(strategy)
    state = engine.sharded_state_dict()
    dcp.load(state, storage_reader=DCPReader(path))
    engine.load_sharded_state_dict(state)
    return engine.step(texts(1)).loss, engine.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pp2", "tp1+tp1"])
def test_an_engine_goes_on_in_another_layout_from_bytecheckpoints_files(tmp_path, strategy):
    path = str(tmp_path / "step_00000001")
    with RankPool(3) as pool:
        loss, weights = pool.run(train, path, "tp2+tp1").results[0]
    with RankPool(2) as pool:
        for found, state in pool.run(resume, path, strategy).results:
            assert found == pytest.approx(loss, rel=1e-9)
            assert state.keys() == weights.keys()
            for name, value in weights.items():
                torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-10)
