"""The command line end to end on a small model: plan, run, resume, export, simulate, and mistakes."""

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from llmpq import Plan, Stage
from llmpq.cli import main
from llmpq.data import read_prompts, tokenise
from llmpq.evaluation import kl_divergence
from llmpq.integrations import EXPORTS
from llmpq.profiler import SENSITIVITIES
from llmpq.profiler.planner_inputs import calibration_batches
from llmpq.runtime.loader import load
from shared.comms import Group

from .runtime.tiny_models import add_tokenizer, make


def run_here(*args, expect=0):
    """What the command line prints when it runs in this process, with its exit status checked."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            status = main([*map(str, args)])
        except SystemExit as ended:
            status = ended.code
    assert not Group.exists(), "a command leaves the world that it joined"
    assert status == expect, out.getvalue() + errors.getvalue()
    return out.getvalue() if status == 0 else errors.getvalue()


def llmpq_cli(*args, num_ranks=1, cwd=None, expect=0):
    """What the command line prints under torchrun, with its exit status checked."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", str(num_ranks), "-m", "llmpq", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=110,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, prompts, and a cluster of two devices of one kind."""
    home = tmp_path_factory.mktemp("cli")
    add_tokenizer(make("llama", home / "model"))
    lines = ["the rain falls on it", "a green hill", {"token_ids": [3, 4, 5], "id": "ids"}]
    (home / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (home / "cluster.yaml").write_text(
        "hosts: [{name: here, devices: [{like: CPU, name: mine, memory_bytes: 1e8}, "
        "{like: CPU, name: mine, memory_bytes: 1e8}]}]\n"
    )
    return home


PLANNING = ("--bits", 4, 16, "--group-size", 16, "--batch", 2, "--new-tokens", 3)


@pytest.fixture(scope="module")
def planned(home):
    """What `plan` printed; plan.json lies in the same folder."""
    return run_here(
        "plan", home / "model", "--cluster", home / "cluster.yaml",
        "--prompts", home / "prompts.jsonl", "--out", home / "plan.json",
        "--profiles", home / "profiles", "--max-kl", 10, *PLANNING,
    )  # fmt: skip


def test_help_does_not_import_torch():
    heavy = {"torch", "numba", "scipy", "numpy", "transformers"}
    script = f"import sys, llmpq.cli; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_plan_is_explained(home, planned):
    for part in ("bottleneck:", "nats a token of 10 allowed", "tokens/s", "what would help most"):
        assert part in planned
    plan = Plan.load(home / "plan.json")
    assert plan.folder == str(home / "model")
    assert plan.num_layers == 5


def test_a_plans_loss_is_measured_on_the_model(home, planned):
    from transformers import AutoModelForCausalLM

    shutil.copytree(home / "profiles", home / "four")
    told = run_here(
        "plan", home / "model", "--cluster", home / "cluster.yaml",
        "--prompts", home / "prompts.jsonl", "--out", home / "four.json",
        "--profiles", home / "four", "--max-kl", 10, *PLANNING[:2], *PLANNING[3:],
    )  # fmt: skip
    (line,) = [line for line in told.splitlines() if line.startswith("measured loss: ")]
    rounded = load(home / "model", Plan.load(home / "four.json"))
    whole = AutoModelForCausalLM.from_pretrained(home / "model", dtype="float32")
    texts = tokenise(home / "model", read_prompts(home / "prompts.jsonl"))
    loss = kl_divergence(rounded, whole, calibration_batches(texts, between=True))
    assert loss > 0
    assert line == f"measured loss: {loss:.4g} nats a token, on prompts of this file"


def test_what_was_measured_is_measured_once(home, planned):
    times = {path: path.stat().st_mtime_ns for path in (home / "profiles").iterdir()}
    assert len(times) == 2, "devices and sensitivity"
    record = json.loads(
        run_here(
            "plan",
            home / "model",
            "--cluster",
            home / "cluster.yaml",
            "--json",
            "--prompts",
            home / "prompts.jsonl",
            "--out",
            home / "again.json",
            "--profiles",
            home / "profiles",
            "--baseline",
            "even",
            *PLANNING,
        )
    )
    assert record["tokens_per_s"] > 0
    assert {path: path.stat().st_mtime_ns for path in (home / "profiles").iterdir()} == times
    halves = [stage.layers for stage in Plan.load(home / "again.json").stages]
    assert halves == [(0, 2), (2, 5)]


def test_a_plan_is_simulated(home, planned):
    record = json.loads(run_here("simulate", home / "plan.json", "--json", "--new-tokens", 9))
    shorter = json.loads(run_here("simulate", home / "plan.json", "--json"))
    assert record["seconds"] > shorter["seconds"] > 0
    assert "busy" in run_here("simulate", home / "plan.json")


def test_a_plan_is_exported_beside_it(home, planned):
    run_here("export", home / "plan.json", "--to", "device-map")
    tree = json.loads((home / "plan-device-map.json").read_text())
    assert tree["model.layers.0"] == tree["model.embed_tokens"]


def test_sensitivity_is_printed_by_layer(home):
    text = run_here(
        "sensitivity", home / "model", "--prompts", home / "prompts.jsonl", "--bits", 3, 4,
        "--group-size", 16, "--profiles", home / "other",
    )  # fmt: skip
    header, *rows = text.splitlines()
    assert header.split() == ["layer", "3", "bits", "4", "bits"]
    assert [row.split()[0] for row in rows] == [*"01234", "all"]
    nats = np.array([[float(value) for value in row.split()[1:]] for row in rows])
    assert nats[-1] == pytest.approx(nats[:-1].sum(axis=0), rel=0.01)


def test_kinds_profiled_elsewhere_are_planned_in_one_process_for_one_prompt(home, tmp_path):
    given = ("--bits", 4, 16, "--group-size", 16, "--profiles", tmp_path / "profiles")
    for kind in ("new", "old"):
        text = run_here(
            "profile", home / "model", "--kind", kind, "--batch", 1, "--prompt-tokens", 8,
            "--new-tokens", 3, *given,
        )  # fmt: skip
        assert text.startswith(f"{kind}: ")
        assert " 4 bits: a layer takes " in text
    (tmp_path / "cluster.yaml").write_text(
        "hosts: [{name: x, devices: [{like: CPU, name: new, memory_bytes: 1e8}]}, "
        "{name: y, devices: [{like: CPU, name: old, memory_bytes: 1e8}]}]\n"
    )
    (tmp_path / "one.jsonl").write_text('"the rain falls"\n')
    text = run_here(
        "plan", home / "model", "--cluster", tmp_path / "cluster.yaml",
        "--prompts", tmp_path / "one.jsonl", "--out", tmp_path / "plan.json", "--new-tokens", 3,
        *given,
    )  # fmt: skip
    assert "tokens/s" in text
    assert Plan.load(tmp_path / "plan.json").decode_size == 1


@pytest.mark.slow
def test_ranks_measure_plan_run_and_resume(home, tmp_path):
    common = (
        home / "model", "--cluster", home / "cluster.yaml", "--prompts", home / "prompts.jsonl",
    )  # fmt: skip
    text = llmpq_cli("plan", *common, *PLANNING, num_ranks=2, cwd=tmp_path)
    assert text.count("tokens/s") == 1, "rank 0 alone prints"
    stages = (Stage(rank=1, layers=(0, 2)), Stage(rank=0, layers=(2, 5)))
    plan = Plan(
        stages=stages, bits=(4,) * 5, group_size=16, prefill_size=1, decode_size=1,
        folder=str(home / "model"),
    )  # fmt: skip
    plan.save(tmp_path / "two.json")
    for prompts, answered in (("prompts.jsonl", "3 of 3"), ("prompts.jsonl", "0 of 3")):
        text = llmpq_cli(
            "run", "two.json", "--prompts", home / prompts, "--out", "answers.jsonl",
            "--new-tokens", 3, num_ranks=2, cwd=tmp_path,
        )  # fmt: skip
        assert f"answered {answered} prompts" in text
    run_here(
        "run", tmp_path / "two.json", "--prompts", home / "prompts.jsonl",
        "--out", tmp_path / "other.jsonl", expect=1,
    )  # fmt: skip


def test_nothing_is_loaded_where_all_is_answered(home, tmp_path, monkeypatch):
    plan = Plan(
        stages=(Stage(rank=0, layers=(0, 5)),), bits=(16,) * 5, prefill_size=1, decode_size=1,
        folder=str(home / "model"),
    )  # fmt: skip
    plan.save(tmp_path / "one.json")
    run = (
        "run", tmp_path / "one.json", "--prompts", home / "prompts.jsonl", "--out",
        tmp_path / "answers.jsonl", "--new-tokens",
    )  # fmt: skip
    assert "answered 3 of 3 prompts" in run_here(*run, 2)
    told = (tmp_path / "answers.jsonl").read_text()
    monkeypatch.setattr("llmpq.runtime.pipeline.load_stage", None)
    assert "answered 0 of 3 prompts: all are in" in run_here(*run, 2)
    assert "made under others" in run_here(*run, 3, expect=1)
    assert (tmp_path / "answers.jsonl").read_text() == told


def test_what_was_answered_is_resumed_and_a_full_disk_is_named(home, tmp_path, small_disk, capsys):
    plan = Plan(
        stages=(Stage(rank=0, layers=(0, 5)),), bits=(16,) * 5, prefill_size=1, decode_size=1,
        folder=str(home / "model"),
    )  # fmt: skip
    plan.save(tmp_path / "one.json")
    run = ["run", tmp_path / "one.json", "--prompts", home / "prompts.jsonl", "--new-tokens", 2]
    run = [*map(str, run), "--out"]
    out = tmp_path / "answers.jsonl"
    assert main([*run, str(out)]) == 0
    assert "resumed" not in capsys.readouterr().err
    first, *_ = out.read_text().splitlines(keepends=True)
    out.write_text(first)
    assert main([*run, str(out)]) == 0
    told = capsys.readouterr()
    assert f"llmpq: resumed from prompt 1 of {out}\n" in told.err
    assert f"answered 2 of 3 prompts: {out}, in " in told.out
    disk = small_disk(4096)
    (disk / "rest").write_bytes(bytes(4096))
    assert main([*run, str(disk / "answers.jsonl")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"llmpq: {disk}/answers.jsonl: expected room on the disk for what is written there, got 0 "
        "bytes free; free some, or write to another disk"
    )


PLANNED = ["plan", "MODEL", "--cluster", "CLUSTER", "--prompts", "PROMPTS"]
RUN = ["run", "PLAN", "--model", "MODEL", "--prompts", "PROMPTS", "--out"]
SERVED = ["export", "PLAN", "--model", "MODEL", "--to"]
MISTAKES = {
    "nowhere: expected a model's folder with config.json, there is nothing; ":
        ["plan", "nowhere", *PLANNED[2:]],
    "nowhere.yaml: expected a cluster as YAML, there is nothing": [*PLANNED[:3], "nowhere.yaml", *PLANNED[4:]],
    "nowhere.jsonl: expected prompts as JSON Lines, there is nothing": [*PLANNED[:5], "nowhere.jsonl"],
    "--profiles file.txt: expected a folder, got a file": [*PLANNED, "--profiles", "file.txt"],
    "--out HOME: expected a file, got a folder": [*PLANNED, "--out", "HOME"],
    "--out file.txt/plan.json: expected a file that can be written, got": [*PLANNED, "--out", "file.txt/plan.json"],
    "model/plan.safetensors: expected a place outside the model's folder":
        [*PLANNED, "--method", "gptq", "--out", "MODEL/plan.json"],
    "embedding and head take": [*PLANNED, "--cluster", "SMALL"],
    "expected a plan, got a folder; name a file": ["run", "MODEL", *RUN[4:], "a.jsonl"],
    "--out HOME: expected a file that answers can be written to, got a folder": [*RUN, "HOME"],
    "--out file.txt/a.jsonl: expected a file that answers can be written to": [*RUN, "file.txt/a.jsonl"],
    "expected the plan to name": ["export", "PLAN", "--to", "vllm"],
    "--out HOME/model: expected a file, got a folder": [*SERVED, "device-map", "--out", "MODEL"],
    "group size: vLLM's kernels for A100, T4 and L4 expect groups of 32, 64": [*SERVED, "vllm"],
}  # fmt: skip
WRONG_VALUES = {
    "--max-kl: expected a number of 0 or more, got -1": [*PLANNED, "--max-kl", "-1"],
    "--max-kl: expected a number of 0 or more, got nan": [*PLANNED, "--max-kl", "nan"],
    "--group-size: expected at least 1 column, or -1": [*PLANNED, "--group-size", "0"],
    "--batch: expected at least 1, got 0": [*PLANNED, "--batch", "0"],
    "--new-tokens: expected at least 1, got 0": [*PLANNED, "--new-tokens", "0"],
    "--batch: expected at least 1, got -1": [*RUN, "a.jsonl", "--batch", "-1"],
    "--new-tokens: expected at least 1, got -2": [*RUN, "a.jsonl", "--new-tokens", "-2"],
    "--temperature: expected a number of 0 or more, got -1.0; give 0 for the most probable": [*RUN, "a.jsonl", "--temperature", "-1"],
    "--temperature: expected a number of 0 or more, got nan": [*RUN, "a.jsonl", "--temperature", "nan"],
    "--top-p: expected a number from 0 to 1, got 2": [*RUN, "a.jsonl", "--top-p", "2"],
    "--top-p: expected a number above 0, got 0": [*RUN, "a.jsonl", "--top-p", "0"],
    "--rounds: expected at least 1, got 0": ["compare", *PLANNED[1:], "--rounds", "0"],
    "--prompts: expected at least 1, got 0": ["simulate", "PLAN", "--prompts", "0"],
    "--prompt-tokens: expected at least 1": ["profile", "MODEL", "--kind", "x", "--prompt-tokens", "0"],
    "--group-size: expected at least 1 column, or -1 ": ["sensitivity", "MODEL", "--prompts", "PROMPTS", "--group-size", "-2"],
}  # fmt: skip


def tell_mistake(home, arguments, expect):
    plan = Plan(
        stages=(Stage(rank=0, layers=(0, 5)),), bits=(8,) * 5, prefill_size=1, decode_size=1,
        group_size=16,
    )  # fmt: skip
    plan.save("plan.json")
    Path("file.txt").write_text("mine")
    Path("small.yaml").write_text(
        "hosts: [{name: here, devices: [{like: CPU, name: mine, memory_bytes: 2e4}]}]\n"
    )
    names = {
        "MODEL": home / "model", "CLUSTER": home / "cluster.yaml", "PLAN": "plan.json",
        "PROMPTS": home / "prompts.jsonl", "MODEL/plan.json": home / "model" / "plan.json",
        "HOME": home, "SMALL": "small.yaml",
    }  # fmt: skip
    text = run_here(*[names.get(word, word) for word in arguments], expect=expect)
    assert "Traceback" not in text
    assert Path("file.txt").read_text() == "mine"
    return text.replace(str(home), "HOME")


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_told_before_anything_is_measured(home, tmp_path, monkeypatch, message):
    monkeypatch.chdir(tmp_path)
    for measured in ("planner_inputs.profile_cluster", "planner_inputs.find_sensitivity"):
        monkeypatch.setattr(f"llmpq.profiler.{measured}", None)
    monkeypatch.setattr("llmpq.runtime.pipeline.load_stage", None)
    assert message in tell_mistake(home, MISTAKES[message], expect=1)


@pytest.mark.parametrize("message", WRONG_VALUES)
def test_a_value_outside_its_range_is_wrong_usage(home, tmp_path, monkeypatch, message):
    monkeypatch.chdir(tmp_path)
    assert message in tell_mistake(home, WRONG_VALUES[message], expect=2)


@pytest.mark.slow
def test_a_missing_cluster_is_told_once_and_ends_all_ranks(home, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [
            *(*torchrun, "--nproc-per-node", "2", "-m", "llmpq", "plan", str(home / "model")),
            *("--cluster", "nowhere.yaml", "--prompts", str(home / "prompts.jsonl")),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=110,
    )
    assert done.returncode == 1
    told = "llmpq: nowhere.yaml: expected a cluster as YAML, there is nothing; check the path"
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("llmpq: ")] == [told]


@pytest.mark.parametrize("wrong", [("--dtype", "float64"), ("--bits", "5"), ("--solver", "best")])
def test_wrong_usage_is_told_before_anything_is_read(wrong):
    given = ("nowhere", "--cluster", "nowhere", "--prompts", "nowhere")
    assert wrong[1] in run_here("plan", *given, *wrong, expect=2)


@pytest.mark.slow
def test_plans_are_compared_in_turns_and_drawn(home, planned):
    out = llmpq_cli(
        "compare", home / "model", "--cluster", home / "cluster.yaml",
        "--prompts", home / "prompts.jsonl", "--profiles", home / "profiles", "--rounds", 1,
        "--out", home / "compared", "--json", *PLANNING, num_ranks=2,
    )  # fmt: skip
    timings = json.loads(out)["timings"]
    assert [one["name"] for one in timings][:2] == ["plan", "even"]
    for one in timings:
        assert len(one["turns_s"]) == 1
        plan = Plan.load(home / "compared" / f"{one['name']}.json")
        assert [tuple(stage["layers"]) for stage in one["stages"]] == [
            stage.layers for stage in plan.stages
        ]
        assert plan.folder == str(home / "model")
    assert "<svg" in (home / "compared" / "stages.svg").read_text()
    # Where no plan is possible, every rank ends at once and says why.
    said = run_here(
        "compare", home / "model", "--cluster", home / "cluster.yaml",
        "--prompts", home / "prompts.jsonl", "--profiles", home / "profiles",
        "--bits", 4, "--group-size", 16, "--max-kl", 1e-9, expect=1,
    )  # fmt: skip
    assert "1e-09" in said


def test_a_plan_is_rounded_by_gptq_and_exported(home, planned):
    said = run_here(
        "plan", home / "model", "--cluster", home / "cluster.yaml", "--method", "gptq",
        "--prompts", home / "prompts.jsonl", "--out", home / "rounded.json", "--max-kl", 10,
        "--profiles", home / "profiles", *PLANNING, "--bits", 4,
    )  # fmt: skip
    assert "rounded.safetensors; GPTQ usually loses less than what is expected" in said
    plan = Plan.load(home / "rounded.json")
    assert (plan.method, plan.codes) == ("gptq", str(home / "rounded.safetensors"))
    assert "4" in run_here("export", home / "rounded.json", "--to", "llama.cpp")


def test_an_unknown_engine_is_wrong_usage():
    assert "compressed-tensors" in run_here("export", "plan.json", "--to", "onnx", expect=2)


@pytest.mark.parametrize(
    ("registry", "command"), [(EXPORTS, "export"), (SENSITIVITIES, "sensitivity")]
)
def test_what_is_registered_from_outside_is_in_the_help(registry, command):
    registry.add("mine", "json:dumps", "one of my own")
    try:
        assert "mine" in run_here(command, "--help")
    finally:
        registry.remove("mine")
