"""Reading, writing and putting on every kind of storage, and what each does when it fails.

The storages pass the same tests and each some lines of its own, in one place to be compared.
"""

import errno
import fcntl
import mmap
import os
import random
import re
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bytecheckpoint as bcp
from bytecheckpoint.loading.source import split_url
from bytecheckpoint.storage import WRITE_BYTES, Sink, Storage, local, open_storage
from bytecheckpoint.storage.fsspec import FsspecStorage
from bytecheckpoint.storage.local import LocalStorage
from bytecheckpoint.storage.s3 import S3Storage
from shared.errors import ConfigError

from ..s3server import FlakyProxy


@pytest.fixture(params=["local", "memory", "s3"])
def storage(request, tmp_path):
    if request.param == "local":
        return open_storage(tmp_path / "run")
    if request.param == "memory":
        return open_storage(f"memory://{uuid.uuid4().hex}/run")
    return open_storage(request.getfixturevalue("s3") + "/run")


@pytest.fixture
def folder(tmp_path):
    return LocalStorage(tmp_path / "run")


@pytest.fixture(scope="module")
def proxy(s3_server):
    with FlakyProxy(s3_server[0]) as proxy:
        yield proxy


@pytest.fixture
def flaky(s3, proxy):
    """Storage behind a proxy that fails as told, and the proxy."""
    proxy.fail_each_once, proxy.fail_always, proxy.failed = "", "", []
    return S3Storage(s3 + "/run", waits_s=(0.001,) * 3, endpoint_url=proxy.url), proxy


def page_aligned(content):
    view = memoryview(mmap.mmap(-1, max(1, len(content))))[: len(content)]
    view[:] = content
    return view


def write(storage, path, content):
    """By blocks, from several threads, the last first."""
    sink = storage.create(path, len(content))
    view = page_aligned(content)
    offsets = range(0, len(content), WRITE_BYTES)[::-1]
    try:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda at: sink.write_at(at, view[at : at + WRITE_BYTES]), offsets))
        sink.finish()
    except OSError:
        sink.abort()
        raise


def read(storage, path, offset, num_bytes):
    buffer = bytearray(num_bytes)
    storage.read_into(path, offset, memoryview(buffer))
    return bytes(buffer)


def test_fits_the_protocols(storage):
    assert isinstance(storage, Storage)
    sink = storage.create("a", 0)
    assert isinstance(sink, Sink)
    sink.finish()
    assert storage.size("a") == 0


@pytest.mark.parametrize("num_bytes", [0, 1, 5000, WRITE_BYTES, WRITE_BYTES + 4099])
def test_what_is_written_is_read(storage, num_bytes):
    content = random.Random(num_bytes).randbytes(num_bytes)
    write(storage, "a/b/c.bin", content)
    assert storage.size("a/b/c.bin") == num_bytes
    assert read(storage, "a/b/c.bin", 0, num_bytes) == content
    assert storage.read("a/b/c.bin") == content
    for offset in (0, num_bytes // 3, num_bytes - 1):
        if offset >= 0:
            part = min(1000, num_bytes - offset)
            assert read(storage, "a/b/c.bin", offset, part) == content[offset : offset + part]
    storage.close()
    assert read(storage, "a/b/c.bin", 0, num_bytes) == content  # opened again


def test_folders(storage):
    assert storage.list("") == []
    assert storage.list("none") == []
    assert storage.sizes("none") == {}
    for path in ("f/b", "f/a", "f/g/c", "fa/d"):
        storage.publish(path, path.encode(), overwrite=False)
    assert storage.list("") == ["f", "fa"]
    assert storage.list("f") == ["a", "b", "g"]
    assert storage.sizes("f") == {"a": 3, "b": 3}
    assert storage.list("f/a") == []
    storage.sync_folders(["f", ""])
    storage.remove("f/a")
    storage.remove("f/a")
    assert storage.list("f") == ["b", "g"]
    storage.remove_tree("f")
    storage.remove_tree("f")
    assert storage.list("") == ["fa"]  # and not what only begins with the same letters
    storage.remove_tree("fa/d")
    storage.publish("h", b"", overwrite=False)
    storage.remove_tree("")
    assert storage.list("") == []
    storage.publish("h", b"again", overwrite=False)
    assert storage.read("h") == b"again"


def test_a_folder_is_moved_with_all_in_it(storage):
    for path in ("f/a", "f/g/b", "fa/c"):
        storage.publish(path, path.encode(), overwrite=False)
    storage.move("f", "f.damaged-1")
    assert storage.list("") == ["f.damaged-1", "fa"]
    assert storage.list("f") == []
    assert storage.sizes("f.damaged-1") == {"a": 3}
    assert storage.read("f.damaged-1/a") == b"f/a"
    assert storage.read("f.damaged-1/g/b") == b"f/g/b"
    assert storage.read("fa/c") == b"fa/c"


def test_missing_and_short_files(storage):
    for ask in (storage.read, storage.size, lambda path: read(storage, path, 0, 4)):
        with pytest.raises(FileNotFoundError, match="none"):
            ask("none")
    write(storage, "short", b"12345")
    for offset, num_bytes, got in ((0, 6, 5), (4, 2, 1), (5, 1, 0), (9, 4, 0)):
        with pytest.raises(OSError, match=rf"short: expected {num_bytes} bytes .* after {got} of"):
            read(storage, "short", offset, num_bytes)
    with pytest.raises(OSError, match="short: expected"):
        read(storage, "short", 0, 3 * WRITE_BYTES)


def test_paths_stay_below_the_root(storage):
    for path in ("../a", "a/../../b", "/etc/passwd"):
        with pytest.raises(ConfigError, match="expected a path below"):
            storage.read(path)
        with pytest.raises(ConfigError, match="expected a path below"):
            storage.remove_tree(path)


@pytest.mark.parametrize("kind", ["local", "s3", "memory"])
def test_one_publisher_wins(request, tmp_path, monkeypatch, kind):
    url = tmp_path if kind == "local" else f"memory://{uuid.uuid4().hex}"
    if kind == "s3":
        url = request.getfixturevalue("s3") + "/run"
    storage = open_storage(url)
    memory = type(fsspec.filesystem("memory"))
    exists = memory.exists

    def look_long(self, path, **options):
        found = exists(self, path, **options)
        time.sleep(0.02)
        return found

    monkeypatch.setattr(memory, "exists", look_long)

    def attempt(number):
        try:
            open_storage(url).publish("manifest", b"%d" % number, overwrite=False)
        except FileExistsError as error:
            assert "manifest" in str(error)  # noqa: PT017 - losing is no error of the test
            return None
        return b"%d" % number

    with ThreadPoolExecutor(8) as threads:
        won = [content for content in threads.map(attempt, range(8)) if content]
    assert won == [storage.read("manifest")]
    storage.publish("manifest", b"new", overwrite=True)
    assert storage.read("manifest") == b"new"
    assert storage.list("") == ["manifest"]


def test_a_put_that_hangs_holds_up_no_store_with_conditional_puts(s3, monkeypatch):
    kind = type(fsspec.filesystem("memory"))
    has_begun, may_end, pipe_file = threading.Event(), threading.Event(), kind.pipe_file

    def hang(*args, **options):
        has_begun.set()
        assert may_end.wait(60)
        return pipe_file(*args, **options)

    monkeypatch.setattr(kind, "pipe_file", hang)
    stores = [open_storage(f"memory://{uuid.uuid4().hex}"), open_storage(s3 + "/run")]
    with ThreadPoolExecutor(2) as threads:
        try:
            hanging = threads.submit(stores[0].publish, "manifest", b"1", overwrite=False)
            assert has_begun.wait(60)
            threads.submit(stores[1].publish, "manifest", b"2", overwrite=False).result(30)
        finally:
            may_end.set()
        hanging.result(60)
    assert [store.read("manifest") for store in stores] == [b"1", b"2"]


def test_abort_leaves_nothing(storage):
    sink = storage.create("a/b", 2 * WRITE_BYTES)
    sink.write_at(0, bytes(WRITE_BYTES))
    sink.abort()
    sink.abort()
    assert storage.sizes("a") == {}
    if storage.url.startswith("s3"):
        bucket = storage.url.split("/")[2]
        assert "Uploads" not in fsspec.filesystem("s3").call_s3(
            "list_multipart_uploads", Bucket=bucket
        )


def test_unknown_protocols():
    with pytest.raises(ConfigError, match="nowhere"):
        open_storage("nowhere://a")
    with pytest.raises(ConfigError, match="pip install gcsfs"):
        open_storage("gs://bucket/run")


def test_local_urls(tmp_path):
    assert open_storage(f"file://{tmp_path}").url == open_storage(tmp_path).url == str(tmp_path)


@pytest.mark.parametrize("url", ["s3:/bucket/run", "s3:/bucket", "memory:/run", "file:/run"])
def test_urls_with_a_slash_too_few(url):
    # As pathlib makes them.
    with pytest.raises(ConfigError, match="drops a slash"):
        open_storage(url)
    with pytest.raises(ConfigError, match="drops a slash"):
        bcp.open(url)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://bucket", ("s3://bucket", "")),
        ("s3://bucket/run/", ("s3://bucket", "run")),
        ("s3://bucket/run/step", ("s3://bucket/run", "step")),
        ("memory://run", ("memory://run", "")),
        ("memory:///run", ("memory:///run", "")),
        ("file:///x", ("/", "x")),
        ("file:///x/y", ("/x", "y")),
        ("hf://org/name", ("org", "name")),
        ("/x", ("/", "x")),
        ("/", ("/", "")),
        ("x", (".", "x")),
        ("x/", (".", "x")),
        ("..", ("..", "")),
        ("../..", ("../..", "")),
    ],
)
def test_where_a_checkpoint_lies_and_its_name_there(url, parts):
    assert split_url(url) == parts


@pytest.mark.parametrize("kind", ["memory", "s3", "file"])
def test_a_checkpoint_may_be_all_there_is(request, tmp_path, monkeypatch, kind):
    # In a bucket of its own, and nothing appears in the working directory instead.
    monkeypatch.chdir(tmp_path)
    if kind == "s3":
        request.getfixturevalue("s3")
        url = f"s3://{uuid.uuid4().hex}"
        fsspec.filesystem("s3").mkdir(url)
    else:
        url = f"memory://{uuid.uuid4().hex}" if kind == "memory" else f"file://{tmp_path}/only"
    for value in (1, 2):
        bcp.save(url, {"w": torch.full((3,), value)}, overwrite=True)
    state = {"w": torch.zeros(3, dtype=torch.int64)}
    bcp.load(url, state)
    assert state["w"].tolist() == [2, 2, 2]
    with bcp.open(url) as found:
        assert found.read("w").tolist() == [2, 2, 2]
    with pytest.raises(FileExistsError, match="there is one"):
        bcp.save(url, state)
    assert len(open_storage(url).list("")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["only"] * (kind == "file")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_alignment(folder, data):
    """Direct as far as address, offset and length allow, through the page cache elsewhere."""
    cuts = data.draw(st.lists(st.sampled_from([0, 512, 4096, 8192, 8193, 20_000]), max_size=4))
    blocks = [random.Random(at).randbytes(size) for at, size in enumerate(cuts)]
    path = uuid.uuid4().hex
    sink = folder.create(path, sum(cuts))
    for at in data.draw(st.permutations(range(len(blocks)))):
        shift = data.draw(st.sampled_from([0, 1, 512]))
        aligned = page_aligned(bytes(shift) + blocks[at])
        sink.write_at(sum(cuts[:at]), aligned[shift:])
    sink.finish()
    assert folder.read(path) == b"".join(blocks)


class System:
    """Stands in for `os`, with some calls replaced."""

    def __init__(self, **calls):
        self.__dict__.update(calls)

    def __getattr__(self, name):
        return getattr(os, name)


def refuse(number):
    def call(*arguments):
        raise OSError(number, os.strerror(number))

    return call


def is_direct(descriptor):
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def test_whole_pages_pass_the_page_cache(folder, monkeypatch):
    written = []

    def pwrite(descriptor, data, offset):
        written.append((is_direct(descriptor), offset, len(data)))
        return os.pwrite(descriptor, data, offset)

    folder.publish("probe", b"", overwrite=False)
    try:
        os.close(os.open(os.path.join(folder.url, "probe"), os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system takes no direct writes")
    monkeypatch.setattr(local, "os", System(pwrite=pwrite))
    write(folder, "a", bytes(3 * 4096 + 5))
    assert written == [(True, 0, 3 * 4096), (False, 3 * 4096, 5)]


def test_without_direct_writes(folder, monkeypatch):
    content = random.Random(0).randbytes(3 * 4096 + 5)

    def open_(path, flags, *mode):
        return refuse(errno.EINVAL)() if flags & os.O_DIRECT else os.open(path, flags, *mode)

    def pwrite(descriptor, data, offset):
        # Some file systems refuse only here, or stop in the middle of a page.
        if is_direct(descriptor) and offset:
            refuse(errno.EINVAL)()
        return os.pwrite(descriptor, data[:4096], offset)

    for path, system in (("a", System(open=open_)), ("b", System(pwrite=pwrite))):
        monkeypatch.setattr(local, "os", system)
        write(folder, path, content)
        assert folder.read(path) == content


@pytest.mark.parametrize(
    ("call", "number"),
    [("pwrite", errno.ENOSPC), ("pwrite", errno.EIO), ("fsync", errno.EIO), ("open", errno.EACCES)],
)
def test_errors_name_the_file(folder, monkeypatch, call, number):
    folder.publish("there", b"old", overwrite=False)
    monkeypatch.setattr(local, "os", System(**{call: refuse(number)}))
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        write(folder, "new", bytes(8192))
    assert caught.value.errno == number
    if call != "open":
        assert caught.value.filename == os.path.join(folder.url, "new")
    with pytest.raises(OSError, match=os.strerror(number)):
        folder.publish("there", b"new", overwrite=True)
    monkeypatch.undo()
    assert folder.sizes("") == {"there": 3}
    assert folder.read("there") == b"old"


def test_folders_that_cannot_be_synced(folder, monkeypatch):
    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            refuse(errno.EINVAL)()

    monkeypatch.setattr(local, "os", System(fsync=fsync))
    folder.publish("a", b"1", overwrite=False)
    assert folder.read("a") == b"1"


def test_publishing_without_hard_links(folder, monkeypatch):
    monkeypatch.setattr(local, "os", System(link=refuse(errno.EPERM)))
    folder.publish("a", b"1", overwrite=False)
    with pytest.raises(FileExistsError, match="a"):
        folder.publish("a", b"2", overwrite=False)
    assert folder.read("a") == b"1"
    assert folder.list("") == ["a"]


def test_a_link_whose_answer_was_lost(folder, monkeypatch):
    def link(source, target):
        os.link(source, target)
        refuse(errno.EEXIST)()

    monkeypatch.setattr(local, "os", System(link=link))
    folder.publish("a", b"1", overwrite=False)
    assert folder.read("a") == b"1"


def test_many_threads_read_many_files(tmp_path):
    """More files than stay open; none is closed under a thread that reads it."""
    folder = LocalStorage(tmp_path / "run", max_open_files=16)
    num_files = 3 * 16
    for at in range(num_files):
        folder.publish(f"{at}", b"%06d" % at * 100, overwrite=False)
    draw = random.Random(0)
    order = [draw.randrange(num_files) for _ in range(1000)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda at: read(folder, f"{at}", 6, 6), order))
    assert found == [b"%06d" % at for at in order]
    assert count_open_files(folder.url) == 16
    folder.close()
    assert count_open_files(folder.url) == 0


def count_open_files(path):
    """How many files of a folder this process has open."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.realpath(link).startswith(path) for link in links)


def test_a_file_made_anew_is_not_the_old_one(folder):
    for content in (b"old", b"new"):
        write(folder, "a/b", content)
        assert read(folder, "a/b", 0, 3) == content
        folder.remove_tree("a")


def test_links_are_removed_and_not_followed(folder, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").write_text("")
    folder.publish("a/b", b"", overwrite=False)
    os.symlink(tmp_path / "other", os.path.join(folder.url, "a", "link"))
    folder.remove_tree("a")
    assert folder.list("") == []
    assert (tmp_path / "other" / "kept").exists()


@pytest.mark.parametrize(
    "fault",
    [
        "503",
        "cut after",
        *(pytest.param(f"cut {w}", marks=pytest.mark.slow) for w in ("before", "within")),
    ],
)
def test_requests_are_repeated(flaky, fault):
    """Each request of a save and a load fails once."""
    storage, proxy = flaky
    content = random.Random(0).randbytes(WRITE_BYTES + 1)
    proxy.fail_each_once = fault
    write(storage, "a/b", content)
    storage.publish("manifest", b"content", overwrite=False)
    assert storage.read("manifest") == b"content"
    assert storage.sizes("a") == {"b": len(content)}
    assert read(storage, "a/b", 0, len(content)) == content
    storage.remove_tree("a")
    assert storage.list("") == ["manifest"]
    assert len(proxy.failed) >= 9


def test_an_upload_completed_by_a_lost_request(s3, monkeypatch):
    """A store that forgets finished uploads says that there is no such upload."""
    storage = open_storage(s3)
    request = storage.request

    def forget(method, path, **arguments):
        if method != "complete_multipart_upload":
            return request(method, path, **arguments)
        if path == "finished":
            request(method, path, **arguments)
        raise FileNotFoundError(errno.ENOENT, "no such upload", path)

    monkeypatch.setattr(storage, "request", forget)
    write(storage, "finished", bytes(WRITE_BYTES + 1))
    assert storage.size("finished") == WRITE_BYTES + 1
    with pytest.raises(FileNotFoundError, match="aborted"):
        write(storage, "aborted", bytes(WRITE_BYTES + 1))


def test_lost_put_is_not_taken_for_anothers(flaky):
    storage, proxy = flaky
    storage.publish("manifest", b"first", overwrite=False)
    proxy.fail_each_once = "cut after"
    with pytest.raises(FileExistsError, match="manifest"):
        storage.publish("manifest", b"second", overwrite=False)
    assert storage.read("manifest") == b"first"


def test_failures_that_stay(flaky):
    storage, proxy = flaky
    storage.publish("a", b"1", overwrite=False)
    proxy.fail_always = "503"
    for ask in (storage.read, storage.size, storage.list, lambda path: read(storage, path, 0, 1)):
        with pytest.raises(OSError, match="run/a"):
            ask("a")
    assert len(proxy.failed) == 4 * 4
    proxy.fail_always = "403"
    with pytest.raises(PermissionError, match="run/a"):
        read(storage, "a", 0, 1)
    assert len(proxy.failed) == 4 * 4 + 1  # asking again would not help
    with pytest.raises(PermissionError, match="run/b"):
        storage.create("b", 2 * WRITE_BYTES)
    proxy.fail_always = ""
    assert storage.read("a") == b"1"


def test_too_many_parts(s3):
    with pytest.raises(OSError, match="save from more ranks"):
        open_storage(s3).create("a", 10_000 * WRITE_BYTES + 1)


def test_other_protocols_retry_and_look_before_they_put(monkeypatch):
    storage = FsspecStorage(f"memory://{uuid.uuid4().hex}/run", waits_s=(0.001,) * 3)
    kind = type(fsspec.filesystem("memory"))
    pipe, cat, fails = kind.pipe_file, kind.cat_file, [1, 2]

    def pipe_file(self, path, value, mode="overwrite", **options):
        if mode == "create":
            raise NotImplementedError
        return pipe(self, path, value)

    def cat_file(self, path, **options):
        if fails:
            raise OSError(errno.EREMOTEIO, f"passing {fails.pop()}")
        return cat(self, path, **options)

    monkeypatch.setattr(kind, "pipe_file", pipe_file)
    monkeypatch.setattr(kind, "cat_file", cat_file)
    storage.publish("a", b"1", overwrite=False)
    with pytest.raises(FileExistsError, match="a"):
        storage.publish("a", b"2", overwrite=False)
    assert storage.read("a") == b"1"
    assert not fails
    fails[:] = range(9)
    with pytest.raises(OSError, match=re.escape(storage.url) + "/a"):
        storage.read("a")
    assert len(fails) == 5
