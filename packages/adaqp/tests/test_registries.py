"""What is registered from outside is in the command line's help, is taken, and works."""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import adaqp
from adaqp.cli import main
from adaqp.messages.wire import BufferLayout, pack, row_bytes, unpack
from adaqp.planner.problem import Assignment
from adaqp.planner.solvers import SOLVERS, SolverAnswer
from adaqp.planner.widths import WIDTHS, Width
from adaqp.policy import Adaptive, Fixed, Policy
from adaqp.training.config import MODELS, POLICIES, ModelConfig, PolicyConfig, PolicyKind
from shared.errors import ConfigError
from shared.kernels.quantize import BITS


@dataclass(frozen=True, slots=True)
class HalfRows(Policy):
    """All rows as bfloat16."""

    @property
    def start_bits(self) -> int:
        """The width of bfloat16."""
        return 16


@contextmanager
def registered(registry, name, entry):
    registry.add(name, entry, "for a test")
    try:
        yield
    finally:
        registry.remove(name)


def help_of(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def widths_sent(folder, policy):
    dg = adaqp.load(folder)
    with dg.messages(policy) as messages:
        dg.aggregate(dg.feat.clone().requires_grad_()).sum().backward()
    return messages.report()["forward0"]


def test_a_policy_from_outside_is_in_the_help_and_trains(sbm, cut, pool2, capsys, tmp_path):
    train = ["train", cut(sbm, 1), "--policy.name", "half-rows", "--epochs", "1"]
    train += ["--model.hidden", "8", "--history", str(tmp_path / "history.json")]
    assert "half-rows" not in help_of("train", capsys)
    with registered(POLICIES, "half-rows", PolicyKind(build=lambda _: HalfRows())):
        assert "half-rows" in help_of("train", capsys)
        assert "half-rows" in help_of("bench", capsys)
        assert main(train) == 0
        policy, _ = PolicyConfig(name="half-rows").build()
    assert (tmp_path / "history.json").exists()
    assert pool2.run(widths_sent, cut(sbm, 2), policy).results == [{16: 1.0}] * 2
    with pytest.raises(SystemExit) as ended:
        main(train)
    assert ended.value.code == 2
    with pytest.raises(ConfigError, match=r"policy: expected one of .* got 'half-rows'"):
        PolicyConfig(name="half-rows")


def test_a_width_from_outside_is_in_the_help_and_carries_rows(capsys):
    assert "64" not in help_of("train", capsys)
    with registered(WIDTHS, 64, Width(dtype="float64")):
        assert "16,32,64}" in help_of("train", capsys)
        assert "16,32,64}" in help_of("bench", capsys)
        assert PolicyConfig(name="fixed", width=64).build()[0] == Fixed(64)
        assert Adaptive(bits=(2, 64)).bits == (2, 64)
        assert row_bytes(64, 5, 4, torch.bfloat16) == 40
        x = torch.randn(3, 5)
        bits = torch.tensor([8, 64, 32], dtype=torch.uint8)
        layout = BufferLayout(bits, 5, x.dtype, torch.bfloat16)
        out = torch.empty_like(x)
        unpack(layout, pack(layout, x, torch.arange(3), key=0)[0], out)
        assert torch.equal(out[1:], x[1:])
        assert not torch.equal(out[0], x[0])
        problem = Assignment([9.0], [0], [[1.0, 8.0]], [2, 64], [0], [1.0], [0.0], lam=0.5)
        np.testing.assert_array_equal(problem.option_variance(), [[1.0, 0.0]])
    with pytest.raises(ConfigError, match=r"Fixed.bits: expected one of .* got 64"):
        Fixed(64)


def test_a_model_from_outside_is_in_the_help_and_built(sbm, cut, capsys):
    def linear(dg, dims, *, norm, dropout):
        return torch.nn.Linear(dims[0], dims[-1])

    assert "linear" not in help_of("train", capsys)
    with registered(MODELS, "linear", linear):
        assert "linear" in help_of("train", capsys)
        model = ModelConfig(conv="linear").build(adaqp.load(cut(sbm, 1)))
        assert isinstance(model, torch.nn.Linear)
    with pytest.raises(ConfigError, match=r"model.conv: expected one of .* got 'linear'"):
        ModelConfig(conv="linear")


def test_a_solver_from_outside_is_in_the_help_and_assigns(capsys):
    problem = Assignment([9.0], [0], [[1.0, 8.0]], [2, 8], [0], [1.0], [0.0], lam=1.0)
    with registered(SOLVERS, "least", lambda p, _: SolverAnswer(p.uniform(0), 0.0, "least")):
        assert "least" in help_of("train", capsys)
        solution = adaqp.assign(problem, solver=Adaptive(solver="least").solver)
        assert (solution.solver, solution.bits.tolist()) == ("least", [2])
        assert adaqp.assign(problem).bits.tolist() == [8]
    with pytest.raises(ConfigError, match="solver: expected one of greedy, milp, got 'least'"):
        Adaptive(solver="least")
    with pytest.raises(ConfigError, match="scope: expected one of layer, global, got 'rank'"):
        Adaptive(scope="rank")


def test_quantised_widths_are_those_that_the_kernel_packs():
    assert [bits for bits in WIDTHS if WIDTHS.get(bits).is_quantised] == list(BITS)
