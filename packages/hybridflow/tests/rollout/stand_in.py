"""A stand-in for servers of vLLM and SGLang.

It speaks the JSON that their sources show and generates with our own engine on a tiny model. It
shows that our side is right about itself; that real servers answer so is not proven here.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from hybridflow.models import pieces
from hybridflow.models.config import read_config
from hybridflow.models.decoder import Decoder
from hybridflow.rollout.native import generator as native
from hybridflow.rollout.sampling import Sampling

CONFIG = {
    "model_type": "llama", "vocab_size": 23, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.3,
}  # fmt: skip


def made_model(seed, config=CONFIG):
    model = Decoder(read_config(config)).requires_grad_(False)
    pieces.initialize(model, seed)
    return model


class StandIn:
    """A server of either kind.

    Attributes:
        seen: (path, body) of each request.
        faults: by path, functions of the body that are called once each before it is answered;
            what they return is sent instead, as (status, text).
        slow_s: that a response lasts.
        may_answer: responses wait until it is set, as it is at first.
        least_running: responses wait until so many have been under way at once.
    """

    def __init__(self, kind, folder, config=CONFIG):
        self.kind, self.folder, self.label = kind, str(folder), "default"
        self.model = made_model(0, config)
        self.seen, self.faults, self.slow_s = [], {}, 0.0
        self.is_paused, self.num_running, self.most_running = False, 0, 0
        self.changed, self.may_answer, self.least_running = (
            threading.Condition(),
            threading.Event(),
            0,
        )
        self.may_answer.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(None)

            def do_POST(self):
                length = int(self.headers["Content-Length"])
                self.answer(json.loads(self.rfile.read(length)))

            def answer(self, body):
                outer.seen.append((self.path, body))
                waiting = outer.faults.get(self.path, [])
                told = waiting.pop(0)(body) if waiting else None
                if told is None:
                    found = outer.route(self.path.split("?")[0], body)
                    told = (404, "no such route") if found is None else (200, json.dumps(found))
                status, text = told
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format, *args):
                """Says nothing."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, request, client_address):
                """Clients may have gone away."""

        self.http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def paths(self):
        return [path for path, _ in self.seen]

    def load(self, folder):
        missing = pieces.load(self.model, pieces.folder_reader(folder))
        assert not missing
        self.folder = folder

    def draw(self, prompt, limit, temperature, seed, end):
        with self.changed:
            self.changed.wait_for(lambda: not self.is_paused)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most_running >= self.least_running, 60)
        self.may_answer.wait(60)
        time.sleep(self.slow_s)
        sampling = Sampling(max_new_tokens=limit, temperature=temperature, seed=seed, end_token=end)
        found = native.generate(self.model, [torch.tensor(prompt)], sampling)
        with self.changed:
            self.num_running -= 1
            self.changed.notify_all()
        made = found.tokens[0, len(prompt) :].tolist()
        return made, found.log_probs[0, len(prompt) :].tolist()

    def drained(self):
        with self.changed:
            self.changed.wait_for(lambda: not self.num_running)

    def route(self, path, body):
        routes = self.vllm if self.kind == "vllm" else self.sglang
        return routes(path, body)

    def vllm(self, path, body):
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "tiny", "root": self.folder}]}
        if path == "/weight_info":
            return {"weight_version": self.label}
        if path == "/v1/completions":
            assert body["model"] == "tiny"
            assert body["ignore_eos"]
            end = body["stop_token_ids"] or None
            tokens, values = self.draw(
                body["prompt"], body["max_tokens"], body["temperature"], body["seed"], end
            )
            choice = {
                "index": 0, "text": "", "finish_reason": "stop" if tokens[-1] in (end or ()) else "length",
                "token_ids": tokens, "logprobs": {"token_logprobs": values, "tokens": []},
            }  # fmt: skip
            return {"object": "text_completion", "choices": [choice]}
        if path == "/pause":
            self.is_paused = True
            self.drained()
            return {"status": "paused"}
        if path == "/resume":
            with self.changed:
                self.is_paused = False
                self.changed.notify_all()
            return {"status": "resumed"}
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return {"success": True, "new_version": self.label}
        if path == "/collective_rpc":
            assert self.is_paused
            assert body["method"] == "reload_weights"
            self.load(body["kwargs"]["weights_path"])
            return {"results": [None]}
        return {} if path == "/reset_prefix_cache" else None

    def sglang(self, path, body):
        if path == "/model_info":
            return {"model_path": self.folder, "weight_version": self.label}
        if path == "/generate":
            asked = body["sampling_params"]
            end = asked["stop_token_ids"] or None
            assert asked["ignore_eos"] == (end is None)
            tokens, values = self.draw(
                body["input_ids"], asked["max_new_tokens"], asked["temperature"],
                asked["sampling_seed"], end,
            )  # fmt: skip
            told = {
                "output_token_logprobs": [
                    [value, token, None] for value, token in zip(values, tokens, strict=True)
                ],
                "weight_version": self.label, "finish_reason": {"type": "length"},
                "weight_versions": [{"version": self.label, "start": 0, "end": len(tokens)}],
            }  # fmt: skip
            return {"text": "", "output_ids": tokens, "meta_info": told}
        if path == "/update_weights_from_disk":
            self.drained()
            self.load(body["model_path"])
            return {"success": True, "message": ""}
        if path == "/update_weight_version":
            assert not body["abort_all_requests"]
            self.label = body["new_version"]
            return {"success": True, "new_version": self.label}
        return None
