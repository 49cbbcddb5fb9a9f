"""Entry point of a rank or spare, forked from a template: runs the user's script as `__main__`."""

from __future__ import annotations

import atexit
import os
import runpy
import socket
import sys
import traceback

from shared.errors import MeshyardError
from shared.training import show_resumed
from swift.membership.channel import ControlChannel

__all__ = ["main"]


def main(args: list[str]) -> None:
    """Runs the script and ends the process.

    Args:
        args: descriptor of the control socket, rank (-1 of a spare), number of ranks, seconds of
            the heartbeat limit, then the script and its arguments.
    """
    fd, rank, world_size, heartbeat_s, *script = args
    os.set_inheritable(int(fd), False)
    control = socket.socket(fileno=int(fd))
    _, (output,), _, _ = socket.recv_fds(control, 1, 1)
    os.dup2(output, 1)
    os.close(output)

    import torch

    from swift.membership.member import Membership

    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    member = Membership(
        ControlChannel(control),
        rank=None if rank == "-1" else int(rank),
        world_size=int(world_size),
        heartbeat_s=float(heartbeat_s),
    )
    member.serve()
    sys.argv = script
    sys.path.insert(0, os.path.dirname(os.path.abspath(script[0])))
    try:
        with show_resumed("meshyard-swift"):
            runpy.run_path(script[0], run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            member.report_failed(f"{error.code}\n")
    except BaseException as error:  # noqa: BLE001 - the process ends with it
        member.report_failed(_describe(error, script[0]))
        status = 1
    # Exit handlers, but not the interpreter's teardown: torch's takes half a second.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _describe(error: BaseException, script: str) -> str:
    """A sentence for what its user can mend; else the traceback from the script on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    if isinstance(error, MeshyardError) and frames is not None:
        return f"{script}, line {frames.tb_lineno}: {error}\n"
    return "".join(traceback.format_exception(error.with_traceback(frames)))
