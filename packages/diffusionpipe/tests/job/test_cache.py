import copy

import pytest
import torch
from diffusers import DDPMScheduler
from torch import nn

import diffusionpipe as dp
from diffusionpipe.data import build_unet, build_vae
from diffusionpipe.job import cached_function
from diffusionpipe.job.checks.rows import find_parameters
from shared.errors import ConfigError, DataError

ROWS = 6


class Counted:
    """A function that counts the rows it was called with."""

    def __init__(self, function):
        self.function, self.num_rows = function, 0

    def __call__(self, batch):
        self.num_rows += len(batch["ids"])
        return self.function(batch)


@pytest.fixture(scope="module")
def job():
    torch.manual_seed(0)
    unet = build_unet((4, 8), text_dim=8, sample_size=8, groups=4, layers_per_block=1)
    vae = build_vae((4, 4), 16, groups=4).requires_grad_(False)
    words = nn.Embedding(20, 8).requires_grad_(False)
    frozen = {
        "z": Counted(lambda batch: vae.encode(batch["pixels"]).latent_dist.parameters),
        "h": Counted(lambda batch: {"states": words(batch["ids"])}),
    }
    inputs, loss = dp.losses.epsilon(DDPMScheduler(), latents="z", text="h.states")
    return dp.Job(dp.chain(unet), frozen, inputs, loss)


def make_batch(seed=0, **entries):
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixels": torch.randn(ROWS, 3, 16, 16, generator=generator),
        "ids": torch.randint(0, 20, (ROWS, 3), generator=generator),
        "keys": [f"{seed}/{row}" for row in range(ROWS)],
    } | entries


def count(job):
    """Rows that each frozen function was called with, since the last call."""
    counts = []
    for name in ("z", "h"):
        function = cached_function.remove_caches(job.frozen)[name]
        counts.append(function.num_rows)
        function.num_rows = 0
    return counts


def test_losses_are_the_same_to_the_bit_and_a_second_epoch_encodes_nothing(job, tmp_path):
    batches = [make_batch(0), make_batch(1)]
    expected = [job.compute_loss(batches[step % 2], seed=3, step=step) for step in range(4)]
    cached = dp.cache(job, batches[0], tmp_path)
    losses = []
    for epoch, encoded in enumerate([2 * ROWS, 0]):
        count(cached)
        for index, batch in enumerate(batches):
            losses.append(cached.compute_loss(batch, seed=3, step=2 * epoch + index))
        assert count(cached) == [encoded, encoded]
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    # Noise, times and latents are drawn anew.
    assert len({float(loss.detach()) for loss in losses}) == 4
    # Profiles and plans of either are the other's too.
    assert cached.list_fingerprints() == job.list_fingerprints()


def test_values_come_back_to_the_bit_wherever_a_sample_stands(job, tmp_path):
    value = {
        "half": torch.randn(ROWS, 3).bfloat16(),
        "parts": (torch.randn(ROWS, 2, 2).transpose(1, 2), torch.arange(ROWS)),
    }
    calls = []

    def look_up(batch):
        calls.append(batch["row"].tolist())
        return {
            "half": value["half"][batch["row"]],
            "parts": tuple(p[batch["row"]] for p in value["parts"]),
        }

    frozen = {**job.frozen, "look/up": look_up}
    own = dp.Job(job.backbone, frozen, job.inputs, job.loss)
    batch = make_batch(row=torch.arange(ROWS), names=tuple("abcdef"))
    cached = dp.cache(own, batch, tmp_path, names=["look/up"]).frozen["look/up"]
    calls.clear()
    cached({"row": torch.tensor([4, 1]), "keys": ["0/4", "0/1"]})
    order = torch.tensor([1, 5, 4, 0])
    got = cached({"row": order, "keys": [f"0/{row}" for row in order]})
    assert calls == [[4, 1], [5, 0]]
    assert got["half"].dtype == torch.bfloat16
    assert torch.equal(got["half"], value["half"][order])
    assert all(torch.equal(a, b[order]) for a, b in zip(got["parts"], value["parts"], strict=True))
    assert list(tmp_path.rglob("*.partial")) == []


def test_other_weights_and_other_functions_are_refused(job, tmp_path):
    batch = make_batch()
    dp.cache(job, batch, tmp_path).compute_loss(batch, seed=0, step=0)
    dp.cache(job, batch, tmp_path)
    changed = copy.deepcopy(job.frozen["h"].function.__closure__[0].cell_contents)
    changed.weight.data[3] += 1
    other = Counted(lambda b: {"states": changed(b["ids"])})
    with pytest.raises(
        ConfigError, match=r"with these weights, got another one's \(h\); do delete"
    ):
        dp.cache(replace_frozen(job, h=other), batch, tmp_path)
    # The same weights, put to another use.
    other = Counted(lambda b: 2 * job.frozen["z"].function(b))
    with pytest.raises(
        ConfigError, match=r"expected for '0/0' what frozen\['z'\] returns, got other"
    ):
        dp.cache(replace_frozen(job, z=other), batch, tmp_path)
    with pytest.raises(ConfigError, match=r"got another one's \(h\)"):
        dp.cache(job, batch, tmp_path, names=["z"])
    # A key that now names another sample.
    with pytest.raises(ConfigError, match="the function or the sample has changed"):
        dp.cache(job, make_batch(1, keys=batch["keys"]), tmp_path)


def replace_frozen(job, **functions):
    return dp.Job(job.backbone, {**job.frozen, **functions}, job.inputs, job.loss)


def test_functions_of_draws_are_refused_by_name_and_run_beside_cached_ones(job, tmp_path):
    drawn = []

    def reference(batch, frozen, draw):
        drawn.append(len(frozen["z"]))
        return draw.normal((2,))

    own = replace_frozen(job, reference=reference)
    with pytest.raises(ConfigError, match=r"frozen\['reference'\]: .* names=\['z', 'h'\]"):
        dp.cache(own, make_batch(), tmp_path)
    with pytest.raises(
        ConfigError, match="names: expected frozen functions among z, h, reference, got 'y'"
    ):
        dp.cache(own, make_batch(), tmp_path, names=["y"])
    cached = dp.cache(own, make_batch(), tmp_path, names=["z", "h"])
    for _ in range(2):
        drawn.clear()
        count(cached)
        cached.compute_loss(make_batch(), seed=0, step=0)
        assert drawn == [ROWS]
    assert count(cached) == [0, 0]


def test_batches_without_keys_are_refused(job, tmp_path):
    match = r"batch\['keys'\]: expected a list of texts"
    cached = dp.cache(job, make_batch(), tmp_path)
    for keys in (None, "abcdef", list(range(ROWS)), torch.arange(ROWS)):
        with pytest.raises(DataError, match=match):
            dp.cache(job, make_batch(keys=keys), tmp_path)
        with pytest.raises(DataError, match=match):
            cached.frozen["z"](make_batch(keys=keys))
    with pytest.raises(DataError, match="expected as many rows in every entry"):
        cached.compute_loss(make_batch(keys=["a"]), seed=0, step=0)


def test_what_a_cache_hides_is_still_checked(job, tmp_path):
    """Checks run the functions, not the files."""
    batch = make_batch()
    cached = dp.cache(job, batch, tmp_path)
    cached.compute_loss(batch, seed=0, step=0)
    count(cached)
    cached.check(batch)
    # For parameters, and by rows: all, again, apart.
    assert min(count(cached)) >= 4 * ROWS
    # By these an engine knows which rank needs which frozen weights.
    draw = dp.Draw(0, 0, range(ROWS))
    seen, expected = (find_parameters(each.frozen, batch, draw) for each in (cached, job))
    assert {k: list(map(id, own)) for k, own in seen.items()} == {
        k: list(map(id, own)) for k, own in expected.items()
    }
    assert all(expected.values())
    words = job.frozen["h"].function.__closure__[0].cell_contents
    mixing = Counted(lambda b: {"states": words(b["ids"]) - words(b["ids"]).mean(0)})
    with pytest.raises(ConfigError, match="expected row i to need row i only"):
        dp.cache(replace_frozen(job, h=mixing), batch, tmp_path / "other")


def test_a_write_that_ends_early_leaves_nothing_to_read(job, tmp_path, monkeypatch):
    batch = make_batch()
    cached = dp.cache(job, batch, tmp_path)
    write, written = cached_function.write_atomically, []

    def fail(path, data):
        if len(written) == 2:
            (path.parent / f".{path.name}.0.partial").write_bytes(data[:50])
            raise OSError("no room")
        written.append(path)
        write(path, data)

    monkeypatch.setattr(cached_function, "write_atomically", fail)
    with pytest.raises(OSError, match="no room"):
        cached.frozen["z"](batch)
    monkeypatch.undo()
    count(cached)
    values = cached.frozen["z"](batch)
    assert count(cached) == [ROWS - 2, 0]
    torch.testing.assert_close(values, job.frozen["z"](batch))


def test_damaged_files_and_other_shapes_are_named(job, tmp_path):
    batch = make_batch()
    cached = dp.cache(job, batch, tmp_path)
    large = make_batch(pixels=torch.randn(ROWS, 3, 32, 32), keys=list("abcdef"))
    cached.frozen["z"](large)
    with pytest.raises(
        DataError, match=r"for 'a' of the types and shapes .* do cache samples of anoth"
    ):
        cached.frozen["z"](large)
    cached.frozen["h"](batch)
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        DataError, match=r"safetensors: expected outputs of .*'h'.* got a damaged file"
    ):
        cached.frozen["h"](batch)


def test_a_changed_function_shows_at_the_first_sample_that_comes_from_the_folder(job, tmp_path):
    """Also where the two samples that are checked at first were not cached."""
    dp.cache(job, make_batch(0), tmp_path).compute_loss(make_batch(0), seed=0, step=0)
    other = Counted(lambda b: 2 * job.frozen["z"].function(b))
    cached = dp.cache(replace_frozen(job, z=other), make_batch(1), tmp_path)
    cached.compute_loss(make_batch(1), seed=0, step=0)
    with pytest.raises(
        ConfigError, match=r"expected for '0/0' what frozen\['z'\] returns, got other"
    ):
        cached.compute_loss(make_batch(0), seed=0, step=0)


def test_changed_buffers_are_refused(job, tmp_path):
    norm = nn.BatchNorm1d(3).eval()
    own = replace_frozen(job, n=Counted(lambda b: norm(b["ids"].float())))
    dp.cache(own, make_batch(0), tmp_path)
    dp.cache(own, make_batch(1), tmp_path)
    norm.get_buffer("running_var").mul_(2)
    with pytest.raises(ConfigError, match=r"got another one's \(n\)"):
        dp.cache(own, make_batch(1), tmp_path)
