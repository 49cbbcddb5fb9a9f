"""A save stands the loss of power at any time, and needs every sync that it does."""

import functools
import re
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.storage import local
from bytecheckpoint.storage.files import commit
from bytecheckpoint.storage.files.manifest import MANIFEST_NAME
from bytecheckpoint.storage.local import LocalStorage
from shared.errors import DataError

from . import power
from .toy import save, version_of

ROOT = "jobs/run7"


def check(remains, facts, version_in=version_of, is_newest_kept=False):
    """What is visible is whole, and at least as new as the last commit that was reported.

    Where only the newest is kept, another thread may remove the one before between a commit and its
    report here.
    """
    storage = LocalStorage(remains / ROOT)
    visible = {}
    for name in storage.list(""):
        if MANIFEST_NAME in storage.list(name):
            step = int(name.removeprefix("step_"))
            try:
                visible[step] = version_in(storage, step)
            except (DataError, OSError) as error:
                return f"step {step} is visible, but: {error}"
    if facts:
        step, version = facts[-1]
        newer = [later for later in visible if later > step] if is_newest_kept else []
        if not newer and visible.get(step, -1) < version:
            return f"version {version} of step {step} was committed; left are {visible}"
    return None


def life(record, root):
    """Saves, saves over, removes."""
    storage = LocalStorage(root)
    for step, version in ((1, 0), (2, 0), (2, 1)):
        save(storage, step, version, overwrite=version > 0)
        record.report((step, version))
    commit.remove_checkpoint(storage, commit.format_step(1))


def died_replacing(record, root):
    """Killed between the manifest's new name and its sync; the next process tidies up."""
    storage = LocalStorage(root)
    save(storage, 1, 0)
    record.report((1, 0))
    seen = []

    def after_replacing(call, path):
        seen.append(call)
        return "replace" in seen[:-1]

    with record.killed(after_replacing):
        save(storage, 1, 1, overwrite=True)
    storage = LocalStorage(root)
    left = commit.find_garbage(storage)
    assert len(left) == 1
    commit.remove_garbage(storage, left)


def died_removing(record, root):
    """Killed between the removal of the manifest and its sync; the next process tidies up."""
    storage = LocalStorage(root)
    save(storage, 1, 0)
    save(storage, 2, 0)
    record.report((2, 0))
    seen = []

    def after_unlinking(call, path):
        seen.append(call)
        return "unlink" in seen[:-1]

    with record.killed(after_unlinking):
        commit.remove_checkpoint(storage, commit.format_step(1))
    storage = LocalStorage(root)
    assert commit.find_garbage(storage) == [commit.format_step(1)]
    commit.remove_garbage(storage, commit.find_garbage(storage))


def died_early(record, root):
    """Killed when all folders are made but none is synced; the next process saves again."""
    storage = LocalStorage(root)
    with record.killed(lambda call, path: call == "fsync"):
        save(storage, 1, 0)
    save(LocalStorage(root), 1, 0)
    record.report((1, 0))


def trained(record, root, saves=((1, 1), (2, 2), (2, 3)), keep=1):
    """Training saves with everything there is: threads, checksums, retention, a step replaced."""
    with bcp.Checkpointer(root, keep=keep, overwrite=True) as checkpointer:
        for step, version in saves:
            values = torch.full((3_000,), float(version))
            handle = checkpointer.save(step, {"values": values, "version": version})
            handle.committed.result()
            record.report((step, version))
            checkpointer.close()  # the removal of older steps is part of the record too


def loaded_version(storage, step):
    """The version of a real checkpoint, every byte of it read."""
    state = {"values": torch.zeros(3_000), "version": 0}
    bcp.load(f"{storage.url}/{commit.format_step(step)}", state)
    if set(state["values"].tolist()) != {state["version"]}:
        raise DataError(f"version {state['version']} with the values of another")
    return state["version"]


LIVES = (life, died_replacing, died_removing, died_early)


def log_of(lived, folder):
    disk = folder / f"{lived.__name__}"
    disk.mkdir()
    with power.recording(disk) as record:
        lived(record, disk / ROOT)
    return record.log


@pytest.mark.parametrize("lived", LIVES)
def test_no_loss_of_power_does_harm(lived, tmp_path):
    assert power.violation(log_of(lived, tmp_path), check) is None


def test_every_sync_is_needed(tmp_path):
    logs = [log_of(lived, tmp_path) for lived in LIVES]
    found = {}
    for site in sorted(set().union(*map(power.sites, logs))):
        for log in logs:
            if site in power.sites(log) and not found.get(site):
                found[site] = power.violation(power.without(log, site), check)
    assert not [site for site, wrong in found.items() if not wrong]

    # And there is no sync in the source that these lives did not come by.
    source = Path(local.__file__).read_text().splitlines()
    syncs = {
        at for at, line in enumerate(source, 1) if re.match(r" .*\b(fsync|_sync_folder)\(", line)
    }
    seen = {int(at) for site in found for at in re.findall(r"local\.\w+:(\d+)", site)}
    assert len(syncs) == 7
    assert syncs <= seen


check_trained = functools.partial(check, version_in=loaded_version, is_newest_kept=True)


def trained_shortly(record, root):
    """Two steps, of which the second makes the first superfluous."""
    trained(record, root, saves=((1, 1), (2, 2)))


def test_training_stands_it(tmp_path):
    assert power.violation(log_of(trained_shortly, tmp_path), check_trained) is None


def went_back(record, root):
    """Steps 1 and 3, back to step 1, and on from there: step 3 is abandoned."""
    trained(record, root, saves=((1, 1), (3, 3)), keep=None)
    with bcp.Checkpointer(root, overwrite=True) as checkpointer:
        checkpointer.load(1, {"values": torch.zeros(3_000), "version": 0})
        record.report((1, 1))
        values = torch.full((3_000,), 2.0)
        checkpointer.save(2, {"values": values, "version": 2}).committed.result()
        record.report((2, 2))


def check_history(remains, facts):
    """Of the abandoned step nothing is left when there is a new one."""
    there = commit.list_steps(LocalStorage(remains / ROOT))
    if 2 in there and there != [1, 2]:
        return f"expected steps 1 and 2, got {there}"
    return check_trained(remains, facts)


@pytest.mark.slow
def test_no_loss_of_power_brings_abandoned_steps_back(tmp_path):
    assert power.violation(log_of(went_back, tmp_path), check_history) is None


@pytest.mark.slow
def test_training_stands_it_and_needs_every_sync(tmp_path):
    log = log_of(trained, tmp_path)
    assert power.violation(log, check_trained) is None
    sites = power.sites(log)
    # Data, index and extra, their folder, the step's and the root's, the manifest twice.
    assert len(sites) >= 7
    useless = [s for s in sites if not power.violation(power.without(log, s), check_trained)]
    assert useless == []
