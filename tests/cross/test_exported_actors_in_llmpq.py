"""A model that hybridflow trained and exported, planned and run by llmpq."""

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

import hybridflow as hy
import llmpq
from hybridflow.roles.state.export import export
from shared.comms import RankPool

MODEL = {**hy.PRESETS["tiny-llama"], "vocab_size": 16, "num_key_value_heads": 2}
BITS = (4, 16)
NEW_TOKENS = 3


@dataclass(frozen=True)
class EqualDevices:
    """Two devices that take a millisecond for a layer, and hold so many bytes."""

    memory: int
    num_devices: int = 2
    bits: tuple[int, ...] = BITS

    def kind(self, device):
        return "planted"

    def prefill_s(self, device, bits, *, batch, tokens):
        return 1e-3 * batch

    def decode_s(self, device, bits, *, batch, past):
        return 1e-3 + 1e-5 * bits

    def ends_s(self, device, *, batch, tokens):
        return 0.0

    def send_s(self, sender, receiver, num_bytes):
        return 0.0

    def memory_bytes(self, device):
        return self.memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "model"
    with hy.Workers.inline() as workers:
        actor = hy.Actor(MODEL, workers.pool(1), dtype="float32", optimizer=hy.AdamW(lr=1e-2))
        return export(actor, path)


def generate(plan, folder, ids):
    with llmpq.Pipeline(plan, folder) as pipe:
        return pipe.generate(ids, max_new_tokens=NEW_TOKENS)


@pytest.mark.slow
def test_an_exported_actor_is_planned_and_run(folder):
    spec = llmpq.ModelSpec.from_hf(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(16).view(4, 4)
    noise = llmpq.sensitivity(model, [ids], bits=BITS, group_size=16).noise
    found = llmpq.plan(
        spec,
        EqualDevices(memory=10**9),
        noise,
        llmpq.Workload(num_prompts=4, prompt_tokens=4, new_tokens=NEW_TOKENS),
        llmpq.Quality(max_kl=float(noise[:, 0].sum()) / 2),
        bits=BITS,
        group_size=16,
    )
    plan = found.plan
    assert plan.model == spec.fingerprint
    assert len(plan.stages) == 2  # half of the layers on each, as they are as fast
    assert found.nats <= float(noise[:, 0].sum()) / 2
    whole = llmpq.load(folder, plan).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
        min_new_tokens=NEW_TOKENS,
    )  # fmt: skip
    with RankPool(2) as pool:
        answers = pool.run(generate, plan, folder, ids).results[0]
    assert torch.equal(answers, whole[:, ids.shape[1] :])
