"""Generation by a running vLLM or SGLang server, over its public HTTP interface.

Each sample is a request of its own, so that it has its own seed and can be retried alone; servers
cache the keys and values of a prompt that several requests share. The server reads weights from a
folder. A response is accepted only if the server had the same weights before and after it. Weights
are replaced while no response is in progress; if that fails the old ones keep serving. The tests
use a stand-in, not a real server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from jaxtyping import Int64
from torch import Tensor

from hybridflow.models.end_tokens import find_token, read_end_tokens
from hybridflow.rollout.end_tokens import resolve_end_tokens
from hybridflow.rollout.rows import ServedResponses, responses, samples
from hybridflow.rollout.sampling import EndTokens, Sampling
from hybridflow.rollout.servers.connection import Connection
from hybridflow.rollout.servers.dialect import LOADING, Completion, Dialect, Weights, swap
from hybridflow.rollout.servers.registry import SERVERS
from shared.errors import CommError, ConfigError, DataError
from shared.files import read_model_config
from shared.kernels.philox import stream_key

__all__ = ["ServerRollout"]

LOG = logging.getLogger(__name__)


class ServerRollout:
    """A rollout server that generates responses and loads weights.

    Attributes:
        version: of the server's weights; 0 for the initial weights, None if unknown because
            replacing them was interrupted.
    """

    def __init__(
        self,
        url: str,
        *,
        kind: str,
        max_in_flight: int = 64,
        timeout_s: float = 600.0,
        load_timeout_s: float = 1800.0,
        num_tries: int = 5,
        backoff_s: float = 0.5,
        api_key: str | None = None,
        log_probs_mode: str = "raw_logprobs",
    ) -> None:
        """Connects to a server.

        Args:
            url: http://HOST:PORT.
            kind: the server's software, a name of `hybridflow.rollout.servers.registry`.
            max_in_flight: most requests at once.
            timeout_s: time limit of one response, in seconds.
            load_timeout_s: time limit of loading weights, and of waiting for responses in progress
                before that, in seconds.
            num_tries: tries of each request that changes nothing on the server.
            backoff_s: seconds before the second try; doubled before each further one.
            api_key: bearer token, if the server requires one.
            log_probs_mode: the value of --logprobs-mode that vLLM was started with.

        Raises:
            ConfigError: if a setting is out of range.
            CommError: if no such server answers.
        """
        SERVERS.check(kind)
        if max_in_flight < 1:
            raise ConfigError(f"max_in_flight: expected 1 or more requests, got {max_in_flight}")
        self.url, self._max_in_flight = url, max_in_flight
        to = Connection(
            url=url, timeout_s=timeout_s, num_tries=num_tries, backoff_s=backoff_s, api_key=api_key
        )
        self._dialect: Dialect = SERVERS.get(kind)(
            to, load_timeout_s=load_timeout_s, log_probs_mode=log_probs_mode
        )
        self._served = self._dialect.weights()
        self.version = _version(self._served.label)
        self._change = threading.Condition()
        self._num_under_way, self._is_loading = 0, False

    def generate(
        self,
        prompts: Sequence[Int64[Tensor, " _"]],
        sampling: Sampling,
        *,
        sample_ids: Int64[Tensor, " samples"] | None = None,
        step: int = 0,
    ) -> ServedResponses:
        """Generates responses to prompts; any number of threads may call it.

        Args:
            prompts: tokens of each; none may be empty.
            sampling: how tokens are drawn.
            sample_ids: ids of the samples, prompt by prompt; 0, 1, ... when not given.
            step: training step; seeds differ between steps.

        Returns:
            The responses, and the version of the weights that made them.

        Raises:
            DataError: if there is no prompt, or one is empty.
            ConfigError: if the server would draw from another distribution than asked, or its end
                tokens are unknown.
            CommError: if the server does not answer or refuses, a response is incomplete, or the
                weights changed during a response.
        """
        sampling = self.resolve(sampling)
        self._dialect.check(sampling)
        rows, ids = samples(prompts, sampling, sample_ids)
        with self._generating():
            version, before = self._known()

            def one(prompt: Tensor, sample: int) -> Completion:
                # Signed 64-bit, and never negative.
                seed = stream_key(sampling.seed, step, sample) >> 1
                found = self._dialect.complete(prompt.tolist(), sampling, seed)
                found.check(sampling, before, f"{self.url}: the response of sample {sample}")
                return found

            pool = ThreadPoolExecutor(min(self._max_in_flight, len(rows)), "rollout")
            try:
                made = list(pool.map(one, rows, ids.tolist()))
            finally:
                # After an error, queued requests are not sent.
                pool.shutdown(cancel_futures=True)
        tokens, log_probs = [one.tokens for one in made], [one.log_probs for one in made]
        longest = max(map(len, tokens))
        found = responses(
            rows, tokens, log_probs, num_steps=longest - 1, versions=[version] * len(rows)
        )
        assert isinstance(found, ServedResponses), "versions were given"
        return found

    def resolve(self, sampling: Sampling, prompts_end: Iterable[int] = ()) -> Sampling:
        """Replaces end tokens by ids, read from the folder of the server's weights.

        Args:
            sampling: settings, as a user gave them or resolved already.
            prompts_end: ids that the prompts' tokenizer names.

        Raises:
            ConfigError: an end token is not one of the model's, or the model's are asked for and
                neither they nor the prompts' are known here.
        """
        named, vocab_size, token_of = list(prompts_end), None, None
        folder = Path(self._served.folder or "")
        if self._served.folder and (folder / "config.json").is_file():
            tree, _ = read_model_config(folder)
            named += read_end_tokens(folder, tree)
            vocab_size, token_of = tree.get("vocab_size"), partial(find_token, folder)
        elif sampling.end_token is EndTokens.OF_MODEL and not named:
            raise ConfigError(
                f"sampling.end_token: expected the model's end tokens, and {self.url} serves "
                f"{self._served.folder!r}, which is no folder here; give the ids, or None for "
                "responses that only max_new_tokens ends"
            )
        return resolve_end_tokens(sampling, named, vocab_size=vocab_size, token_of=token_of)

    def sync_weights(self, folder: str | Path, version: int) -> None:
        """Has the server load other weights, after all responses in progress have ended.

        Args:
            folder: written by `save_pretrained`; the server reads it under the same path.
            version: of the new weights; must differ from the current one.

        Raises:
            ConfigError: if the version is the current one, or negative.
            DataError: if the folder has no weights, or a file of them is torn.
            CommError: if they were not loaded; the message says which weights serve now.
        """
        if version < 0 or version == self.version:
            raise ConfigError(
                f"version: expected 0 or more and not the present {self.version}, got {version}"
            )
        _refuse_torn(Path(folder))
        new = Weights(str(Path(folder).absolute()), str(version))
        with self._loading():
            old = self._served
            try:
                swap(self._dialect, old, new)
            except CommError as error:
                self._recover(old)
                state = (
                    "its weights are unknown, so it generates nothing more: give it weights again, "
                    "or start it anew"
                    if self.version is None
                    else f"version {self.version} keeps serving"
                )
                raise CommError(f"{self.url}: {folder} was not loaded; {state}: {error}") from error
            self._served, self.version = new, version
            LOG.info("%s serves version %d from %s", self.url, version, folder)

    def _recover(self, old: Weights) -> None:
        """Reads from the server which weights it has after a failed load."""
        try:
            label = self._dialect.weights().label
        except CommError:
            label = LOADING
        self.version = _version(label) if label == old.label else None

    def _known(self) -> tuple[int, str]:
        """Version and label of the weights, if the server reports the same label."""
        label = self._dialect.weights().label
        if self.version is None or label != self._served.label:
            raise CommError(
                f"{self.url}: expected weights {self._served.label!r}, and the server has {label!r}"
                f"{' after an interrupted load' if self.version is None else ''}; call "
                f"sync_weights, and load no weights from elsewhere"
            )
        return self.version, label

    @contextmanager
    def _generating(self) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: not self._is_loading)
            self._num_under_way += 1
        try:
            yield
        finally:
            with self._change:
                self._num_under_way -= 1
                self._change.notify_all()

    @contextmanager
    def _loading(self) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: not self._is_loading)
            self._is_loading = True
            self._change.wait_for(lambda: not self._num_under_way)
        try:
            yield
        finally:
            with self._change:
                self._is_loading = False
                self._change.notify_all()


def _version(label: str) -> int | None:
    if label.startswith(LOADING):
        return None
    return int(label) if label.isdecimal() else 0


def _refuse_torn(folder: Path) -> None:
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder}: no .safetensors file there; save_pretrained writes them")
    for file in files:
        try:
            # Opening checks the file's length against its header.
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise DataError(f"{file} is torn ({error}); write it again") from error
