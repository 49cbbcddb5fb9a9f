"""The public HTTP interface of SGLang's server, after the sources of version 0.5.23.

The tests use a stand-in with the same JSON, not a real server. Responses come from /generate, with
prompts as token ids, and include the versions of the weights that made them.
/update_weights_from_disk waits for responses in progress; its rollback after a failure is not
relied on, because it reads the same folder again. /pause_generation is not used: it aborts
responses, or freezes them, and those would continue with other weights.
"""

from __future__ import annotations

from typing import Any

from hybridflow.rollout.sampling import Sampling
from hybridflow.rollout.servers.connection import Connection
from hybridflow.rollout.servers.dialect import Completion, Weights
from shared.errors import CommError

__all__ = ["SGLang"]


class SGLang:
    """Client of `sglang serve`."""

    def __init__(
        self, connection: Connection, *, load_timeout_s: float, log_probs_mode: str = ""
    ) -> None:
        """Makes a client; sends no request.

        Args:
            connection: to the server.
            load_timeout_s: time limit of loading weights, in seconds.
            log_probs_mode: ignored; SGLang's log-probabilities are always at the temperature.
        """
        self._to, self._load_timeout_s = connection, load_timeout_s

    def check(self, sampling: Sampling) -> None:
        """Accepts any sampling, as log-probabilities are at the temperature."""

    def weights(self) -> Weights:
        """Folder and label of the server's current weights."""
        found = self._to.get("/model_info")
        if not isinstance(found, dict) or not {"model_path", "weight_version"} <= found.keys():
            raise CommError(
                f"{self._to.url}/model_info: expected model_path and weight_version, got "
                f"{found!r}; is it an SGLang server?"
            )
        return Weights(str(found["model_path"]), str(found["weight_version"]))

    def complete(self, prompt: list[int], sampling: Sampling, seed: int) -> Completion:
        """Generates one response."""
        settings: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            # Used only with --enable-deterministic-inference.
            "sampling_seed": seed,
            # Sent explicitly, because a model's generation_config.json may change the defaults.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            # True would ignore our end tokens too, not only the model's.
            "ignore_eos": not sampling.end_tokens,
            "stop_token_ids": list(sampling.end_tokens),
            "skip_special_tokens": False,
        }
        body = {"input_ids": prompt, "sampling_params": settings, "return_logprob": True}
        found = self._to.post("/generate", body)
        try:
            told = found["meta_info"]
            made = [
                (int(token), float(value)) for value, token, *_ in told["output_token_logprobs"]
            ]
            # One for each span of tokens, if the server reports them.
            spans = [span["version"] for span in told.get("weight_versions") or ()]
            labels = dict.fromkeys(map(str, [*spans, told["weight_version"]]))
        except (KeyError, ValueError, TypeError) as error:
            raise CommError(
                f"{self._to.url}/generate: expected meta_info with output_token_logprobs and "
                f"weight_version, got {str(found)[:300]}; is it an SGLang server, and a recent one?"
            ) from error
        reason = told.get("finish_reason") or {}
        return Completion(
            [token for token, _ in made],
            [value for _, value in made],
            str(reason.get("type")),
            ", ".join(labels),
        )

    def hold(self) -> None:
        """Does nothing, as `read` waits until no response is in progress."""

    def release(self) -> None:
        """Does nothing, as `hold`."""

    def read(self, folder: str) -> None:
        """Loads weights from a folder."""
        body = {"model_path": folder, "abort_all_requests": False, "flush_cache": True}
        path = "/update_weights_from_disk"
        found = self._to.post(path, body, timeout_s=self._load_timeout_s, num_tries=1)
        if not isinstance(found, dict) or not found.get("success"):
            raise CommError(f"{self._to.url}{path}: expected success, got {found!r}")

    def name(self, label: str) -> None:
        """Sets the label of the weights."""
        body = {"new_version": label, "abort_all_requests": False}
        self._to.post("/update_weight_version", body)
