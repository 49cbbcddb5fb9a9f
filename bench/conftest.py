"""Fixtures of the benchmarks: time inside ranks, peers in environments of their own, claims.

The root conftest is not loaded here, so that nothing checks types while the clock runs.
"""

import importlib
import json
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

from peer import Peer, missing_peer
from rankclock import RankClock
from shared.claims import Claim

_CLOCK = RankClock()
_CLAIMS: list[tuple[str, float | None, Claim]] = []


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

    All claims of a benchmark are kept; it fails at its end when one of them is not correct. An aim
    that was missed is marked in the table and fails nothing: it is a finding.
    """
    wrong = []

    def record(claim, *, aim=None):
        _CLAIMS.append((request.node.nodeid, aim, claim))
        if not claim.correct:
            wrong.append(f"{claim.name}: {claim.detail}")

    yield record
    assert not wrong, "; ".join(wrong)


def pytest_addoption(parser):
    parser.addoption("--claims", type=Path, help="file for the claims that benchmarks record")


def pytest_sessionfinish(session):
    path = session.config.getoption("--claims")
    if path:
        rows = [{"benchmark": n, "aim": aim, **claim.to_json()} for n, aim, claim in _CLAIMS]
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
