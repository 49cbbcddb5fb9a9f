"""What a plan is made from: files of rank 0, and text to calibrate with."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from llmpq.planner.candidates import Candidates
from llmpq.planner.costs import FreeCosts
from llmpq.profiler import layer_times, planner_inputs
from llmpq.profiler.cache import find_sensitivity
from llmpq.profiler.planner_inputs import calibration_batches, measure_inputs
from llmpq.profiler.profile import Profile
from shared.comms import Group, RankPool
from shared.errors import ConfigError, RankFailure
from shared.topology.cluster import Cluster, Host
from shared.topology.device import CPU

from ..runtime.tiny_models import add_tokenizer, make


def measured(model, folder, profiles, **more):
    return measure_inputs(
        model, folder / "cluster.yaml", folder / "prompts.jsonl", bits=(4,), group_size=16,
        dtype="float32", max_kl=None, num_prompts=4, new_tokens=2, profiles=profiles,
        **more,
    )  # fmt: skip


def measured_by_rank(model, here, elsewhere):
    """Only the first rank is given the files that are there."""
    return measured(model, here if Group.world().rank == 0 else elsewhere, here / "profiles")


@pytest.mark.slow
def test_files_of_the_first_rank_are_enough(tmp_path):
    model = add_tokenizer(make("llama", tmp_path / "model"))
    # A rank too few: what is read of both files is said on both ranks before anything is measured.
    Cluster(hosts=(Host(name="x", devices=(CPU,)),)).to_yaml(tmp_path / "cluster.yaml")
    (tmp_path / "prompts.jsonl").write_text(json.dumps("the rain falls") + "\n")
    with RankPool(2) as pool, pytest.raises(RankFailure, match="1 devices, got 2 ranks"):
        pool.run(measured_by_rank, model, tmp_path, tmp_path / "nowhere")


@pytest.fixture
def profiled(tmp_path, monkeypatch):
    """A folder with a model and its inputs, and noise that says which method it is of."""
    model = add_tokenizer(make("llama", tmp_path / "model"))
    Cluster(hosts=(Host(name="x", devices=(CPU,)),)).to_yaml(tmp_path / "cluster.yaml")
    (tmp_path / "prompts.jsonl").write_text(json.dumps("the rain falls on a hill") + "\n")
    nats = {"fisher": 1.0, "int8": 0.25}

    def noise_of(profiles, model, texts, *, bits, group_size, method="fisher"):
        noise = nats[method] * np.arange(1.0, 6.0)[:, None] * np.ones(len(bits))
        return SimpleNamespace(noise=noise)

    monkeypatch.setattr(planner_inputs, "find_sensitivity", noise_of)
    return model, tmp_path


@pytest.mark.parametrize(("form", "factor"), [("int8", 1.25), ("packed", 1.0)])
def test_noise_of_8_bit_products_is_added_to_that_of_rounding(profiled, monkeypatch, form, factor):
    device = SimpleNamespace(forms={"4": [[1, "packed"], [32, form]]})
    profile = mock.Mock(spec=Profile, devices=[device])
    monkeypatch.setattr(planner_inputs, "profile_cluster", lambda *args, **settings: profile)
    model, folder = profiled
    inputs = measured(model, folder, folder / "profiles")
    assert inputs is not None
    noise = inputs.noise
    np.testing.assert_allclose(noise[:, 0], factor * np.arange(1.0, 6.0))


@pytest.mark.parametrize(
    ("lengths", "planned", "other"),
    [
        ([4] * 7 + [90], (7, 4), (1, 90)),  # micro-batches of 1 prompt would be small for 7
        ([90] * 4 + [4] * 4, (4, 90), (4, 4)),
    ],
)
def test_one_batch_is_planned_and_memory_for_all(profiled, monkeypatch, lengths, planned, other):
    model, folder = profiled
    lines = [{"token_ids": [5] * length} for length in lengths]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    profile = mock.Mock(spec=Profile, devices=[])
    monkeypatch.setattr(planner_inputs, "profile_cluster", lambda *args, **settings: profile)
    inputs = measure_inputs(
        model, folder / "cluster.yaml", folder / "prompts.jsonl", bits=(4,), group_size=-1,
        dtype="float32", max_kl=None, num_prompts=8, new_tokens=2, profiles=folder / "profiles",
    )  # fmt: skip
    assert inputs is not None
    spec, _, noise, workload, quality = inputs.given
    assert set(workload.batches) == {planned, other}
    assert (workload.num_prompts, workload.prompt_tokens) == planned
    assert inputs.planned_texts == [[5] * planned[1]] * planned[0]
    settings = {"costs": FreeCosts((4,), [10**9]), "noise": noise, "quality": quality, "bits": (4,)}
    for rows, tokens in (planned, other):
        each = replace(workload, num_prompts=rows, prompt_tokens=tokens)
        candidates = Candidates(
            model=spec, workload=each, group_size=-1, dtype="float32", **settings
        )
        problem = candidates.problem((0,), (1, rows))
        largest = max(rows * (tokens + 2) for rows, tokens in (planned, other))
        assert problem.kv_bytes[0] == 2 * spec.kv_bytes(1, largest)
        assert problem.memory_bytes[0] == 10**9 - 2 * spec.activation_bytes(1, 90)


@pytest.mark.slow
def test_what_int8_costs_is_counted_where_it_was_chosen(tmp_path, monkeypatch):
    model = add_tokenizer(make("llama", tmp_path / "model"))
    Cluster(hosts=(Host(name="x", devices=(CPU,)),)).to_yaml(tmp_path / "cluster.yaml")
    (tmp_path / "prompts.jsonl").write_text(json.dumps("the rain falls on the sea") + "\n")

    def int8_is_fastest(*, tokens, forms, **settings):
        return {count: {form: 1.0 - (form == "int8") for form in forms} for count in tokens}

    monkeypatch.setattr(layer_times, "measure_forms", int8_is_fastest)
    profiles = tmp_path / "profiles"
    plain = measured(model, tmp_path, profiles)
    allowed = measured(model, tmp_path, profiles, activations="int8")
    assert plain.profile.forms["0"]["4"] == [[1, "packed"]]
    assert allowed.profile.forms["0"]["4"] == [[1, "int8"]]
    added = find_sensitivity(
        profiles, model, calibration_batches(plain.texts), bits=(4,), group_size=16, method="int8"
    ).noise
    assert (added > 0).any()
    np.testing.assert_allclose(allowed.given[2], plain.given[2] + added)
    # A profile that was measured for floats alone is no profile with int8, and the other way round.
    assert measured(model, tmp_path, profiles).profile.forms == plain.profile.forms


def test_calibration_takes_the_beginnings_of_prompts_from_all_over_the_file():
    texts = [list(range(100)), [5], list(range(7)), list(range(50))]
    found = calibration_batches(texts, num_tokens=60, length=20)
    assert [batch.tolist() for batch in found] == [
        [list(range(20))],
        [list(range(7))],
        [list(range(20))],
    ]
    many = [[number] * 10 for number in range(1000)]
    found = calibration_batches(many, num_tokens=100, length=10)
    assert [int(batch[0, 0]) for batch in found] == list(range(0, 1000, 100))
    others = calibration_batches(many, num_tokens=100, length=10, between=True)
    assert [int(batch[0, 0]) for batch in others] == list(range(50, 1000, 100))
    assert calibration_batches([[1]], num_tokens=100) == []


@pytest.mark.slow
def test_prompts_beyond_learned_positions_are_refused_when_planned(tmp_path):
    model = add_tokenizer(make("opt", tmp_path / "model"))
    longest = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    Cluster(hosts=(Host(name="x", devices=(CPU,)),)).to_yaml(tmp_path / "cluster.yaml")
    line = {"token_ids": [1] * (longest - 1)}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=rf"at most {longest} tokens .* got {longest - 1} \+ 2"):
        measured(model, tmp_path, tmp_path / "profiles")
