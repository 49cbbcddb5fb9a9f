"""The public HTTP interface of vLLM's server, after its sources of autumn 2026.

The tests use a stand-in with the same JSON, not a real server. Responses come from /v1/completions,
with prompts as token ids. Weights and their version need routes that exist only with
`VLLM_SERVER_DEV_MODE=1`: /pause, /collective_rpc, /weight_info, /update_weight_version,
/reset_prefix_cache, /resume. vLLM's own weight transfer (start, update, finish) sends tensors over
NCCL or CUDA IPC and cannot read from disk, so a collective RPC makes its workers read the folder.
"""

from __future__ import annotations

from typing import Any

from hybridflow.rollout.sampling import Sampling
from hybridflow.rollout.servers.connection import Connection
from hybridflow.rollout.servers.dialect import LOADING, Completion, Weights
from shared.errors import CommError, ConfigError

__all__ = ["VLLM"]


class VLLM:
    """Client of `vllm serve`."""

    def __init__(
        self, connection: Connection, *, load_timeout_s: float, log_probs_mode: str
    ) -> None:
        """Makes a client, and requests the model's name.

        Args:
            connection: to the server.
            load_timeout_s: time limit of loading weights, in seconds.
            log_probs_mode: the value of --logprobs-mode that the server was started with.

        Raises:
            CommError: if no vLLM server answers.
        """
        self._to, self._load_timeout_s = connection, load_timeout_s
        self._mode = log_probs_mode
        found = connection.get("/v1/models")
        try:
            self._model = str(found["data"][0]["id"])
            self._first = str(found["data"][0]["root"])
        except (KeyError, IndexError, TypeError) as error:
            raise CommError(
                f"{connection.url}/v1/models: expected a model with id and root, got {found!r}; is "
                f"it a vLLM server?"
            ) from error

    def check(self, sampling: Sampling) -> None:
        """Raises ConfigError if log-probabilities would not be at the temperature."""
        if sampling.temperature not in (0, 1) and self._mode != "processed_logprobs":
            raise ConfigError(
                f"temperature {sampling.temperature}: vLLM's log-probabilities are at temperature 1"
                f" unless it is started with --logprobs-mode processed_logprobs; do so, and give "
                f"log_probs_mode='processed_logprobs' here"
            )

    def weights(self) -> Weights:
        """Folder and label of the current weights; the folder is known only of initial ones."""
        try:
            label = str(self._to.get("/weight_info")["weight_version"])
        except (CommError, KeyError, TypeError) as error:
            raise CommError(
                f"{self._to.url}: expected the version of the weights, got none ({error}); start "
                f"vLLM with VLLM_SERVER_DEV_MODE=1"
            ) from error
        is_first = not label.isdecimal() and not label.startswith(LOADING)
        return Weights(self._first if is_first else None, label)

    def complete(self, prompt: list[int], sampling: Sampling, seed: int) -> Completion:
        """Generates one response."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "seed": seed,
            # Sent explicitly, because a model's generation_config.json may change the defaults.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            # Only our end tokens end a response.
            "ignore_eos": True,
            "stop_token_ids": list(sampling.end_tokens),
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        found = self._to.post("/v1/completions", body)
        try:
            choice = found["choices"][0]
            tokens, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            made = [int(token) for token in tokens], [float(value) for value in log_probs]
        except (KeyError, IndexError, TypeError) as error:
            raise CommError(
                f"{self._to.url}/v1/completions: expected choices with token_ids and logprobs, got "
                f"{str(found)[:300]}; is it a vLLM server, and a recent one?"
            ) from error
        return Completion(*made, str(choice.get("finish_reason")), self.weights().label)

    def hold(self) -> None:
        """Waits until responses in progress have ended, and starts no more until `release`."""
        self._to.post("/pause?mode=wait", timeout_s=self._load_timeout_s)

    def release(self) -> None:
        """Allows responses to start again."""
        self._to.post("/resume")

    def read(self, folder: str) -> None:
        """Loads weights from a folder."""
        self._to.post(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": folder}},
            timeout_s=self._load_timeout_s,
            num_tries=1,
        )
        # Drops keys and values computed with the old weights.
        self._to.post("/reset_prefix_cache")

    def name(self, label: str) -> None:
        """Sets the label of the weights."""
        self._to.post("/update_weight_version", {"new_version": label})
