import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file, save_model

import bytecheckpoint as bcp
from bytecheckpoint.cli import main
from bytecheckpoint.formats.ranges import Chunk, build_index, join_path
from bytecheckpoint.formats.registry import FORMATS, Format
from bytecheckpoint.storage.files.index import File
from bytecheckpoint.storage.local import LocalStorage
from bytecheckpoint.tools.writers.registry import WRITERS
from shared.topology.boxes import Box
from shared.units import format_bytes


@pytest.fixture
def run(tmp_path):
    """Three steps; the second differs from the first in two elements, the third in a shape too."""
    root = tmp_path / "run"
    weight = torch.arange(20_000.0).view(200, 100)
    state = {"model": {"weight": weight, "bias": torch.ones(7)}, "step": 0}
    state["model"]["head"] = weight
    with bcp.Checkpointer(root) as ckpt:
        for step in (10, 20, 30):
            state["step"] = step
            ckpt.save(step, state).committed.result()
            weight[0, :2] += 0.5
        del state["model"]["bias"]
        ckpt.save(40, state | {"model": {"weight": torch.zeros(3), "head": weight}})
    return root


def out_of(capsys, *args, code=0):
    assert main([str(arg) for arg in args]) == code
    return capsys.readouterr()


def test_help_teaches_every_command_with_an_example(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    commands = ("ls", "inspect", "verify", "diff", "convert", "reshard", "timeline", "gc", "demo")
    for command in commands:
        assert f"\n  bytecheckpoint {command} " in text
    assert "Exit status" in text


def test_help_does_not_import_torch():
    program = (
        "import sys; from bytecheckpoint.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print('heavy', sorted({'torch', 'numpy', 'matplotlib'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("heavy []\n")


@pytest.mark.parametrize("args", [[], ["lst"], ["ls"], ["reshard", "a", "b"], ["gc", "a", "--no"]])
def test_wrong_usage_exits_with_2(args):
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2


def test_ls_shows_step_size_ranks_tensors(run, capsys):
    lines = out_of(capsys, "ls", run).out.splitlines()
    assert lines[0].split() == ["checkpoint", "step", "size", "ranks", "files", "tensors"]
    assert [line.split()[:2] for line in lines[1:]] == [
        [f"step_000000{step}", str(step)] for step in (10, 20, 30, 40)
    ]
    assert lines[1].split()[-3:] == ["1", "1", "2"]
    single = out_of(capsys, "ls", run / "step_00000010").out.splitlines()
    assert single[1].split()[:2] == [".", "10"]


def test_ls_shows_damage_and_fails(run, capsys):
    (file,) = (run / "step_00000020").glob("data-*/rank-*")
    file.unlink()
    text = out_of(capsys, "ls", run, code=1).out
    assert "got nothing" in text


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_path_without_checkpoints_is_told_with_what_to_do(tmp_path, capsys, command):
    told = "expected a run's folder of steps or a checkpoint"
    path = tmp_path / "elsewhere"
    found = out_of(capsys, command, path, "--json", code=1)
    assert found.err == f"bytecheckpoint: {path}: {told}, there is nothing; check the path\n"
    assert not any(json.loads(found.out).get(key) for key in ("checkpoints", "num_checkpoints"))
    path.mkdir()
    (path / "notes.txt").touch()
    found = out_of(capsys, command, path, code=1)
    assert found.out == ""
    told += ", got a folder with notes.txt; name another"
    assert found.err == f"bytecheckpoint: {path}: {told}\n"


def test_inspect_filters_by_pattern_or_part_of_a_name(run, capsys):
    step = run / "step_00000010"
    text = out_of(capsys, "inspect", step).out
    assert ["model.weight", "float32", "200x100", "78.1", "KiB", "1"] in map(
        str.split, text.splitlines()
    )
    assert "tied to model.weight" in text
    assert "2 of 2 tensors" in text
    assert "1 of 2 tensors" in out_of(capsys, "inspect", step, "--filter", "*.bias").out
    assert "1 of 2 tensors" in out_of(capsys, "inspect", step, "--filter", "bia").out
    assert "0 of 2 tensors" in out_of(capsys, "inspect", step, "--filter", "x", code=1).out
    assert '"step": 10' in out_of(capsys, "inspect", step, "--values").out


def test_a_run_stands_for_its_newest_checkpoint(run, capsys):
    assert "model.weight  float32  3" in out_of(capsys, "inspect", run).out


def test_verify_lists_damage_and_exits_with_1(run, capsys):
    assert "whole checkpoints: 4" in out_of(capsys, "verify", run).out
    (file,) = (run / "step_00000020").glob("data-*/rank-*")
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    assert "whole checkpoints: 4" in out_of(capsys, "verify", run).out
    found = out_of(capsys, "verify", run, "--deep", code=1)
    assert "step_00000020: data-" in found.out
    assert "block 0: bytes 0 to" in found.out
    assert "holds parts of model." in found.out
    assert "damages: 1, checkpoints: 4" in found.err


def test_diff_tells_bits_and_distance(run, capsys):
    one, two = run / "step_00000010", run / "step_00000020"
    assert "equal tensors: 3, differences: 0" in out_of(capsys, "diff", one, one).out
    text = out_of(capsys, "diff", one, two, code=1).out
    (line,) = (line for line in text.splitlines() if line.startswith("model.weight"))
    assert line.split()[-2:] == ["2", "0.5"]
    assert any(line.split()[:4] == ["step", "value", "10", "20"] for line in text.splitlines())
    text = out_of(capsys, "diff", one, run / "step_00000040", code=1).out
    assert "only in A" in text
    assert "shape" in text
    assert "equal tensors: 1" in out_of(capsys, "diff", one, two, "--filter", "bias").out


def test_diff_compares_bits_and_not_values(tmp_path, capsys):
    nan, zero = float("nan"), torch.zeros(4, dtype=torch.bfloat16)
    bcp.save(tmp_path / "a", {"x": torch.tensor([nan, 1.0, nan]), "y": zero, "z": torch.arange(3)})
    bcp.save(tmp_path / "b", {"x": torch.tensor([nan, nan, nan]), "y": -zero, "z": torch.arange(3)})
    text = out_of(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1).out
    rows = {line.split()[0]: line.split()[-2:] for line in text.splitlines()}
    assert rows["x"] == ["1", "nan"]
    assert rows["y"] == ["4", "0"]
    assert "z" not in rows


def test_verify_says_where_a_format_has_no_checksums(run, tmp_path, capsys):
    torch.distributed.checkpoint.save(
        {"x": torch.ones(9)}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    for options in ([], ["--deep"]):
        text = out_of(capsys, "verify", tmp_path / "dcp", *options).out
        assert "only its structure: the format has no checksums" in text
        assert "no checksums" not in out_of(capsys, "verify", run, *options).out


def test_reshard_writes_balanced_files_with_the_same_content(run, tmp_path, capsys):
    text = out_of(capsys, "reshard", run / "step_00000010", tmp_path / "five", "--world", 5).out
    sizes = [file.stat().st_size for file in tmp_path.glob("five/data-*/rank-*")]
    assert f"{len(sizes)} files" in text
    assert (
        "equal tensors: 3, differences: 0"
        in out_of(capsys, "diff", run / "step_00000010", tmp_path / "five").out
    )
    assert "whole checkpoints: 1" in out_of(capsys, "verify", tmp_path / "five", "--deep").out
    state = {"model": {"weight": torch.zeros(200, 100), "bias": torch.zeros(7)}, "step": 0}
    state["model"]["head"] = state["model"]["weight"]
    bcp.load(tmp_path / "five", state)
    assert state["step"] == 10
    assert state["model"]["weight"][1, 5] == 105
    found = out_of(capsys, "reshard", run, tmp_path / "five", "--world", 2, code=1)
    assert "expected no checkpoint, but there is one" in found.err
    assert (
        "at least one file"
        in out_of(capsys, "reshard", run, tmp_path / "none", "--world", 0, code=1).err
    )


def test_reshard_splits_a_large_tensor_evenly(tmp_path, capsys):
    bcp.save(tmp_path / "one", {"big": torch.randn(200_000, 5), "small": torch.randn(10)})
    out_of(capsys, "reshard", tmp_path / "one", tmp_path / "four", "--world", 4)
    sizes = [file.stat().st_size for file in tmp_path.glob("four/data-*/rank-*")]
    assert len(sizes) == 4
    assert max(sizes) / (sum(sizes) / 4) < 1.05
    assert "equal tensors: 2" in out_of(capsys, "diff", tmp_path / "one", tmp_path / "four").out


@pytest.mark.parametrize("appears", [False, True])
def test_reshard_that_fails_leaves_what_it_found(run, tmp_path, capsys, monkeypatch, appears):
    publish = LocalStorage.publish

    def fail(storage, path, data, *, overwrite):
        if appears:
            publish(storage, path, data, overwrite=overwrite)
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(LocalStorage, "publish", fail)
    out_of(capsys, "reshard", run / "step_00000010", tmp_path / "two", "--world", 2, code=1)
    # A manifest that appeared all the same has its data.
    assert len(list((tmp_path / "two").iterdir())) == 2 * appears
    if appears:
        assert "whole checkpoints: 1" in out_of(capsys, "verify", tmp_path / "two", "--deep").out


@pytest.mark.parametrize("is_dict", [False, True])
def test_reshard_of_a_hugging_face_folder_loads_under_the_models_key(tmp_path, capsys, is_dict):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    save_model(model, tmp_path / "model.safetensors")
    out_of(capsys, "reshard", tmp_path, tmp_path / "two", "--world", 2)
    other = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    bcp.load(tmp_path / "two", {"model": other.state_dict() if is_dict else other})
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    out_of(capsys, "convert", tmp_path / "two", tmp_path / "back", "--to", "safetensors")
    assert "differences: 0" in out_of(capsys, "diff", tmp_path, tmp_path / "back").out


@pytest.mark.parametrize("command", [["convert", "--to", "torch"], ["reshard", "--world", "2"]])
def test_a_full_disk_is_one_sentence(run, small_disk, capsys, command):
    name, *options = command
    target = small_disk(16_384) / "new"
    told = out_of(capsys, name, run / "step_00000010", target, *options, code=1).err
    assert re.fullmatch(
        rf"bytecheckpoint: {target}\S*: expected room on the disk for what is written there, got "
        r"[\d,]+ bytes free; free some, or write to another disk\n",
        told,
    ), told


def test_convert_takes_files_of_torch(tmp_path, capsys):
    torch.save({"model": {"w": torch.arange(5.0)}, "step": 3}, tmp_path / "file.pt")
    out_of(capsys, "convert", tmp_path / "file.pt", tmp_path / "out", "--to", "safetensors")
    with bcp.open(tmp_path / "out") as found:
        assert found["w"][1:3].tolist() == [1, 2]


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
def test_convert_writes_what_reads_back_equal(run, tmp_path, capsys, to):
    target = tmp_path / ("file.pt" if to == "torch" else "folder")
    out_of(capsys, "convert", run / "step_00000010", target, "--to", to)
    if to == "torch":
        found = torch.load(target, weights_only=True)
        assert found["model"]["weight"][1, 5] == 105
    else:
        with bcp.open(target) as checkpoint:
            name = next(name for name in checkpoint.names if name.endswith("weight"))
            assert checkpoint[name][1, 5] == 105
    assert (
        "exists" in out_of(capsys, "convert", run / "step_00000010", target, "--to", to, code=1).err
    )


def read_blob(storage, path):
    """A format of its own: one tensor of bytes that is the whole file, and no values."""
    num_bytes = storage.size(join_path(path, "all.blob"))
    chunks = [Chunk("blob", Box((0,), (num_bytes,)), "all.blob", 0)]
    tensors = {"blob": (torch.uint8, (num_bytes,))}
    return build_index(tensors, chunks, [File("all.blob", num_bytes)], path), None


def write_blob(checkpoint, path, *, progress):
    path = Path(path)
    path.mkdir()
    data = b"".join(
        checkpoint.read(name).contiguous().view(torch.uint8).numpy().tobytes()
        for name in checkpoint.index.names
    )
    (path / "all.blob").write_bytes(data)
    progress(len(data))


def test_a_format_from_outside_is_in_the_help_written_and_read(run, tmp_path, capsys):
    def read_help():
        with pytest.raises(SystemExit) as stopped:
            main(["convert", "--help"])
        assert stopped.value.code == 0
        return capsys.readouterr().out

    names = ["dcp", "safetensors", "torch"]
    assert f"{{{','.join(names)}}}" in read_help()
    FORMATS.add("blob", Format("blob", "*.blob", read_blob), "bytes after bytes")
    WRITERS.add("blob", write_blob, "bytes after bytes")
    try:
        assert f"{{{','.join([*names, 'blob'])}}}" in read_help()
        out_of(capsys, "convert", run / "step_00000030", tmp_path / "out", "--to", "blob")
        num_bytes = 20_000 * 4 + 7 * 4
        shown = json.loads(out_of(capsys, "inspect", tmp_path / "out", "--json").out)
        assert shown["kind"] == "blob"
        assert [(one["name"], one["shape"]) for one in shown["tensors"]] == [("blob", [num_bytes])]
        assert (
            len(json.loads(out_of(capsys, "ls", tmp_path / "out", "--json").out)["checkpoints"])
            == 1
        )
        out_of(capsys, "convert", tmp_path / "out", tmp_path / "hub", "--to", "safetensors")
        data = (tmp_path / "out" / "all.blob").read_bytes()
        assert load_file(tmp_path / "hub" / "model.safetensors")["blob"].numpy().tobytes() == data
    finally:
        FORMATS.remove("blob")
        WRITERS.remove("blob")
    with pytest.raises(SystemExit) as stopped:
        main(["convert", str(run), str(tmp_path / "other"), "--to", "blob"])
    assert stopped.value.code == 2


def test_what_is_written_has_a_reader_and_what_is_read_a_writer():
    assert WRITERS.names() == FORMATS.names()


def test_results_as_json(run, tmp_path, capsys):
    def result(*args, code=0):
        out = out_of(capsys, *args, "--json", code=code).out
        assert out.count("\n") == 1
        return json.loads(out)

    steps = result("ls", run)["checkpoints"]
    assert [(one["step"], one["num_tensors"]) for one in steps] == [
        (s, 2) for s in (10, 20, 30, 40)
    ]
    found = result("inspect", run / "step_00000010", "--values")
    assert {one["name"]: (one["type"], one["shape"]) for one in found["tensors"]} == {
        "model.weight": ("float32", [200, 100]),
        "model.bias": ("float32", [7]),
    }
    assert found["aliases"] == {"model.head": "model.weight"}
    assert found["tree"]["step"] == 10
    assert result("verify", run, "--deep") == {"num_checkpoints": 4, "damages": []}
    found = result("diff", run / "step_00000010", run / "step_00000020", code=1)
    assert [(one["name"], one["num_different"], one["max_abs"]) for one in found["tensors"]] == [
        ("model.head", 2, 0.5),
        ("model.weight", 2, 0.5),
    ]
    assert found["values"] == [{"path": "step", "a": 10, "b": 20}]
    found = result("reshard", run, tmp_path / "two", "--world", 2)
    assert found["dst"] == str(tmp_path / "two")
    assert [path.stat().st_size for path in sorted((tmp_path / "two").rglob("*.safetensors"))] == (
        found["file_bytes"]
    )
    assert "write" in [one["stage"] for one in result("timeline", run)["stages"]]
    assert result("gc", run) == {"paths": [], "is_removed": False}
    data = next((run / "step_00000010").rglob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])
    found = result("verify", run, code=1)["damages"]
    assert [one["checkpoint"] for one in found] == ["step_00000010"]
    assert found[0]["tensors"] == ["model.bias", "model.weight"]


def test_timeline_writes_a_trace_and_a_picture(run, tmp_path, capsys):
    text = out_of(capsys, "timeline", run, "--out", tmp_path / "timeline").out
    assert {"stage", "write", "sync"} <= {line.split()[0] for line in text.splitlines()}
    trace = json.loads((tmp_path / "timeline" / "trace.json").read_text())
    assert {"write", "sync"} <= {event["name"] for event in trace["traceEvents"]}
    ElementTree.parse(tmp_path / "timeline" / "heat.svg")


def test_gc_shows_first_and_removes_only_when_told(run, capsys):
    (run / "step_00000050" / "data-0123456789ab").mkdir(parents=True)
    shown = out_of(capsys, "gc", run)
    assert "would remove step_00000050" in shown.out
    assert "add --yes" in shown.err
    assert (run / "step_00000050").exists()
    assert "removed step_00000050" in out_of(capsys, "gc", run, "--yes").out
    assert not (run / "step_00000050").exists()
    assert "nothing to remove" in out_of(capsys, "gc", run).out
    assert "whole checkpoints: 4" in out_of(capsys, "verify", run).out


def test_errors_are_one_line_on_stderr_and_exit_1(tmp_path, capsys):
    found = out_of(capsys, "inspect", tmp_path / "nothing", code=1)
    assert found.out == ""
    assert found.err.startswith("bytecheckpoint: ")
    assert found.err.count("\n") == 1


@pytest.fixture
def trained(tmp_path):
    """A checkpoint of a model and its optimizer, with tied weights and other values."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4, bias=False))
    model.append(torch.nn.Linear(4, 4, bias=False))
    model[2].weight = model[1].weight
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "extra": {"step": 3, "names": ["a", (1, 2)]}}
    bcp.save(tmp_path / "ours", state)
    return tmp_path / "ours"


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
def test_diff_knows_its_own_conversion(trained, tmp_path, capsys, to):
    target = tmp_path / f"to.{to}"
    out_of(capsys, "convert", trained, target, "--to", to)
    for two in ([trained, target], [target, trained]):
        text = out_of(capsys, "diff", *two).out
        assert "differences: 0" in text
        # Both names of the tied weight; of an optimizer's state step and two moments each.
        assert f"equal tensors: {4 if to == 'safetensors' else 4 + 3 * 3}" in text
        assert ("not compared" in text) == (to == "safetensors")


def test_diff_of_two_formats_finds_what_was_changed(trained, tmp_path, capsys):
    out_of(capsys, "convert", trained, tmp_path / "hub", "--to", "safetensors")
    weights = load_file(tmp_path / "hub" / "model.safetensors")
    weights["0.bias"][1] += 2
    weights["more"] = weights.pop("0.weight")
    save_file(weights, tmp_path / "hub" / "model.safetensors")
    text = out_of(capsys, "diff", trained, tmp_path / "hub", code=1).out.splitlines()
    assert any(
        line.split() == ["0.bias", "values", "float32", "[4]", "same", "1", "2"] for line in text
    )
    assert "values: 1, the farthest 0.bias by 2" in text
    assert "only in A: 2" in text  # the tied name is in the lost metadata
    assert "only in B: 1" in text
    state = torch.load(write_torch(trained, tmp_path, capsys), weights_only=True)
    state["extra"]["step"] = 4
    torch.save(state, tmp_path / "other.pt")
    text = out_of(capsys, "diff", trained, tmp_path / "other.pt", code=1).out
    assert ["extra.step", "value", "3", "4"] in [line.split() for line in text.splitlines()]
    assert "values that are no tensors: 1" in text


def write_torch(source, folder, capsys):
    out_of(capsys, "convert", source, folder / "file.pt", "--to", "torch")
    return folder / "file.pt"


def test_diff_lists_the_first_and_counts_all(tmp_path, capsys):
    for name, value in (("a", 0.0), ("b", 1.0)):
        bcp.save(tmp_path / name, {f"t{at:02d}": torch.full((2,), value) for at in range(30)})
    two = [tmp_path / "a", tmp_path / "b"]
    text = out_of(capsys, "diff", *two, code=1).out.splitlines()
    assert text[20].startswith("t19")
    assert text[21:] == [
        "and 10 more: add --all",
        "equal tensors: 0, differences: 30",
        "values: 30, the farthest t00 by 1",
    ]
    text = out_of(capsys, "diff", *two, "--all", code=1).out.splitlines()
    assert text[30].startswith("t29")
    assert text[31] == "equal tensors: 0, differences: 30"


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_ls_and_verify_show_sizes_of_other_formats(trained, tmp_path, capsys, to):
    target = tmp_path / "other"
    out_of(capsys, "convert", trained, target, "--to", to)
    (entry,) = json.loads(out_of(capsys, "ls", target, "--json").out)["checkpoints"]
    files = [*target.glob("*.distcp"), *target.glob("*.safetensors")]
    assert entry["num_bytes"] == sum(file.stat().st_size for file in files)
    assert entry["num_files"] == len(files) == 1
    assert entry["num_tensors"] == (3 if to == "safetensors" else 3 + 9)
    assert entry["step"] is None
    text = out_of(capsys, "verify", target).out
    assert f"whole checkpoints: 1, {format_bytes(entry['num_bytes'])}; looked at only" in text
    for file in files:
        file.unlink()
    assert out_of(capsys, "ls", target, code=1)


def test_convert_takes_the_models_config_along_or_asks_for_it(trained, tmp_path, capsys):
    told = out_of(capsys, "convert", trained, tmp_path / "bare", "--to", "safetensors").err
    assert "these are weights alone; from_pretrained wants the model's config.json too" in told
    source = tmp_path / "source"
    source.mkdir()
    args = ("convert", trained, tmp_path / "hub", "--to", "safetensors", "--config", source)
    assert "source has none" in out_of(capsys, *args, code=1).err
    assert not (tmp_path / "hub").exists()
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("mine")
    assert not out_of(capsys, *args).err
    files = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {file.name for file in (tmp_path / "hub").iterdir()} == files
    again = tmp_path / "again"
    assert not out_of(capsys, "convert", tmp_path / "hub", again, "--to", "safetensors").err
    assert {file.name for file in again.iterdir()} == files
    assert (again / "config.json").read_text() == '{"model_type": "llama"}'
