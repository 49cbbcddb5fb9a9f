"""SIGKILL at any moment of a save: the newest checkpoint stays whole, and of one moment.

A process that has imported everything (this file, run as a script) forks the ranks of each life, so
that a kill costs a tenth of a second. Every tensor is filled with the number of its save: a
checkpoint that mixed two saves would show it.
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

NUM_KILLS = 12
NUM_KILLS_SLOW = 200
WORLD_SIZE = 2

# Name: stage, whether one step is saved over and over, checkpoints kept, who is killed.
LIVES = {
    "all": ("arena", False, None, "all"),
    "one": ("arena", False, 2, "one"),
    "overwritten": ("arena", True, None, "all"),
    "overwritten, one": ("arena", True, None, "one"),
    "forked": ("fork", False, 2, "all"),
    "forked, overwritten": ("fork", True, None, "one"),
}


@contextmanager
def lives():
    """The process that forks ranks and kills them, as a function that lets it do so once."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        text=True,
    )

    def live(folder, life, seed):
        process.stdin.write(json.dumps([str(folder), life, seed]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, "the process that forks has died"
        return json.loads(answer)

    try:
        yield live
    finally:
        process.stdin.close()
        assert process.wait(20) == 0


def check(folder, num_kills):
    """Lives in turn; each starts on what the kill before has left. Returns the moments met."""
    waited = 0
    moments = set()
    with lives() as live:
        for seed in range(num_kills):
            life = list(LIVES)[seed % len(LIVES)]
            found = live(folder / life, life, seed)
            assert not found["wrong"], (life, seed, found)
            # What a rank was told is committed is there after the kill.
            assert found["newest"] >= found["told"], (life, seed, found)
            # A life that is killed only after a rank has told of a save, however slow the machine.
            if found["saves_awaited"]:
                assert found["told"] >= 0, (life, seed, found)
            waited += found["saves_awaited"]
            moments.add(found["moment"])
    assert waited > 0
    return moments


def test_the_newest_checkpoint_survives_kills(tmp_path):
    check(tmp_path, NUM_KILLS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_newest_checkpoint_survives_many_kills(tmp_path):
    # Else it was never the moments in between that were met.
    assert len(check(tmp_path, NUM_KILLS_SLOW)) > 1


@pytest.mark.slow
def test_what_kills_left_behind_is_collected(tmp_path):
    with lives() as live:
        for seed in range(3):
            found = live(tmp_path, "overwritten", seed)
    from bytecheckpoint.storage.files import commit
    from bytecheckpoint.storage.local import LocalStorage

    storage = LocalStorage(tmp_path)
    commit.remove_garbage(storage, commit.find_garbage(storage))
    assert commit.find_garbage(storage) == []
    assert commit.list_steps(storage) == [0]
    assert len(list(tmp_path.glob("step_*/data-*"))) == 1
    assert found["newest"] >= 0


# --- The rest runs in the process that forks, and in the ranks it forks. ---

NUM_ELEMENTS = 400_000  # 1.6 MB a tensor: a save is some milliseconds of writing


def fill(number, rank):
    """Tensors that both ranks have, that one has, and of which each has a part."""
    import torch

    import bytecheckpoint as bcp

    part = NUM_ELEMENTS // WORLD_SIZE
    state = {f"all{at}": torch.full((NUM_ELEMENTS // 8,), float(number)) for at in range(4)}
    state[f"own{rank}"] = torch.full((1000,), float(number))
    state["cut"] = bcp.FlatShard(torch.full((part,), float(number)), (NUM_ELEMENTS,), rank * part)
    return {"model": state, "number": number}


def rank_life(rank, folder, life, first, port, told):
    """Saves until it is killed, and tells the number of every save that it knows committed."""
    import torch
    import torch.distributed as dist

    import bytecheckpoint as bcp

    # torch makes a forked process's pool at its first use: not safe where two threads come first.
    torch.set_num_threads(1)
    stage, overwrite, keep, _ = LIVES[life]
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE
    )
    ckpt = bcp.Checkpointer(folder, stage=stage, overwrite=overwrite, keep=keep)
    ckpt.load_latest(fill(-1, rank))
    os.write(told, b"-1\n")
    number = first
    while True:
        handle = ckpt.save(0 if overwrite else number, fill(number, rank))
        handle.committed.result()
        os.write(told, f"{number}\n".encode())
        number += 1


def look(folder):
    """The number of the newest checkpoint, -1 if there is none, and what is wrong with any."""
    import torch

    import bytecheckpoint as bcp

    ckpt = bcp.Checkpointer(folder)
    newest, wrong = -1, ""
    for step in ckpt.steps():
        names = [*(f"all{at}" for at in range(4)), "own0", "own1", "cut"]
        with bcp.open(Path(folder) / f"step_{step:08d}") as checkpoint:
            number = checkpoint.extra["number"]
            state = {
                "model": {n: torch.zeros(checkpoint["model." + n].shape) for n in names},
                "number": -1,
            }
        try:
            ckpt.load(step, state)
        except Exception as error:  # noqa: BLE001 - the test prints it
            wrong = f"step {step}: {error!r}"
            continue
        mixed = [n for n in names if not bool((state["model"][n] == number).all())]
        if mixed or state["number"] != number:
            wrong = f"step {step} of save {number}: {mixed} are another's"
        newest = max(newest, number)
    return newest, wrong


def one_life(folder, life, seed):
    import torch.distributed as dist

    drawn = random.Random(seed)
    before, _ = look(folder)
    # Hosted here, as by torchrun's agent, so that the store outlives any rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reading, told = os.pipe()
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            try:
                os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
                rank_life(rank, folder, life, before + 1, store.port, told)
            finally:
                os._exit(1)
        pids.append(pid)
    # Both have begun, or have saved some times: then any moment may be the last.
    lines_each = drawn.choice([1, 2, 3])
    newest, _ = _told(reading, WORLD_SIZE * lines_each, 60.0)
    time.sleep(drawn.uniform(0, 0.08))
    if LIVES[life][3] == "one":
        os.kill(drawn.choice(pids), signal.SIGKILL)
        time.sleep(0.03)  # the other one goes on for a while
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(told)
    newest = max(newest, _told(reading, 10**6, 0.0)[0])
    os.close(reading)
    if LIVES[life][0] == "fork":
        time.sleep(0.1)  # orphans end by themselves, and may publish nothing
    found, wrong = look(folder)
    names = sorted(p.name for p in Path(folder).glob("step_*/*"))
    return {
        "told": newest,
        "newest": found,
        "saves_awaited": lines_each > 1,
        "wrong": wrong,
        "moment": len(names) - 2 * sum(name == "manifest.json" for name in names),
    }


def _told(reading, num_lines, timeout_s):
    """The largest number told so far, after so many lines."""
    deadline = time.monotonic() + timeout_s
    newest, seen = -1, 0
    while seen < num_lines:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        data = os.read(reading, 1 << 16)
        if not data:
            break
        lines = data.split()
        seen += len(lines)
        newest = max(newest, *map(int, lines))
    return newest, seen


def main():
    import torch

    import bytecheckpoint.checkpointer
    import bytecheckpoint.loading.checkpoint  # noqa: F401 - before the forks

    torch.set_num_threads(1)
    for line in sys.stdin:
        answer = one_life(*json.loads(line))
        print(json.dumps(answer), flush=True)  # noqa: T201 - to the test


if __name__ == "__main__":
    main()
