import shutil

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.tools.reshard import reshard
from bytecheckpoint.tools.verify import verify


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two data files of a few blocks each."""
    folder = tmp_path_factory.mktemp("verify")
    torch.manual_seed(0)
    state = {"a": torch.randn(500, 300), "b": torch.randn(700, 400), "c": torch.tensor(1), "n": 3}
    bcp.save(folder / "one", state)
    reshard(folder / "one", folder / "two", 2)
    return folder / "two"


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def data_files(folder):
    return sorted(folder.glob("data-*/rank-*.safetensors"))


def flip(file, at, bit=0):
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_checkpoint_has_no_damage(whole, deep):
    read = []
    assert verify(str(whole), deep=deep, progress=read.append) == []
    num_blocks = sum(-(-file.stat().st_size // 262152) for file in data_files(whole))
    expected = sum(file.stat().st_size for file in data_files(whole)) - 8 * num_blocks
    assert sum(read) == (expected if deep else 0)


def test_any_flipped_bit_is_found_by_reading_every_byte(copy):
    random = np.random.default_rng(0)
    files = [file for file in copy.rglob("*") if file.is_file()]
    assert len(files) == 5
    for file in files:
        size = file.stat().st_size
        for at in [0, size - 1, *random.integers(0, size, 8).tolist()]:
            flip(file, at, bit := int(random.integers(8)))
            verify(str(copy))  # need not see it, must not raise
            damages = verify(str(copy), deep=True)
            assert damages, f"{file.name} at {at}"
            assert damages[0].file == str(file.relative_to(copy))
            flip(file, at, bit)
    assert verify(str(copy), deep=True) == []


def test_a_changed_block_is_named_with_its_tensors_and_only_deep(copy):
    file = data_files(copy)[0]
    for block in (1, 2):
        flip(file, block * 262144 + 5)
    assert verify(str(copy)) == []
    damages = verify(str(copy), deep=True)
    assert [damage.block for damage in damages] == [1, 2]
    assert all(damage.file.endswith("rank-00000.safetensors") for damage in damages)
    with bcp.open(copy) as checkpoint:
        for damage in damages:
            for name in damage.tensors:
                rows = checkpoint.index.rows
                at = checkpoint.index.position[name]
                mine = slice(int(rows[at]), int(rows[at + 1]))
                start, num = checkpoint.index.start[mine], checkpoint.index.num_bytes[mine]
                first = damage.block * 262144
                inside = (start < first + 262144) & (start + num > first)
                assert (inside & (checkpoint.index.file[mine] == 0)).any()
            assert damage.tensors


def test_cut_and_missing_files_are_listed_together(copy):
    first, second = data_files(copy)
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    (extra,) = copy.glob("data-*/extra.json")
    extra.write_text("{}")
    for deep in (False, True):
        damages = {
            damage.file.rpartition("/")[2]: damage for damage in verify(str(copy), deep=deep)
        }
        assert set(damages) == {first.name, second.name, "extra.json"}
        assert "got" in damages[first.name].what
        assert damages[second.name].what == "missing"
        assert {"a", "b"} <= {*damages[first.name].tensors, *damages[second.name].tensors}


def test_swapped_files_are_found_without_reading_them_whole(copy):
    first, second = data_files(copy)
    size = max(first.stat().st_size, second.stat().st_size)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert len(verify(str(copy))) == 2, f"files of up to {size} bytes"


def test_a_damaged_index_does_not_keep_blocks_from_being_checked(copy):
    (index,) = copy.glob("data-*/index.msgpack")
    flip(index, 10)
    flip(data_files(copy)[1], 300_000)
    found = {
        (damage.file.rpartition("/")[2], damage.block) for damage in verify(str(copy), deep=True)
    }
    assert found == {("index.msgpack", None), ("rank-00001.safetensors", 1)}


def test_what_cannot_be_a_checkpoint_is_damage_too(copy, tmp_path):
    (copy / "manifest.json").write_bytes(b"\x00" * 100)
    assert [damage.file for damage in verify(str(copy))] == ["manifest.json"]
    (tmp_path / "nothing").mkdir()
    assert [damage.file for damage in verify(str(tmp_path / "nothing"))] == ["manifest.json"]


def test_unreadable_bytes_are_damage(copy, monkeypatch):
    from bytecheckpoint.storage.local import LocalStorage

    original = LocalStorage.read_into

    def failing(self, path, offset, buffer):
        if path.endswith("rank-00000.safetensors") and len(buffer) > 100_000:
            raise OSError(5, "Input/output error")
        original(self, path, offset, buffer)

    monkeypatch.setattr(LocalStorage, "read_into", failing)
    (damage,) = verify(str(copy), deep=True)
    assert "Input/output error" in damage.what
    assert "a" in damage.tensors or "b" in damage.tensors


def test_a_header_that_contradicts_the_index_is_found(copy, whole):
    # A file made whole again, table and manifest too, but with another name in its header.
    import xxhash

    from bytecheckpoint.storage.files.manifest import Manifest

    file = data_files(copy)[0]
    content = bytearray(file.read_bytes())
    content[:4096] = content[:4096].replace(b'"a@0,0"', b'"z@0,0"').replace(b'"b@0,0"', b'"y@0,0"')
    num_blocks = -(-len(content) // 262152)
    hashed = len(content) - 8 * num_blocks
    content[hashed : hashed + 8] = xxhash.xxh3_64_intdigest(content[:262144]).to_bytes(8, "little")
    file.write_bytes(content)
    manifest = Manifest.decode((copy / "manifest.json").read_bytes(), "")
    import msgspec

    record = msgspec.structs.replace(
        manifest.files[0], xxh3_128=xxhash.xxh3_128_hexdigest(content[hashed:])
    )
    manifest = msgspec.structs.replace(manifest, files=[record, manifest.files[1]])
    (copy / "manifest.json").write_bytes(manifest.encode())
    (damage,) = verify(str(copy), deep=True)
    assert "its header has" in damage.what
    assert damage.block == 0
