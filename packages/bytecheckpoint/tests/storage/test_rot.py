"""Damage of every kind to every file of a checkpoint: found by every load, before it does harm."""

import json
import shutil
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash

import bytecheckpoint as bcp
from bytecheckpoint.loading.reader import UNIT_BYTES
from bytecheckpoint.planner import planner
from bytecheckpoint.storage.files import commit
from bytecheckpoint.storage.files.index import BLOCK_BYTES, count_blocks
from bytecheckpoint.storage.files.manifest import Manifest
from bytecheckpoint.storage.local import LocalStorage
from bytecheckpoint.tools.reshard import reshard
from bytecheckpoint.tools.verify import verify
from shared.errors import DataError

SHAPES = {"a.w": (300, 500), "a.v": (7,), "a.t": (), "b.w": (300, 500), "b.v": (7,), "c.t": ()}
NUM_FLIPS = 240


def state(seed):
    """Two files of several blocks; a header with room, and values that are no tensor."""
    drawn = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}
    return {**_nested(tensors), "n": {"step": seed, "text": "x" * 50}}


def empty():
    tensors = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    return {**_nested(tensors), "n": {"step": -1, "text": ""}}


def _nested(flat):
    nested = {}
    for name, tensor in flat.items():
        outer, inner = name.split(".")
        nested.setdefault(outer, {})[inner] = tensor
    return nested


def flat(nested):
    return {f"{o}.{i}": t for o in "abc" for i, t in nested[o].items()}


def is_untouched(nested):
    return all(bool((t == -1).all()) for t in flat(nested).values()) and nested["n"]["step"] == -1


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Two steps with the same tensors, each in two files of one size."""
    folder = tmp_path_factory.mktemp("rot")
    with mock.patch.object(planner, "SMALL_BYTES", 0):  # else they all lie in the first file
        for step in (1, 2):
            bcp.save(folder / f"one{step}", state(step))
            reshard(folder / f"one{step}", folder / f"two{step}", 2)
    return folder


@pytest.fixture
def copy(originals, tmp_path):
    return shutil.copytree(originals / "two1", tmp_path / "copy")


def data_files(folder):
    return sorted(folder.glob("data-*/rank-*.safetensors"))


def flip(file, bit):
    """Flips a bit, counted from the file's start."""
    with open(file, "r+b") as opened:
        opened.seek(bit // 8)
        (old,) = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes([old ^ 1 << bit % 8]))


def places(folder):
    """Every kind of byte there is: what it is, file, first byte, the one after the last."""
    found = []
    for file in sorted(folder.rglob("*")):
        if not file.is_file():
            continue
        size = file.stat().st_size
        if file.suffix != ".safetensors":
            found.append((file.name, file, 0, size))
            continue
        hashed = size - 8 * -(-size // (BLOCK_BYTES + 8))
        text = 8 + len(file.read_bytes()[8:4096].rstrip(b" \0").partition(b"} ")[0])
        data = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        found += [
            ("length of header", file, 0, 8),
            ("header", file, 8, min(text, data)),
            ("padding of header", file, min(text, data - 1), data),
            ("data", file, data, hashed),
            ("end of data", file, hashed - 4, hashed),
            ("table", file, hashed, size),
        ]
    return found


def flips(folder, num_flips, seed=0):
    drawn = np.random.default_rng(seed)
    kinds = places(folder)
    for at in range(num_flips):
        what, file, start, stop = kinds[at % len(kinds)]
        yield what, file, int(drawn.integers(8 * start, 8 * stop))


def test_any_flipped_bit_in_any_file_is_found_by_a_load(copy):
    assert len({kind for kind, *_ in places(copy)}) == 9
    found = {}
    for what, file, bit in flips(copy, NUM_FLIPS):
        flip(file, bit)
        try:
            bcp.load(copy, empty())
        except DataError as error:
            found.setdefault(what, []).append(str(error))
        else:
            pytest.fail(f"bit {bit} of {file.name} ({what}) was not found")
        flip(file, bit)
    assert sum(map(len, found.values())) == NUM_FLIPS
    # Whole again after all of that.
    into = empty()
    bcp.load(copy, into)
    expected = flat(state(1))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in flat(into).items())
    # What is said leads to the damage.
    assert all("block" in text and "rank-0000" in text for text in found["data"])
    assert any("'a.w'" in text or "'b.w'" in text for text in found["data"])
    assert all("table of checksums" in text for text in found["table"])
    assert all("manifest" in text for text in found["manifest.json"])
    assert all("index.msgpack" in text for text in found["index.msgpack"])
    assert all("extra.json" in text for text in found["extra.json"])


@pytest.mark.slow
def test_any_flipped_bit_is_found_by_a_deep_look(copy):
    for what, file, bit in flips(copy, NUM_FLIPS, seed=1):
        flip(file, bit)
        assert verify(str(copy), deep=True), (what, bit)
        flip(file, bit)
    assert not verify(str(copy), deep=True)


def load_damaged(folder, num_flips, dedupe):
    """On ranks: every one raises the same, though some read nothing of what is damaged."""
    wrong = []
    for at, (what, file, bit) in enumerate(flips(folder, num_flips, seed=2)):
        if dist.get_rank() == 0:
            flip(file, bit)
        dist.barrier()
        into = empty()
        if dist.get_rank() == 1:
            into = {"a": into["a"], "n": into["n"]}
        try:
            bcp.load(folder, into, dedupe=dedupe[at % len(dedupe)], atomic=at % 2 == 0)
            wrong.append((what, bit, "returned"))
            text = ""
        except DataError as error:
            text = str(error)
        if at % 2 == 0 and not all(
            bool((t == -1).all()) for o in "abc" for t in into.get(o, {}).values()
        ):
            wrong.append((what, bit, "touched"))
        texts = [None, None]
        dist.all_gather_object(texts, text)
        if texts[0] != texts[1]:
            wrong.append((what, bit, texts))
        if dist.get_rank() == 0:
            flip(file, bit)
        dist.barrier()
    return wrong


def test_no_rank_returns_from_loading_a_flipped_bit(copy, pool):
    assert pool.run(load_damaged, copy, 45, ["always", "never"]).results == [[], []]


def test_atomic_leaves_every_destination_as_it_was(copy):
    file = data_files(copy)[-1]
    flip(file, 8 * (file.stat().st_size - 8 * 8 - 100))
    into = empty()
    before = flat(into)
    kept = {name: tensor.clone() for name, tensor in before.items()}
    with pytest.raises(DataError, match=r"No tensor was overwritten"):
        bcp.load(copy, into, atomic=True)
    assert all(flat(into)[name] is tensor for name, tensor in before.items())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in before.items())
    assert into["n"] == empty()["n"]


def test_without_atomic_the_error_names_what_was_overwritten(copy):
    # The last block of the last file: what was read before it has been copied.
    file = data_files(copy)[-1]
    flip(file, 8 * (file.stat().st_size - 8 * 8 - 100))
    into = empty()
    with pytest.raises(DataError, match=r"Overwritten before that was found: ") as raised:
        bcp.load(copy, into)
    named = set(str(raised.value).rpartition("found: ")[2].split(", "))
    changed = {name for name, tensor in flat(into).items() if bool((tensor != -1).any())}
    assert changed
    assert changed <= named
    assert into["n"] == empty()["n"]


def test_without_verification_a_damaged_block_is_loaded_as_it_is(copy):
    files = data_files(copy)
    with bcp.open(copy) as checkpoint:
        row = checkpoint.index.position["b.v"]
        index = checkpoint.index
        at = int(index.start[index.chunks.tensor == row][0])
        file = files[int(index.file[index.chunks.tensor == row][0])]
    flip(file, 8 * at)
    into = empty()
    bcp.load(copy, into, verify=False)
    wrong = (into["b"]["v"] != state(1)["b"]["v"]).nonzero().flatten().tolist()
    assert wrong == [0]
    assert torch.equal(into["a"]["w"], state(1)["a"]["w"])
    with pytest.raises(DataError, match=r"'b\.v'"):
        bcp.load(copy, empty())


def truncate(file, num_bytes):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) - num_bytes])


def swap_ranks(copy, _):
    one, two = data_files(copy)
    content = one.read_bytes()
    assert one.stat().st_size == two.stat().st_size, "else the size alone would tell"
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def swap_steps(copy, originals):
    target = data_files(copy)[1]
    source = data_files(originals / "two2")[1]
    assert source.stat().st_size == target.stat().st_size
    target.write_bytes(source.read_bytes())


def swap_index(copy, originals):
    (source,) = (originals / "one1").glob("data-*/index.msgpack")
    (target,) = copy.glob("data-*/index.msgpack")
    target.write_bytes(source.read_bytes())


def swap_extra(copy, _):
    """That of another step, whose size happens to be the same."""
    (file,) = copy.glob("data-*/extra.json")
    content = file.read_bytes()
    assert content.count(b'"step":1,') == 1
    file.write_bytes(content.replace(b'"step":1,', b'"step":2,'))


def edit_index(copy, _):
    """Two tensors of one shape and type change places: a valid index, but not this one's."""
    (file,) = copy.glob("data-*/index.msgpack")
    content = file.read_bytes()
    assert content.count(b"b.w") == 1
    file.write_bytes(content.replace(b"b.w", b"b.x"))


def edit_manifest(copy, _):
    file = copy / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"world_size": 2', b'"world_size": 1'))


DAMAGES = {
    "cut by a byte": (
        lambda c, _: truncate(data_files(c)[1], 1),
        r"rank-00001.*expected a file of",
    ),
    "cut to nothing": (lambda c, _: data_files(c)[0].write_bytes(b""), r"rank-00000.*got 0 bytes"),
    "grown": (lambda c, _: data_files(c)[0].open("ab").write(b"0"), r"rank-00000.*expected a file"),
    "missing": (lambda c, _: data_files(c)[1].unlink(), r"rank-00001.*got nothing"),
    "manifest cut": (lambda c, _: truncate(c / "manifest.json", 1), r"manifest.*hash"),
    "manifest empty": (lambda c, _: (c / "manifest.json").write_bytes(b""), r"manifest.*hash"),
    "manifest edited": (edit_manifest, r"manifest.*hash"),
    "index cut": (lambda c, _: truncate(next(c.glob("*/index.msgpack")), 1), r"index.*cut"),
    "index missing": (lambda c, _: next(c.glob("*/index.msgpack")).unlink(), r"index.*missing"),
    "index of another save": (swap_index, r"index.*(cut|hash)"),
    "index edited": (edit_index, r"index.*hash in the manifest"),
    "extra missing": (lambda c, _: next(c.glob("*/extra.json")).unlink(), r"extra.*missing"),
    "extra of another step": (swap_extra, r"extra.*hash in the manifest"),
    "file of another rank": (swap_ranks, r"rank-0000.*swapped"),
    "file of another step": (swap_steps, r"rank-00001.*swapped"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_larger_damage_has_its_own_error_before_anything_is_touched(copy, originals, kind):
    damage, pattern = DAMAGES[kind]
    damage(copy, originals)
    into = empty()
    with pytest.raises(DataError, match=pattern):
        bcp.load(copy, into)
    assert is_untouched(into)
    assert verify(str(copy), deep=False), "a look that reads no data sees it as well"


def test_each_larger_damage_is_told_apart(originals, tmp_path):
    texts = {}
    for kind, (damage, _) in DAMAGES.items():
        folder = shutil.copytree(originals / "two1", tmp_path / kind)
        damage(folder, originals)
        with pytest.raises(DataError) as raised:
            bcp.load(folder, empty())
        texts[kind] = str(raised.value).replace(str(folder), "")
    for group in (
        ["cut by a byte", "missing", "manifest cut", "index missing", "extra missing"],
        ["file of another step", "cut by a byte", "index edited", "extra of another step"],
    ):
        assert len({texts[kind] for kind in group}) == len(group)


def test_a_step_with_a_damaged_manifest_or_a_cut_file_is_not_the_newest(tmp_path):
    with bcp.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
    truncate(tmp_path / "step_00000003" / "manifest.json", 3)
    truncate(data_files(tmp_path / "step_00000002")[0], 1)
    with bcp.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [1]
        into = empty()
        assert ckpt.load_latest(into) == 1
        assert into["n"]["step"] == 1


def resealed(folder, change):
    """A manifest and an index that were changed and sealed again, as by an attacker."""
    storage = LocalStorage(folder)
    manifest = commit.read_manifest(storage, "")
    fields = msgspec.json.decode(msgspec.json.encode(manifest))
    change(fields)
    (folder / "manifest.json").write_bytes(msgspec.convert(fields, Manifest).encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(data="../two2"),
        lambda m: m.update(data="/etc"),
        lambda m: m.update(data="data-0123456789ab/.."),
        lambda m: m["files"][0].update(name="../../secret"),
        lambda m: m["files"][0].update(name="/etc/passwd"),
        lambda m: m["files"][0].update(name="a/../../b"),
        lambda m: m["files"][0].update(name=""),
        lambda m: m["index"].update(name="../index.msgpack"),
        lambda m: m["extra"].update(name=".hidden"),
        lambda m: m["files"][0].update(num_bytes=-1),
        lambda m: m["files"][0].update(num_bytes=2**62),
        lambda m: m["files"].append(dict(m["files"][0])),
        lambda m: m.update(version=2),
        lambda m: m.update(format="other"),
    ],
)
def test_a_hostile_manifest_is_refused(copy, change):
    resealed(copy, change)
    into = empty()
    with pytest.raises(DataError):
        bcp.load(copy, into)
    assert is_untouched(into)


def test_values_of_another_state_are_refused_or_ignored_but_never_run(copy):
    """An extra file with marks of nonsense: an error that says so, not an exception of Python's."""
    storage = LocalStorage(copy)
    manifest = commit.read_manifest(storage, "")
    trees = [
        {"$tensor": "not there"},
        {"$tensor": ["a"]},
        {"$bytes": "???"},
        {"$tuple": 3},
        {"$float": "x"},
        {"$nothing": 1},
        {"$dict": [[[], 1]]},
        {"$complex": [1, 2, 3]},
    ]
    for tree in trees:
        extra = json.dumps(
            {"tree": {"n": {"step": tree, "text": ""}}, "ranks": {}, "trace": []}
        ).encode()
        (copy / manifest.data / "extra.json").write_bytes(extra)
        changed = msgspec.structs.replace(manifest, extra=commit.describe_file("extra.json", extra))
        (copy / "manifest.json").write_bytes(changed.encode())
        into = empty()
        with pytest.raises(DataError):
            bcp.load(copy, into)
        assert is_untouched(into), tree
    for content in (
        b"[]",
        b"null",
        b'{"tree": 1, "ranks": []}',
        b'{"tree": {}, "ranks": {"": 3}}',
        b"{",
    ):
        (copy / manifest.data / "extra.json").write_bytes(content)
        changed = msgspec.structs.replace(
            manifest, extra=commit.describe_file("extra.json", content)
        )
        (copy / "manifest.json").write_bytes(changed.encode())
        with pytest.raises(DataError):
            bcp.load(copy, {"n": {"step": -1, "text": ""}})


def test_the_table_covers_every_byte_before_it(originals):
    for file in data_files(originals / "two1"):
        content = file.read_bytes()
        hashed = len(content) - 8 * -(-len(content) // (BLOCK_BYTES + 8))
        assert count_blocks(hashed) * 8 == len(content) - hashed
        for block in range(count_blocks(hashed)):
            data = content[block * BLOCK_BYTES : min((block + 1) * BLOCK_BYTES, hashed)]
            at = hashed + 8 * block
            assert xxhash.xxh3_64_digest(data)[::-1] == content[at : at + 8]
    assert all(size % BLOCK_BYTES == 0 for size in UNIT_BYTES.values())
