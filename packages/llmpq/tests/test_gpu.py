"""Stages on CUDA devices: ranks share one, and gloo carries messages through the host."""

import pytest
import torch

from llmpq import Pipeline, Plan, Stage
from llmpq.profiler.layer_times import find_device, measure_device
from shared.comms import RankPool

from .runtime.tiny_models import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def generated(plan, folder, ids, device):
    with Pipeline(plan, folder, device=device) as pipe:
        found = pipe.generate(ids, max_new_tokens=6)
        assert sum(pipe.stage_s.prefill) > 0
        return found


@pytest.mark.parametrize("bits", [16, 8, 4, 3])
@pytest.mark.parametrize("family", ["llama", "opt", "bloom"])
def test_tokens_are_those_of_the_cpu(family, bits, tmp_path):
    folder = make(family, tmp_path)
    stages = (Stage(rank=1, layers=(0, 2)), Stage(rank=0, layers=(2, 5)))
    plan = Plan(stages=stages, bits=(bits,) * 5, group_size=16, prefill_size=1, decode_size=2)
    ids = torch.randint(3, 131, (4, 7), generator=torch.Generator().manual_seed(0))
    with RankPool(2) as pool:
        on_gpu = pool.run(generated, plan, folder, ids, "cuda").results[0]
        on_cpu = pool.run(generated, plan, folder, ids, "cpu").results[0]
    assert on_gpu.tolist() == on_cpu.tolist()


def test_the_device_of_one_process_is_measured(tmp_path):
    assert find_device().type == "cuda"
    found = measure_device(
        make("llama", tmp_path), kind="here", bits=(4, 16), group_size=16, batches=(1, 2, 4),
        prompt_tokens=8, new_tokens=4, limit_s=5.0,
    )  # fmt: skip
    assert found.processor == torch.cuda.get_device_name()
    assert found.decode[4].decode_s(2, 8) > 0
