"""A checkpoint appears whole, is found, is checked and goes away: on every kind of storage."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.storage import open_storage
from bytecheckpoint.storage.files import commit
from bytecheckpoint.storage.files.manifest import MANIFEST_NAME
from bytecheckpoint.storage.local import LocalStorage
from shared.errors import DataError

from .toy import save, version_of


@pytest.fixture(params=["local", "memory", "s3"])
def storage(request, tmp_path):
    if request.param == "local":
        return open_storage(tmp_path / "run")
    if request.param == "memory":
        return open_storage(f"memory://{uuid.uuid4().hex}/run")
    return open_storage(request.getfixturevalue("s3") + "/run")


@pytest.fixture
def local(tmp_path):
    return LocalStorage(tmp_path / "run")


def put(storage, path, content):
    """Changes a file behind the package's back."""
    storage.publish(path, content, overwrite=True)


def seal(storage, path, manifest):
    put(storage, f"{path}/{MANIFEST_NAME}", manifest.encode())


def test_appears_is_found_and_goes_away(storage):
    assert commit.list_steps(storage) == []
    for step in (100_000_000, 20, 3):
        save(storage, step, 0)
    assert commit.list_steps(storage) == [3, 20, 100_000_000]
    assert [version_of(storage, step) for step in (3, 20, 100_000_000)] == [0, 0, 0]
    commit.remove_checkpoint(storage, commit.format_step(20))
    commit.remove_checkpoint(storage, commit.format_step(21))
    assert commit.list_steps(storage) == [3, 100_000_000]
    assert storage.list("") == ["step_00000003", "step_100000000"]
    assert commit.find_garbage(storage) == []


def test_lies_in_the_root_itself(storage):
    save(storage, 5, 0, path="")
    save(storage, 5, 1, path="", overwrite=True)
    assert version_of(storage, 5, path="") == 1
    assert len(storage.list("")) == 2  # the manifest and its data
    commit.remove_checkpoint(storage, "")
    assert storage.list("") == []


def test_is_replaced_only_if_asked(storage):
    first = save(storage, 1, 0)
    with pytest.raises(FileExistsError, match=r"step_00000001/manifest\.json"):
        save(storage, 1, 1)
    assert version_of(storage, 1) == 0
    [left] = commit.find_garbage(storage)
    commit.remove_garbage(storage, [left])
    second = save(storage, 1, 2, overwrite=True)
    assert version_of(storage, 1) == 2
    assert first.data != second.data
    assert storage.list(commit.format_step(1)) == [second.data, MANIFEST_NAME]


def test_one_of_several_savers_wins(storage):
    def attempt(version):
        try:
            save(storage, 1, version)
        except FileExistsError:
            return None
        return version

    with ThreadPoolExecutor(4) as threads:
        won = [version for version in threads.map(attempt, range(4)) if version is not None]
    assert won == [version_of(storage, 1)]


def test_needs_all_data_files(storage, monkeypatch):
    """And says which is not there, before anything is visible."""
    size = storage.size
    monkeypatch.setattr(storage, "sizes", lambda path: {})
    monkeypatch.setattr(storage, "size", lambda path: size(path) - path.count("rank-00001"))
    with pytest.raises(DataError, match=r"rank-00001\.safetensors: expected .* 5000 .* 4999"):
        save(storage, 1, 0)
    monkeypatch.setattr(storage, "size", lambda path: size(path + "x"))
    with pytest.raises(DataError, match=r"rank-00000\.safetensors: expected .* nothing"):
        save(storage, 1, 0)
    assert commit.list_steps(storage) == []
    assert MANIFEST_NAME not in storage.list(commit.format_step(1))


def test_folders_listed_late(storage, monkeypatch):
    """A file that another host wrote may be there before it is listed."""
    monkeypatch.setattr(storage, "sizes", lambda path: {"rank-00000.safetensors": 0})
    save(storage, 1, 0)
    assert commit.list_steps(storage) == [1]


@pytest.mark.parametrize("appears", [False, True])
def test_a_save_that_fails_at_the_end(storage, monkeypatch, appears):
    """Leaves the old checkpoint or the new one, and `discard` knows which."""
    old = save(storage, 1, 0)
    publish = storage.publish

    def fail(path, data, *, overwrite):
        if appears:
            publish(path, data, overwrite=overwrite)
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(storage, "publish", fail)
    with pytest.raises(OSError, match="Input/output"):
        save(storage, 1, 1, overwrite=True)
    monkeypatch.undo()
    for data in storage.list("step_00000001"):
        if data not in (old.data, MANIFEST_NAME):
            commit.discard(storage, "step_00000001", data)
    assert version_of(storage, 1) == appears
    assert commit.find_garbage(storage) == ([f"step_00000001/{old.data}"] if appears else [])


def test_discarding_without_a_manifest_to_go_by(local):
    data = commit.draw_folder_name()
    put(local, f"step_00000001/{data}/a", b"")
    put(local, f"step_00000001/{MANIFEST_NAME}", b"damaged")
    commit.discard(local, "step_00000001", data)
    assert local.list("step_00000001") == [data, MANIFEST_NAME]
    local.remove(f"step_00000001/{MANIFEST_NAME}")
    commit.discard(local, "step_00000001", data)
    assert local.list("step_00000001") == []


def test_old_data_that_cannot_be_removed(local, monkeypatch):
    """Are garbage, but the new checkpoint is committed."""
    old = save(local, 1, 0)

    def refuse(path):
        raise OSError(13, "Permission denied", path)

    monkeypatch.setattr(local, "remove_tree", refuse)
    save(local, 1, 1, overwrite=True)
    assert version_of(local, 1) == 1
    assert commit.find_garbage(local) == [f"step_00000001/{old.data}"]


def test_garbage_is_what_nobody_names(storage):
    kept = save(storage, 1, 0)
    put(storage, f"step_00000001/{commit.draw_folder_name()}/rank-00000.safetensors", b"dead")
    put(storage, f"step_00000002/{commit.draw_folder_name()}/rank-00000.safetensors", b"dead")
    put(storage, "step_00000001/.manifest.json.0123456789ab", b"dead")
    put(storage, "step_00000001/notes.txt", b"alive")
    put(storage, "logs/data.txt", b"alive")
    save(storage, 3, 0)
    put(storage, "step_00000003/manifest.json", b"damaged, but its data may be wanted")
    found = commit.find_garbage(storage)
    assert len(found) == 3
    commit.remove_garbage(storage, found)
    assert commit.find_garbage(storage) == []
    assert commit.list_steps(storage) == [1]
    assert storage.list("") == ["logs", "step_00000001", "step_00000003"]
    assert storage.list("step_00000001") == [kept.data, MANIFEST_NAME, "notes.txt"]
    assert len(storage.list("step_00000003")) == 2


def test_what_others_left_in_a_step_is_no_garbage(storage):
    ours = commit.draw_folder_name()
    for path in (
        "step_00000100/.metadata",  # a folder of DCP
        "step_00000100/__0_0.distcp",
        "step_00000200/model.safetensors",
        f"step_00000200/{ours}/rank-00000.safetensors",
        "step_00000300",  # a file of torch.save
        f"step_00000400/{ours}/rank-00000.safetensors",
        "step_00000400/.manifest.json.0123456789ab",
    ):
        put(storage, path, b"theirs or dead")
    if storage.has_rename:
        (Path(storage.url) / "step_00000500").mkdir()
    found = commit.find_garbage(storage)
    empty = ["step_00000500"] * storage.has_rename
    assert found == [f"step_00000200/{ours}", "step_00000400", *empty]
    commit.remove_garbage(storage, found)
    assert storage.list("") == ["step_00000100", "step_00000200", "step_00000300"]
    assert storage.list("step_00000100") == [".metadata", "__0_0.distcp"]
    assert storage.list("step_00000200") == ["model.safetensors"]


def test_what_a_failed_save_leaves_depends_on_whether_it_may_appear(storage):
    for may_appear, error, is_left in (
        (False, OSError(5, "Input/output error"), False),
        (True, OSError(5, "Input/output error"), not storage.has_rename),
        (True, FileExistsError(17, "File exists"), False),
        (True, DataError("a file is missing"), False),
        (True, KeyboardInterrupt(), not storage.has_rename),
    ):
        data = commit.draw_folder_name()
        put(storage, f"step_00000001/{data}/a", b"")
        with (
            pytest.raises(type(error)),
            commit.discard_on_error(storage, "step_00000001", data, may_appear=may_appear),
        ):
            raise error
        assert (data in storage.list("step_00000001")) == is_left


def test_missing_checkpoint(storage):
    with pytest.raises(FileNotFoundError, match="step_00000007"):
        commit.read_manifest(storage, "step_00000007")


@pytest.mark.parametrize("name", ["index.msgpack", "extra.json", "rank-00001.safetensors"])
@pytest.mark.parametrize("harm", ["missing", "short", "long"])
def test_files_are_looked_for(local, name, harm):
    manifest = save(local, 1, 0)
    save(local, 2, 0)
    where = f"step_00000001/{manifest.data}/{name}"
    content = local.read(where)
    if harm == "missing":
        local.remove(where)
    else:
        put(local, where, content[:-1] if harm == "short" else content + b"\0")
    with pytest.raises(DataError, match=name):
        commit.check_files(local, "step_00000001", manifest)
    assert commit.list_steps(local) == [2]
    if name != "rank-00001.safetensors":
        with pytest.raises(DataError, match=name):
            version_of(local, 1)


def test_every_bit_of_the_small_files_counts(tmp_path_factory):
    storage = LocalStorage(tmp_path_factory.mktemp("bits"))
    manifest = save(storage, 1, 0)
    folder = f"step_00000001/{manifest.data}"
    files = ["step_00000001/manifest.json", f"{folder}/index.msgpack", f"{folder}/extra.json"]

    @given(st.sampled_from(files), st.data())
    def flip(path, data):
        content = storage.read(path)
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        put(storage, path, changed)
        try:
            with pytest.raises(DataError, match=path):
                version_of(storage, 1)
        finally:
            put(storage, path, content)

    flip()
    assert version_of(storage, 1) == 0


def test_index_of_another_checkpoint(local):
    """Whole by itself, and of the hash that a forged manifest says, but of other files."""
    one, two = save(local, 1, 0), save(local, 2, 0)
    forged = msgspec.structs.replace(two, files=[*two.files[:1], one.files[1]][::-1])
    seal(local, "step_00000002", forged)
    with pytest.raises(DataError, match="other files or sizes"):
        commit.read_index(local, "step_00000002", commit.read_manifest(local, "step_00000002"))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "", ".hidden", "a\n"])
def test_names_that_lead_elsewhere(local, name):
    manifest = save(local, 1, 0)
    record = msgspec.structs.replace(manifest.files[0], name=name)
    for change in (
        {"data": name},
        {"index": record},
        {"extra": record},
        {"files": [manifest.files[1], record]},
    ):
        seal(local, "step_00000001", msgspec.structs.replace(manifest, **change))
        with pytest.raises(DataError, match="do not trust"):
            commit.read_manifest(local, "step_00000001")


def test_impossible_records(local):
    manifest = save(local, 1, 0)
    file = manifest.files[0]
    for wrong in ({"num_bytes": -1}, {"xxh3_128": "0" * 31}, {"name": "index.msgpack"}):
        record = msgspec.structs.replace(file, **wrong)
        seal(local, "step_00000001", msgspec.structs.replace(manifest, files=[record]))
        with pytest.raises(DataError, match=r"impossible|twice"):
            commit.read_manifest(local, "step_00000001")
