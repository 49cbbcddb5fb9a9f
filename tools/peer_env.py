"""Makes the environment of one benchmark peer that cannot share ours.

`python tools/peer_env.py NAME` installs the pins of bench/peers/NAME.txt into a virtual environment
at bench/.peers/NAME, where the benchmarks look for it (`bench/peer.py`). A line
`# python: 3.9` in that file asks for another interpreter, which must be on PATH. Without a name the
peers are listed, with what is installed.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["main"]


def interpreter(pins: str) -> str | None:
    """Returns the Python that a pin file asks for; None when it asks for one that is not here."""
    wanted = re.search(r"^# python: (\d+\.\d+)$", pins, re.MULTILINE)
    return shutil.which(f"python{wanted[1]}") if wanted else sys.executable


def fingerprint(pins: str) -> str:
    """Returns what an environment made from these pins is marked with."""
    return hashlib.sha256(pins.encode()).hexdigest()


def make(pin_file: Path, home: Path) -> None:
    """Makes or renews the environment, marked as complete at the very end.

    Raises:
        RuntimeError: when the interpreter is missing or an installation fails.
    """
    pins = pin_file.read_text(encoding="utf-8")
    mark = home / "complete"
    if mark.is_file() and mark.read_text(encoding="utf-8") == fingerprint(pins):
        return
    python = interpreter(pins)
    if python is None:
        raise RuntimeError(f"{pin_file}: the Python it asks for is not on PATH; install it first")
    if home.exists():
        shutil.rmtree(home)
    for command in (
        [python, "-m", "venv", home],
        [home / "bin" / "python", "-m", "pip", "install", "--quiet", "-r", pin_file],
    ):
        if subprocess.run(command, check=False).returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))} failed; its words stand above")
    mark.write_text(fingerprint(pins), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Makes one environment, or lists all, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("peer", nargs="?", help="name of a file in bench/peers, without .txt")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    arguments = parser.parse_args(argv)
    bench = arguments.root.resolve() / "bench"
    known = sorted(path.stem for path in bench.glob("peers/*.txt"))
    if arguments.peer is None:
        for name in known:
            is_made = (bench / ".peers" / name / "complete").is_file()
            print(f"{name}: {'installed' if is_made else 'not installed'}")
        print(f"{len(known)} peers")
        return 0
    if arguments.peer not in known:
        print(
            f"peer_env: expected one of {known}, got {arguments.peer!r}; pin it in "
            f"bench/peers/{arguments.peer}.txt",
            file=sys.stderr,
        )
        return 2
    try:
        make(bench / "peers" / f"{arguments.peer}.txt", bench / ".peers" / arguments.peer)
    except RuntimeError as error:
        print(f"peer_env: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.peer}: installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
