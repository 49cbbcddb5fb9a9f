"""A real S3 server of this machine, moto's in a process of its own, and ways to make it fail."""

import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic, sleep

import pytest

# What a client needs to reach it, besides AWS_ENDPOINT_URL.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextmanager
def moto_server(
    host: str = "127.0.0.1", port: int = 0, *, prefix: Sequence[str] = (), timeout_s: float = 60
) -> Iterator[str]:
    """Runs the server while the context lasts.

    Args:
        host: address it binds.
        port: of it; 0 for one that is free here.
        prefix: command before its own, as `ip netns exec store`.
        timeout_s: until it must answer.

    Yields:
        Its URL.
    """
    keeper = None
    if not port:
        # Kept, as another process may be given the port before the server listens; that shares it.
        keeper = socket.socket()
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind((host, 0))
        port = keeper.getsockname()[1]
    command = [*prefix, sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, **quiet)
    try:
        deadline = monotonic() + timeout_s
        while True:
            try:
                socket.create_connection((host, port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, f"{' '.join(command)} ended with {server.returncode}"
                assert monotonic() < deadline, f"no answer from {host}:{port}"
                sleep(0.05)
        yield f"http://{host}:{port}"
    finally:
        server.kill()
        server.wait()
        if keeper is not None:
            keeper.close()


def make_bucket(endpoint: str) -> str:
    """A new bucket's URL; sets this process's environment, which ranks inherit, for its server."""
    import s3fs

    os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=endpoint)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return f"s3://{name}"


@pytest.fixture(scope="session")
def s3_server():
    """URLs of a server for the whole session and of a bucket there."""
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    pytest.importorskip("moto", reason="moto is the S3 server here")
    with moto_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name in (*CREDENTIALS, "AWS_ENDPOINT_URL"):
            patch.setenv(name, "")  # so that they are put back
        yield endpoint, make_bucket(endpoint)


@pytest.fixture
def s3(s3_server, monkeypatch):
    """URL of an empty prefix; the environment leads to its server while the test lasts."""
    endpoint, bucket = s3_server
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    return f"{bucket}/{uuid.uuid4().hex[:12]}"


class FlakyProxy:
    """Stands before a server and fails as told.

    "503" answers so; "cut before" closes the connection instead of asking the server, "cut after"
    instead of passing its answer on, and "cut within" in the middle of the answer.

    Attributes:
        url: its own.
        fail_each_once: the fault that each distinct request meets the first time, "" for none.
        fail_always: the fault, or another status, that every request meets.
        failed: the requests that met one.
    """

    def __init__(self, endpoint: str) -> None:
        self.fail_each_once = ""
        self.fail_always = ""
        self.failed: list[tuple[str, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy._pass_on(self, endpoint, body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FlakyProxy":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _fault(self, request: BaseHTTPRequestHandler) -> str:
        # Upload numbers and ranges tell requests of one path apart.
        name = (request.command, request.path + request.headers.get("Range", ""))
        if self.fail_always or (self.fail_each_once and name not in self.failed):
            self.failed.append(name)
            return self.fail_always or self.fail_each_once
        return ""

    def _pass_on(self, request: BaseHTTPRequestHandler, endpoint: str, body: bytes) -> None:
        fault = self._fault(request)
        if fault.isdigit():
            code = {"503": "SlowDown", "403": "AccessDenied"}[fault]
            answer = f"<Error><Code>{code}</Code><Message>told to</Message></Error>".encode()
            self._answer(request, int(fault), {}, answer if request.command != "HEAD" else b"")
            return
        if fault != "cut before":
            host = endpoint.removeprefix("http://")
            server = HTTPConnection(host)
            server.request(request.command, request.path, body, dict(request.headers))
            found = server.getresponse()
            answer = found.read()
            server.close()
            if not fault:
                self._answer(request, found.status, dict(found.headers), answer)
                return
            if fault == "cut within":
                self._answer(request, found.status, dict(found.headers), answer[: len(answer) // 2])
        request.close_connection = True

    def _answer(
        self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes
    ) -> None:
        request.send_response_only(status)
        headers.setdefault("Content-Length", str(len(body)))
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding"):
                request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)
