"""Entry point of one rank of a RankPool: `python -m shared.comms.launch.rank`, or a template's fork.

Before it imports torch it ties its life to the parent's: the kernel kills it when the parent's
thread ends, and a listening thread exits it when the control socket is closed. Then it joins the
process group and runs the functions that the parent sends, one after another.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from shared.comms.launch.shipping import found
from shared.errors import describe_mistake
from shared.training.log_lines import show_log_lines

__all__ = ["die_with_parent", "main"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, is_main_thread: bool) -> None:
    """Has the kernel kill this process when its parent, or the parent's main thread, ends.

    Args:
        parent_pid: process id of the parent; if the parent has ended already, this process exits.
        is_main_thread: whether the parent's main thread started this process.
    """
    # The signal is sent when the starting *thread* ends: only the main thread surely lives as long
    # as the pool.
    if sys.platform == "linux" and is_main_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _listen(control: Connection, commands: queue.SimpleQueue) -> None:
    """Queue commands; handle a peer's death and the parent's end immediately."""
    while True:
        try:
            command = control.recv()
        except (EOFError, OSError):
            os._exit(1)
        courier = sys.modules.get("shared.comms.courier")
        if command[0] != "died":
            commands.put(command)
        elif courier is not None:
            courier.peer_died(command[1])


def _pickled(result: Any, qualname: str) -> bytes:
    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"{qualname} returned a {type(result).__name__} that cannot be pickled ({error}); "
            f"return tensors and plain data"
        ) from error


def _serve(control: Connection, commands: queue.SimpleQueue) -> None:
    import torch.distributed as dist

    while True:
        command, *rest = commands.get()
        if command == "stop":
            return
        name, file, qualname, args = rest
        function = found(name, file, qualname)
        # After `found`, as the arguments may be of classes that the function's file defines.
        arguments = pickle.loads(args)
        dist.barrier()
        start = time.perf_counter()
        result = function(*arguments)
        seconds = time.perf_counter() - start
        payload = _pickled(result, qualname)
        sys.stdout.flush()
        control.send(("done", seconds, payload))


def main(args: list[str]) -> None:
    """Runs a rank until it is told to stop or fails, then exits the process.

    Args:
        args: descriptor of the control socket, rank, number of ranks, number of threads, timeout of
            a message in seconds, folder of the pool, names of the loggers to show, with commas, and
            of the modules to import.
    """
    fd, rank, num_ranks, threads = (int(arg) for arg in args[:4])
    timeout_s, folder = float(args[4]), args[5]
    shown = show_log_lines(args[6].split(",") if args[6] else (), f"rank {rank}: ")
    os.set_inheritable(fd, False)
    control = Connection(fd)
    commands: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(control, commands), name="control", daemon=True).start()
    try:
        stack_file = open(os.path.join(folder, f"stack-{rank}"), "w")  # noqa: SIM115 - for life
    except FileNotFoundError:
        os._exit(1)  # the pool was left while this rank started
    faulthandler.register(signal.SIGUSR1, file=stack_file)
    try:
        shown.__enter__()  # for life
        # Imports make many objects that live on: looking for others among them takes a fifth of their time.
        gc.disable()
        import torch
        import torch.distributed as dist

        from shared.comms.init import join, leave

        for name in args[7].split(",") if args[7] else ():
            importlib.import_module(name)
        gc.freeze()
        gc.enable()
        torch.set_num_threads(threads)
        store = dist.FileStore(os.path.join(folder, "store"), num_ranks)
        limit = timedelta(seconds=timeout_s)
        join(rank, num_ranks, store, backend="gloo", timeout=limit)
        control.send(("ready",))
        _serve(control, commands)
        leave()
        # Run exit handlers, but skip the interpreter's teardown: torch's takes half a second.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - sent to the parent, which raises it
        # Leave out the frames of this file.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        control.send(("error", type(error).__name__, text, describe_mistake(error)))
        sys.stdout.flush()
        # Without a teardown: peers detect the failure by the closed connections.
        os._exit(1)


if __name__ == "__main__":
    _parent_pid, _is_main_thread, *_args = sys.argv[1:]
    die_with_parent(int(_parent_pid), bool(int(_is_main_thread)))
    main(_args)
