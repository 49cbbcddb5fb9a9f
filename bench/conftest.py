"""Fixtures of the benchmarks: time inside ranks, peers in environments of their own, claims.

The root conftest is not loaded here, so that nothing checks types while the clock runs.
"""

import importlib
import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A package's benchmarks lie in a folder of its name, which importlib mode would otherwise bind.
for _path in [ROOT / "shared/src/shared", *ROOT.glob("packages/*/src/*/")]:
    if find_spec(_path.name):
        importlib.import_module(_path.name)
sys.path.insert(0, str(Path(__file__).parent))

from history import without_pick
from peer import Peer, missing_peer
from rankclock import RankClock

_CLOCK = RankClock()
_CLAIMS: list[dict] = []


def pytest_collection_modifyitems(items):
    for item in items:
        if "rank_benchmark" in item.fixturenames:
            # Only the closest marker counts, so the clock joins whatever the function asked for.
            marker = item.get_closest_marker("benchmark")
            asked = marker.kwargs if marker else {}
            item.add_marker(pytest.mark.benchmark(**{**asked, "timer": _CLOCK}), append=False)


@pytest.fixture
def rank_benchmark(benchmark):
    """Measures a function in the ranks of a pool, by the slowest rank's own seconds.

    The parent's clock would add the dispatch. Called as `rank_benchmark(pool, fn, *args)`;
    returns the results of all ranks from the last round.
    """

    def measure(pool, fn, *args, rounds=5, warmup_rounds=1):
        def once():
            done = pool.run(fn, *args)
            _CLOCK.advance(done.slowest_s)
            return done.results

        return benchmark.pedantic(once, rounds=rounds, warmup_rounds=warmup_rounds)

    return measure


@pytest.fixture
def peer():
    """Starts a peer's script in its environment: `with peer("name", script) as it: it.ask(...)`.

    Skips, naming the peer, when its environment was not made.
    """

    def start(name, script):
        reason = missing_peer(name)
        if reason:
            pytest.skip(reason)
        return Peer(name, Path(script))

    return start


@pytest.fixture
def record_claim(request):
    """Adds a `Claim`, and the ratio aimed at, to the table that `hatch run bench` prints.

    `spread` is the lowest and the highest ratio (or the quartiles) of the repeats within the run; the
    claim's own range of turns where it is left out.
    All claims of a benchmark are kept; it fails at its end when one of them is not correct. An aim
    that was missed is marked in the table and fails nothing: it is a finding. A claim's name and
    its baseline's, up to a colon, tell it from all others of the file and stay from run to run, so that
    runs can be put side by side.
    """
    wrong = []
    path = request.node.path
    where = {"package": path.parent.name, "benchmark": path.stem.removeprefix("bench_")}

    def record(claim, *, aim=None, spread=None):
        fields = claim.to_json()
        fields.pop("ratio_range", None)
        spread = spread or claim.ratio_range
        if spread is not None:
            low, high = spread
            if not (math.isfinite(low) and low <= high < math.inf):
                wrong.append(f"{claim.name}: expected a spread from low to high, got {spread}")
                spread = None
        row = {**where, "aim": aim, "spread": spread, **fields}
        if any(_key_of(row) == _key_of(other) for other in _CLAIMS):
            wrong.append(
                f"{claim.name} against {claim.baseline_name}: recorded twice; expected a name or a "
                "baseline's name of its own"
            )
        else:
            _CLAIMS.append(row)
        if not claim.correct:
            wrong.append(f"{claim.name}: {claim.detail}")

    yield record
    assert not wrong, "; ".join(wrong)


def _key_of(row):
    """What tells a claim from all others."""
    return row["package"], row["benchmark"], row["name"], without_pick(row["baseline_name"])


def pytest_addoption(parser):
    parser.addoption("--claims", type=Path, help="file for the claims that benchmarks record")
    parser.addoption(
        "--whole-year",
        action="store_true",
        help="mspipe/staleness: all flights of the year, 35 min",
    )


def pytest_sessionfinish(session):
    path = session.config.getoption("--claims")
    if path:
        path.write_text(json.dumps(_CLAIMS, indent=1), encoding="utf-8")
