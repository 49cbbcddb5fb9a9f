"""Steps on devices that sleep: plans of 2, 4 and 8 stages beside the limit, the prediction and other ways of filling.

Computation sleeps for the profile's seconds and messages are real, so that two cores run eight ranks and
what is measured is the plan, the engine and its messages. Stages are equal: F 20 ms, B 40 ms a
micro-batch, as many micro-batches as stages or, up to four stages, twice that. With links, every rank is a host on a link of
100 Mbit/s and a message takes about 8 ms, which is measured before. The limit of a step is the larger of its passes alone (as the
closed form or the simulator has them) and all compute spread evenly. Beside it: frozen part first,
the published form of filling, and jobs added at run time whenever a rank would wait.
"""

import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
import torch

import diffusionpipe as dp
from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.plan import Plan
from diffusionpipe.planner.search.assembly import assemble
from diffusionpipe.profiler.job_profile import JobProfile
from diffusionpipe.runtime.virtual import run_virtual
from shared.claims import Claim
from shared.comms import Group, NetLab, RankPool, Round, barrier, netlab, post_rounds
from shared.topology import Cluster, Link
from shared.topology.device import CPU

sys.path.insert(0, str(Path(__file__).parent))

from sleepers import fill_as_published, make_profile, run_greedily, without_frozen_part
from turns import gather

PASS_S, ROWS = 0.06, 32
"""Seconds of both passes of a micro-batch on a device, and its samples."""
RATIOS, MICRO_BATCHES = (0.1, 0.4, 0.85), {2: (1, 2), 4: (1, 2), 8: (1,)}
"""Frozen over trained seconds; micro-batches over stages, by stages."""
STEPS, TURNS = 6, 3
"""Steps of each run, of which the first is left out; turns, of which the first has all ways, the others filled and first."""
HIDDEN_BYTES = {"none": 250, "100mbit": 3_125}
PINGS = 40
"""Messages by which links are measured."""
LIMIT_AIM, ERROR_AIM = 0.96, 3.0
"""Share of the limit; error of a prediction in percent."""
COMMAND = "hatch run bench diffusionpipe/virtual"


def measure_message(num_bytes):
    """Seconds of a message of a micro-batch between the first two ranks, as the engine sends them."""
    pair, seconds = Group.of([0, 1]), []
    if pair.rank < 0:
        return None
    one = torch.zeros(num_bytes, dtype=torch.uint8)
    for number in range(PINGS):
        barrier(pair)
        began = time.perf_counter()
        for is_mine in (number % 2 == pair.rank, number % 2 != pair.rank):
            sent, received = (one, None) if is_mine else (None, torch.empty_like(one))
            peer = 1 - pair.rank
            item = Round(send_to=peer, send=sent, recv_from=peer, recv=received)
            post_rounds(pair, [item], "ping").wait_all()
        seconds.append((time.perf_counter() - began) / 2)
    return median(seconds[PINGS // 4 :])


def make_cluster(num_ranks, rate, bytes_per_s, message_s):
    """Links whose message of a micro-batch takes as long as was measured."""
    if rate == "none":
        link = Link(alpha_s=message_s, beta_s_per_byte=1e-9)
        return Cluster.uniform(1, num_ranks, CPU, local=link)
    # Frames' headers take 66 of 1,514 bytes; a burst may pass at once, so that less is left than that.
    beta = min(1514 / 1448 / bytes_per_s, message_s / (ROWS * HIDDEN_BYTES[rate]))
    link = Link(alpha_s=message_s - beta * ROWS * HIDDEN_BYTES[rate], beta_s_per_byte=beta)
    return Cluster.uniform(num_ranks, 1, CPU, network=link)


def list_seconds(report):
    """Seconds of each step but the first, the slowest rank's each."""
    return [max(one.seconds for one in ranks) for ranks in zip(*report.steps, strict=True)][1:]


def slowest(seconds):
    """The slowest rank's seconds by step, without the first."""
    return [max(row) for row in zip(*gather(seconds), strict=True)][1:]


def simulate_passes(profile, count, link_s):
    """Seconds of a step's passes alone, by the simulator."""
    chain = profile.chains[0]
    forward, backward = (
        [ROWS * row[0] for row in part] for part in (chain.forward_s, chain.backward_s)
    )
    return dp.simulate(forward, backward, count, link_s=link_s).makespan_s


class Case(NamedTuple):
    """A step that is run.

    Attributes:
        name: what it is.
        profile: seconds and bytes.
        plan: filled.
        first: the same plan, frozen parts first.
        limit_s: no step takes less.
        published: the published form of filling; None where it is not run.
        bare: the plan without frozen part and its profile, to which ranks add jobs; None likewise.
    """

    name: str
    profile: JobProfile
    plan: Plan
    first: Plan
    limit_s: float
    published: Plan | None = None
    bare: tuple[Plan, JobProfile] | None = None


def plan_chains(rate, stages, *link):
    """Cases of a chain of equal stages."""
    cluster, cases = make_cluster(stages, rate, *link), []
    for factor in MICRO_BATCHES[stages]:
        count = factor * stages
        batch = count * ROWS
        for ratio in RATIOS:
            profile = make_profile(stages, PASS_S, ratio, ROWS, hidden_bytes=HIDDEN_BYTES[rate])
            options = {
                "batch_size": batch, "num_stages": stages, "num_micro_batches": count,
                "placement": "chain",
            }  # fmt: skip
            plan = dp.plan(None, profile, cluster, **options)
            first = assemble(plan, PlanInputs(profile, cluster), "first")
            bare = without_frozen_part(profile)
            plain = dp.plan(None, bare, cluster, **options)
            link_s = 0.0
            if rate != "none":
                link_s = float(cluster.link(0, 1).time_s(ROWS * HIDDEN_BYTES[rate]))
            # Some more micro-batches in flight than 1F1B's may hide links.
            passes_s = min(
                simulate_passes(profile, count, link_s),
                plain.predicted_s,
            )
            limit_s = max(passes_s, (1 + ratio) * count * PASS_S)
            published = fill_as_published(plan, profile, batch, link_s)
            name = f"S {stages}, M {count}, ratio {ratio}"
            cases.append(Case(name, profile, plan, first, limit_s, published, (plain, bare)))
    return cases


def plan_variants(rate, stages, *link):
    """Cases of self-conditioned steps, and of two backbones in opposite directions."""
    cluster, cases, count = make_cluster(stages, rate, *link), [], 2 * stages
    for ratio in (0.1, 0.4, 0.85):
        for kind in ("self-conditioned", "two backbones"):
            is_twice = kind == "self-conditioned"
            profile = make_profile(
                stages, PASS_S, ratio, ROWS, self_conditioning=float(is_twice),
                num_chains=1 if is_twice else 2,
            )  # fmt: skip
            plan = dp.plan(
                None, profile, cluster, batch_size=count * ROWS, num_stages=stages,
                num_micro_batches=count, placement="chain" if is_twice else "opposite",
            )  # fmt: skip
            first = assemble(plan, PlanInputs(profile, cluster), "first")
            if is_twice:
                plan, first = (
                    replace(each, order=each.estimate_order, estimate_order=())
                    for each in (plan, first)
                )
            limit_s = max(plan.cached_s, plan.limit_s)
            name = f"{kind}, S {stages}, ratio {ratio}"
            cases.append(Case(name, profile, plan, first, limit_s))
    return cases


def run_cases(cases):
    """Seconds of each case by way, in turns."""
    return [run_case(case) for case in cases]


def run_case(case):
    seconds = {}
    for turn in range(TURNS):
        runs = {
            "filled": list_seconds(run_virtual(case.plan, case.profile, STEPS)),
            "first": list_seconds(run_virtual(case.first, case.profile, STEPS)),
        }
        if case.published is not None and turn == 0:
            runs["published"] = list_seconds(run_virtual(case.published, case.profile, STEPS))
        if case.bare is not None and turn == 0:
            shares = [case.plan.batch_size // case.plan.num_ranks] * case.plan.num_ranks
            job_s, (plan, profile) = case.profile.frozen_s["z"][0], case.bare
            runs["at run time"] = slowest(run_greedily(plan, profile, STEPS, shares, job_s))
        for way, own in runs.items():
            seconds[way] = seconds.get(way, []) + own
    return seconds


def judge(record_claim, rows, name, source):
    """Claims of the least share of the limit and the largest error of a prediction."""
    shares, errors, told, gains = {}, {}, [], []
    for case, seconds in rows:
        medians = {way: median(own) for way, own in seconds.items()}
        shares[case.name] = case.limit_s / medians["filled"]
        errors[case.name] = 100 * (case.plan.predicted_s / medians["filled"] - 1)
        gains.append(medians["first"] / medians["filled"])
        told.append(
            f"{case.name}: {shares[case.name]:.3f} of the limit {case.limit_s:.3f}, error {errors[case.name]:+.1f} %, "
            + ", ".join(f"{way} {own:.3f}" for way, own in medians.items())
        )
    # All of these steps would be too short if nothing slept, and alike if nothing were filled, which
    # two backbones on two devices leave nothing of.
    expected = max(case.first.predicted_s / case.plan.predicted_s for case, _ in rows)
    is_right = all(share < 1.01 for share in shares.values()) and max(gains) > min(
        1.05, (1 + expected) / 2 - 0.01
    )
    for figure, value, aim, better in (
        ("least share of a step's limit", min(shares.values()), LIMIT_AIM, True),
        ("largest error of a predicted step", max(map(abs, errors.values())), ERROR_AIM, False),
    ):
        record_claim(
            Claim(
                name=f"{figure}, {name}", unit="share" if better else "%", ours=value,
                baseline=aim, baseline_name="the aim", higher_is_better=better, correct=is_right,
                ratio=value / aim if better else aim / max(value, 0.01),
                detail="; ".join(told), source=source,
            ),
            aim=1.0,
        )  # fmt: skip
    for way in ("first", "published", "at run time"):
        if way not in rows[0][1]:
            continue
        ratios = [median(seconds[way]) / median(seconds["filled"]) for _, seconds in rows]
        record_claim(
            Claim(
                name=f"steps of sleeping devices, {name}", unit="of ours", ours=1.0,
                baseline=median(ratios), baseline_name=f"frozen jobs {way}",
                higher_is_better=False, correct=is_right, detail="; ".join(told), source=source,
            ),
            spread=(min(ratios), max(ratios)),
        )  # fmt: skip


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("rate", list(HIDDEN_BYTES))
@pytest.mark.netns
def bench_chain(benchmark, record_claim, rate, stages):
    """Ratios from 0.1 to 0.85."""
    if rate != "none" and netlab.available():
        pytest.skip(str(netlab.available()))
    rows = run_on(rate, stages, benchmark, plan_chains)
    name = f"{stages} stages, {'no links' if rate == 'none' else 'links of 100 Mbit/s'}"
    judge(record_claim, rows, name, f'{COMMAND} -k "chain and {rate} and {stages}"')


def run_on(rate, num_ranks, benchmark, make_cases):
    """Plans cases here and runs them on so many ranks; pairs of a case and its seconds by way."""
    limit, modules = timedelta(minutes=9), ("diffusionpipe.runtime.virtual",)
    with ExitStack() as stack:
        if rate == "none":
            pool = stack.enter_context(RankPool(num_ranks, timeout=limit, modules=modules))
            bytes_per_s = 1e9
        else:
            lab = stack.enter_context(NetLab(hosts=num_ranks, rate=rate))
            pool = stack.enter_context(lab.pool(timeout=limit))
            bytes_per_s = lab.bytes_per_s
        message_s = pool.run(measure_message, ROWS * HIDDEN_BYTES[rate]).results[0]
        cases = make_cases(rate, num_ranks, bytes_per_s, message_s)
        found = benchmark.pedantic(lambda: pool.run(run_cases, cases).results[0], rounds=1)
    return list(zip(cases, found, strict=True))


@pytest.mark.parametrize("stages", [2, 4])
def bench_variants(benchmark, record_claim, stages):
    """Self-conditioned steps and two backbones; their passes alone are as planned without frozen part."""
    rows = run_on("none", stages, benchmark, plan_variants)
    for kind in ("self-conditioned", "two backbones"):
        own = [row for row in rows if row[0].name.startswith(kind)]
        judge(
            record_claim, own, f"{stages} stages, {kind}", f'{COMMAND} -k "variants and {stages}"'
        )
