"""Rollout by servers of vLLM and SGLang, played by a stand-in; real servers are not proven here."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.models import pieces
from hybridflow.rollout.native import generator as native
from hybridflow.rollout.sampling import Sampling
from hybridflow.rollout.servers.connection import Connection
from hybridflow.rollout.servers.server import ServerRollout
from shared.errors import CommError, ConfigError, DataError

from .stand_in import CONFIG, StandIn, made_model

KINDS = ("vllm", "sglang")
LENGTHS = [3, 7, 1, 4]
GREEDY = Sampling(max_new_tokens=6, temperature=0.0, end_token=None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Weights of two versions, as `save_pretrained` would write them."""
    found = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"weights{seed}")
        model = made_model(seed)
        state = {p.name: p.view(model).clone().contiguous() for p in pieces.pieces(model)}
        save_file(state, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIG))
        found.append(folder)
    return found


def prompts_of(lengths=LENGTHS):
    chosen = torch.Generator().manual_seed(1)
    return [torch.randint(1, 23, (length,), generator=chosen) for length in lengths]


@pytest.fixture(params=KINDS)
def stand_in(request, folders):
    server = StandIn(request.param, folders[0])
    yield server
    server.close()


def connected(server, **more):
    settings = {"timeout_s": 10.0, "backoff_s": 0.01, "num_tries": 3, **more}
    return ServerRollout(server.url, kind=server.kind, **settings)


def asks(server):
    """The path of a request for a response, and of one for other weights."""
    return {
        "vllm": SimpleNamespace(draw="/v1/completions", load="/collective_rpc"),
        "sglang": SimpleNamespace(draw="/generate", load="/update_weights_from_disk"),
    }[server.kind]


def test_stand_in_greedy_responses_are_those_of_ours(stand_in):
    rollout = connected(stand_in)
    free = native.generate(stand_in.model, prompts_of(), GREEDY)
    end = int(free.tokens[1, 9])
    for sampling in (GREEDY, Sampling(max_new_tokens=6, temperature=0.0, end_token=end)):
        expected = native.generate(stand_in.model, prompts_of(), sampling)
        found = rollout.generate(prompts_of(), sampling)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.lengths, expected.lengths)
        assert torch.equal(found.prompt_lengths, expected.prompt_lengths)
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-5)
        assert found.versions.tolist() == [0] * 4
    assert found.lengths[1] < free.lengths[1]


def test_stand_in_draws_depend_on_the_sample_alone(stand_in):
    rollout = connected(stand_in)
    sampling = Sampling(max_new_tokens=6, num_samples=2, seed=3)
    ids = torch.arange(8) + 50
    whole = rollout.generate(prompts_of(), sampling, sample_ids=ids, step=1)
    alone = rollout.generate(prompts_of()[2:3], sampling, sample_ids=ids[4:6], step=1)
    assert torch.equal(whole.tokens[4:6, :7], alone.tokens)
    assert whole.tokens[0].tolist() != whole.tokens[1].tolist()
    other = rollout.generate(prompts_of(), sampling, sample_ids=ids, step=2)
    assert not torch.equal(whole.tokens, other.tokens)


def test_stand_in_is_asked_for_the_whole_distribution(stand_in):
    connected(stand_in).generate(prompts_of(), Sampling(max_new_tokens=2))
    (_, body) = next(call for call in stand_in.seen if call[0] == asks(stand_in).draw)
    asked = body.get("sampling_params", body)
    assert (asked["top_p"], asked["top_k"], asked["min_p"]) == (1.0, -1, 0.0)
    assert asked["repetition_penalty"] == 1.0


def test_vllm_stand_in_log_probs_at_another_temperature_are_refused(folders):
    server = StandIn("vllm", folders[0])
    warm = Sampling(max_new_tokens=2, temperature=0.7)
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        connected(server).generate(prompts_of(), warm)
    connected(server, log_probs_mode="processed_logprobs").generate(prompts_of(), warm)
    server.close()


def test_stand_in_failures_are_tried_again(stand_in):
    rollout = connected(stand_in, max_in_flight=1)
    stand_in.faults[asks(stand_in).draw] = [lambda body: (503, "busy")] * 2
    rollout.generate(prompts_of(), GREEDY)
    assert stand_in.paths().count(asks(stand_in).draw) == 4 + 2
    stand_in.faults[asks(stand_in).draw] = [lambda body: (503, "busy")] * 3
    with pytest.raises(CommError, match=r"no answer in 3 tries.*status 503: 'busy'"):
        rollout.generate(prompts_of()[:1], GREEDY)


def test_stand_in_refusals_are_not_tried_again(stand_in):
    rollout = connected(stand_in, max_in_flight=1)
    stand_in.faults[asks(stand_in).draw] = [lambda body: (400, "too long")]
    with pytest.raises(CommError, match="refused with status 400: 'too long'"):
        rollout.generate(prompts_of()[:1], GREEDY)
    assert stand_in.paths().count(asks(stand_in).draw) == 1


def test_stand_in_that_is_silent_runs_into_the_time_limit(stand_in):
    # Connecting has two tries as well, of which one may be late.
    rollout = connected(stand_in, timeout_s=0.5, num_tries=2)
    stand_in.may_answer.clear()
    with pytest.raises(CommError, match=r"no answer in 2 tries.*TimeoutError"):
        rollout.generate(prompts_of()[:1], GREEDY)
    stand_in.may_answer.set()


def test_no_server_is_said_so():
    with pytest.raises(CommError, match=r"no answer in 2 tries.*start the server"):
        ServerRollout("http://127.0.0.1:9", kind="sglang", num_tries=2, backoff_s=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_stand_in_that_is_another_service_is_said_so(kind, folders):
    server = StandIn(kind, folders[0])
    first = "/v1/models" if kind == "vllm" else "/model_info"
    server.faults[first] = [lambda body: (200, "<html>"), lambda body: (200, '{"hello": 1}')]
    with pytest.raises(CommError, match="expected JSON, got '<html>'"):
        connected(server)
    with pytest.raises(CommError, match=f"is it an? {'vLLM' if kind == 'vllm' else 'SGLang'}"):
        connected(server)
    rollout = connected(server)
    server.faults[asks(server).draw] = [lambda body: (200, '{"hello": 1}')]
    with pytest.raises(CommError, match="and a recent one"):
        rollout.generate(prompts_of()[:1], GREEDY)
    server.close()


def test_an_answer_without_end_is_refused(stand_in):
    connection = Connection(url=stand_in.url, max_answer_bytes=1000)
    stand_in.faults["/health"] = [lambda body: (200, "x" * 1001)]
    with pytest.raises(CommError, match="at most 1,000 bytes"):
        connection.post("/health")


def test_settings_out_of_range_are_refused():
    for change in ({"kind": "other"}, {"max_in_flight": 0}, {"num_tries": 0}, {"timeout_s": 0.0}):
        with pytest.raises(ConfigError, match="expected"):
            ServerRollout("http://127.0.0.1:9", **{"kind": "vllm", **change})
    with pytest.raises(ConfigError, match="expected http://HOST:PORT, got 'localhost:8000'"):
        ServerRollout("localhost:8000", kind="vllm")


def test_stand_in_has_so_many_requests_at_once_and_not_more(stand_in):
    stand_in.slow_s, stand_in.least_running = 0.03, 3
    connected(stand_in, max_in_flight=3).generate(prompts_of([2] * 9), GREEDY)
    assert stand_in.most_running == 3


def test_stand_in_takes_weights_from_a_folder(stand_in, folders):
    rollout = connected(stand_in)
    before = rollout.generate(prompts_of(), GREEDY)
    rollout.sync_weights(folders[1], 7)
    assert (rollout.version, stand_in.label) == (7, "7")
    found = rollout.generate(prompts_of(), GREEDY)
    assert torch.equal(found.tokens, native.generate(made_model(1), prompts_of(), GREEDY).tokens)
    assert not torch.equal(found.tokens, before.tokens)
    assert found.versions.tolist() == [7] * 4
    with pytest.raises(ConfigError, match="not the present 7"):
        rollout.sync_weights(folders[0], 7)
    # Whoever connects next is told.
    assert connected(stand_in).version == 7


def test_stand_in_loads_when_no_response_is_under_way(stand_in, folders):
    rollout = connected(stand_in, max_in_flight=2)
    stand_in.may_answer.clear()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(rollout.generate(prompts_of(), GREEDY)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while not stand_in.num_running:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    threading.Timer(0.1, stand_in.may_answer.set).start()
    rollout.sync_weights(folders[1], 1)
    last = rollout.generate(prompts_of(), GREEDY)
    for thread in threads:
        thread.join()
    expected = {v: native.generate(made_model(v), prompts_of(), GREEDY).tokens for v in (0, 1)}
    assert last.versions.tolist() == [1] * 4
    assert [0] * 4 in [one.versions.tolist() for one in found]
    for one in (*found, last):
        assert len(one.versions.unique()) == 1
        assert torch.equal(one.tokens, expected[int(one.versions[0])])


def test_stand_in_response_across_two_versions_is_refused(stand_in):
    rollout = connected(stand_in, max_in_flight=1)

    def change(body):
        stand_in.label = "3"

    stand_in.faults[asks(stand_in).draw] = [lambda body: None, change]
    with pytest.raises(CommError, match="began with weights 'default' and ended with '3'"):
        rollout.generate(prompts_of(), GREEDY)
    with pytest.raises(CommError, match="expected weights 'default', and the server has '3'"):
        rollout.generate(prompts_of(), GREEDY)


@pytest.mark.parametrize("tokens", [[5, 4], [], [5, 4, 5, 4, 5, 4, 5]])
def test_stand_in_response_that_is_not_whole_is_refused(stand_in, tokens):
    rollout = connected(stand_in)
    values = [-1.0] * len(tokens)
    answers = {
        "vllm": {"choices": [
            {"token_ids": tokens, "logprobs": {"token_logprobs": values}, "finish_reason": "abort"}
        ]},
        "sglang": {"meta_info": {
            "output_token_logprobs": [[v, t] for v, t in zip(values, tokens, strict=True)],
            "weight_version": "default", "finish_reason": {"type": "abort"},
        }},
    }  # fmt: skip
    answer = json.dumps(answers[stand_in.kind])
    stand_in.faults[asks(stand_in).draw] = [lambda body: (200, answer)]
    with pytest.raises(CommError, match=f"has {len(tokens)} tokens.*because of 'abort'"):
        rollout.generate(prompts_of()[:1], GREEDY)


def test_stand_in_that_can_not_load_keeps_the_old_version(stand_in, folders):
    rollout = connected(stand_in)
    before = rollout.generate(prompts_of(), GREEDY)

    def half(body):
        stand_in.model.layers[0].qkv.data.zero_()
        return (500, "torn") if stand_in.kind == "vllm" else (400, '{"message": "torn"}')

    stand_in.faults[asks(stand_in).load] = [half]
    with pytest.raises(CommError, match=r"version 0 keeps serving.*torn"):
        rollout.sync_weights(folders[1], 1)
    assert (rollout.version, stand_in.label) == (0, "default")
    assert torch.equal(rollout.generate(prompts_of(), GREEDY).tokens, before.tokens)
    rollout.sync_weights(folders[1], 1)
    assert rollout.generate(prompts_of(), GREEDY).versions.tolist() == [1] * 4


def test_stand_in_that_is_left_half_loaded_serves_nobody(stand_in, folders):
    rollout = connected(stand_in)
    stand_in.faults[asks(stand_in).load] = [lambda body: (500, "torn")] * 2
    with pytest.raises(CommError, match="its weights are unknown"):
        rollout.sync_weights(folders[1], 1)
    assert rollout.version is None
    assert stand_in.label == "loading-1"
    assert stand_in.is_paused == (stand_in.kind == "vllm")
    assert connected(stand_in).version is None
    with pytest.raises(CommError, match="after an interrupted load; call sync_weights"):
        rollout.generate(prompts_of(), GREEDY)
    rollout.sync_weights(folders[1], 1)
    assert rollout.generate(prompts_of(), GREEDY).versions.tolist() == [1] * 4


def test_vllm_stand_in_does_not_go_back_to_a_folder_that_nobody_knows(folders):
    server = StandIn("vllm", folders[0])
    connected(server).sync_weights(folders[1], 3)
    # It tells the folder that it was started with, whose weights are not version 3.
    later = connected(server)
    server.faults["/collective_rpc"] = [lambda body: (500, "torn")]
    with pytest.raises(CommError, match="its weights are unknown"):
        later.sync_weights(folders[0], 4)
    assert server.paths().count("/collective_rpc") == 2
    assert server.label == "loading-4"
    server.close()


def test_stand_in_that_goes_away_while_it_waits_keeps_the_old_version(folders):
    server = StandIn("vllm", folders[0])
    rollout = connected(server)
    server.faults["/pause?mode=wait"] = [lambda body: (500, "no")]
    with pytest.raises(CommError, match="version 0 keeps serving"):
        rollout.sync_weights(folders[1], 1)
    assert not server.is_paused
    assert "/collective_rpc" not in server.paths()
    server.close()


def test_vllm_stand_in_that_refuses_the_label_goes_on_with_its_weights(folders):
    server = StandIn("vllm", folders[0])
    connected(server).sync_weights(folders[1], 3)
    # The folder of version 3 is unknown to this one, so that it could not be loaded again.
    rollout = connected(server)
    server.faults["/update_weight_version"] = [lambda body: (500, "no")]
    with pytest.raises(CommError, match="version 3 keeps serving"):
        rollout.sync_weights(folders[0], 4)
    assert not server.is_paused
    assert server.paths().count("/collective_rpc") == 1
    assert rollout.generate(prompts_of(), GREEDY).versions.tolist() == [3] * 4
    server.close()


def test_vllm_stand_in_without_routes_for_weights_is_said_so(folders):
    server = StandIn("vllm", folders[0])
    server.faults["/weight_info"] = [lambda body: (404, "Not Found")]
    with pytest.raises(CommError, match="VLLM_SERVER_DEV_MODE=1"):
        connected(server)
    server.close()


def test_sglang_stand_in_response_of_two_versions_is_refused(folders):
    server = StandIn("sglang", folders[0])
    rollout = connected(server)
    told = {
        "output_token_logprobs": [[-1.0, 4, None]] * 6, "weight_version": "default",
        "weight_versions": [{"version": "9", "start": 0, "end": 2},
                            {"version": "default", "start": 2, "end": 6}],
    }  # fmt: skip
    server.faults["/generate"] = [lambda body: (200, json.dumps({"meta_info": told}))]
    with pytest.raises(CommError, match="began with weights 'default' and ended with '9, default'"):
        rollout.generate(prompts_of()[:1], GREEDY)
    server.close()


def test_torn_folders_never_reach_the_server(stand_in, folders, tmp_path):
    rollout = connected(stand_in)
    with pytest.raises(DataError, match=r"no \.safetensors file there"):
        rollout.sync_weights(tmp_path, 1)
    whole = (folders[1] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(DataError, match=r"model\.safetensors is torn"):
        rollout.sync_weights(tmp_path, 1)
    assert asks(stand_in).load not in stand_in.paths()
    assert rollout.generate(prompts_of(), GREEDY).versions.tolist() == [0] * 4


def test_bad_prompts_never_reach_the_server(stand_in):
    rollout = connected(stand_in)
    for prompts in ([], [torch.tensor([], dtype=torch.int64)]):
        with pytest.raises(DataError, match="expected prompts"):
            rollout.generate(prompts, GREEDY)
    assert asks(stand_in).draw not in stand_in.paths()
