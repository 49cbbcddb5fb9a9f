"""Generation on a rank of its own while another trains, beside the loops in which one waits for the other.

Real responses of a small Llama, real updates on them, one thread a rank. How many responses a prompt
gets is chosen on this machine, so that generating takes about twice as long as training; both are
measured in the synchronous loop, on the same two ranks. The loops take turns of some steps, whose
first fills the pipeline and is not counted.
"""

import time
from dataclasses import dataclass, field
from math import isfinite
from statistics import median, quantiles

import torch

import hybridflow as hy
from hybridflow import algorithms as algos
from hybridflow.algorithms import loops
from hybridflow.reshard import sync_weights
from hybridflow.roles.rollout import Rollout
from shared.claims import Claim

MODEL = "config:small-llama"
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 2, 32, 128
TURNS, STEPS = 5, 6
COMMAND = "hatch run bench hybridflow -k overlap"
PEERS = [
    {
        "peer": "ideal overlap",
        "setting": "the longer of generation and training, each as the synchronous loop has it alone",
        "why": "no loop can be faster on these ranks",
    },
    {
        "peer": "synchronous loop, one rank generating, one training",
        "setting": "our own, with the same ranks, weights and batches",
        "why": "what overlap itself gains, all else alike",
    },
    {
        "peer": "synchronous loop, both ranks generating, then both training",
        "setting": "our own, two replicas in one pool",
        "why": "no rank ever waits: the best use of two ranks without overlap",
    },
]


def prompts(step):
    draw = torch.Generator().manual_seed(step)
    return hy.Batch(
        prompts=torch.randint(1, 512, (NUM_PROMPTS, PROMPT_TOKENS), generator=draw),
        prompt_lengths=torch.full((NUM_PROMPTS,), PROMPT_TOKENS),
        sample_ids=torch.arange(NUM_PROMPTS) + step * NUM_PROMPTS,
    )


def score(roll):
    """What random weights earn too, so that every step is one: even tokens are good."""
    return hy.Batch(rewards=(roll["tokens"] % 2 == 0) * roll["mask"] / NEW_TOKENS)


@dataclass(kw_only=True)
class Timed(algos.GRPO):
    """Keeps what it learns from, and the seconds of waiting for it and of learning."""

    learnt: list = field(default_factory=list)
    wait_s: list = field(default_factory=list)
    learn_s: list = field(default_factory=list)

    def learn(self, roll):
        begun = time.perf_counter()
        self.learnt.append((roll if isinstance(roll, hy.Batch) else roll.result())["tokens"])
        drawn = time.perf_counter()
        told = super().learn(roll)
        self.wait_s.append(drawn - begun)
        self.learn_s.append(time.perf_counter() - drawn)
        return told


def algorithm_on(pool, num_samples):
    sampling = hy.Sampling(max_new_tokens=NEW_TOKENS, num_samples=num_samples)
    actor = hy.Actor(MODEL, pool, optimizer=hy.AdamW(lr=1e-3))
    return Timed(actor=actor, score=score, sampling=sampling)


def chosen(pools):
    """Responses to a prompt with which generating takes about twice as long as training."""
    far = {}
    for num_samples in (2, 3, 4, 6):
        algorithm = algorithm_on(pools[0], num_samples)
        rollout = Rollout(MODEL, pools[1])
        list(loops.run(algorithm, prompts, steps=4, rollout=rollout))
        ratio = median(algorithm.wait_s[1:]) / median(algorithm.learn_s[1:])
        far[num_samples] = abs(ratio - 2)
        algorithm.actor.remove()
        rollout.remove()
    return min(far, key=far.__getitem__)


def drawn_one_step_before(algorithm, steps):
    """Tokens and metrics of steps whose batch the weights before the last update have drawn."""
    told, drawn = [], algorithm.rollout(prompts(0), 0).result()
    for step in range(steps):
        following = algorithm.rollout(prompts(step + 1), step + 1).result()
        told.append(dict(algorithm.learn(drawn)))
        drawn = following
    return algorithm.learnt, told


def timed(steps):
    """Seconds between steps from the first on, and what they tell."""
    taken, told, begun = [], [], time.perf_counter()
    for step in steps:
        now = time.perf_counter()
        taken.append(now - begun)
        told.append({name: value for name, value in step.items() if name != "staleness"})
        begun = now
    return taken[1:], told


class Ways:
    """Each loop with an actor of its own, all from the same weights."""

    def __init__(self, pools, both, num_samples):
        self.algorithms = {
            name: algorithm_on(pools[0], num_samples) for name in ("waiting", "ahead", "eta 1")
        }
        self.algorithms["together"] = algorithm_on(both, num_samples)
        self.rollout = Rollout(MODEL, pools[1])
        self.loops = {
            "ahead": loops.OneStep(
                algorithm=self.algorithms["ahead"], rollout=self.rollout, prompts=prompts
            ),
            "eta 1": loops.Asynchronous(
                algorithm=self.algorithms["eta 1"],
                rollouts=[Rollout(MODEL, pools[1])],
                prompts=prompts,
                eta=1,
            ),
        }
        self.taken = {name: [] for name in (*self.algorithms, "sync")}
        self.told = {name: [] for name in self.algorithms}

    def steps(self, name, turn):
        if name in self.loops:
            return self.loops[name].run(STEPS)
        rollout = self.rollout if name == "waiting" else None
        return loops.run(
            self.algorithms[name], prompts, steps=STEPS, start=turn * STEPS, rollout=rollout
        )

    def take_turns(self):
        for turn in range(TURNS):
            for name in self.algorithms:
                taken, told = timed(self.steps(name, turn))
                self.taken[name] += taken
                self.told[name] += told
                if name in self.loops:
                    self.loops[name].state()  # nothing of it runs beside the next
            for _ in range(3):
                begun = time.perf_counter()
                sync_weights(self.algorithms["waiting"].actor, self.rollout)
                self.taken["sync"].append(time.perf_counter() - begun)

    def are_right(self, pool, num_samples):
        """Whether loops that draw ahead learn what they are to learn, to the bit."""
        tokens, told = drawn_one_step_before(algorithm_on(pool, num_samples), STEPS)
        is_right = all(isfinite(step["loss"]) for found in self.told.values() for step in found)
        for name in self.loops:
            is_right &= self.told[name][:STEPS] == told
            learnt = self.algorithms[name].learnt[:STEPS]
            is_right &= all(torch.equal(a, b) for a, b in zip(learnt, tokens, strict=True))
        # Before any update all draw alike; later the synchronous ones draw from newer weights.
        for name in ("waiting", "together"):
            same = [
                torch.equal(a, b)
                for a, b in zip(self.algorithms[name].learnt[:STEPS], tokens, strict=True)
            ]
            is_right &= same[0] and not all(same)
        return is_right


def middles(seconds):
    """The median counted step of each turn."""
    return [median(seconds[at : at + STEPS - 1]) for at in range(0, len(seconds), STEPS - 1)]


def spread(seconds):
    low, _, high = quantiles(seconds, n=4)
    return f"{low:.2f}-{high:.2f} s"


def bench_overlap(benchmark, record_claim):
    with hy.Workers.local(2) as workers, hy.Workers.local(2) as others:
        pools, both = (workers.pool(1), workers.pool(1)), others.pool(2)
        num_samples = chosen(pools)
        ways = Ways(pools, both, num_samples)
        benchmark.pedantic(ways.take_turns, rounds=1)
        is_right = ways.are_right(pools[0], num_samples)
    counted = [k for k in range(TURNS * STEPS) if k % STEPS]
    waiting = ways.algorithms["waiting"]
    generate_s, train_s = (
        median(seconds[k] for k in counted) for seconds in (waiting.wait_s, waiting.learn_s)
    )
    step_s = {name: median(seconds) for name, seconds in ways.taken.items()}
    beside_s = median(ways.algorithms["ahead"].learn_s[k] for k in counted)
    ideal = (generate_s + train_s) / max(generate_s, train_s)
    benchmark.extra_info.update({name: f"{seconds:.3f} s" for name, seconds in step_s.items()})
    told = (
        f"generation {generate_s:.2f} s and training {train_s:.2f} s in the synchronous loop "
        f"({generate_s / train_s:.2f} to 1, so {ideal:.2f}x would be ideal), training "
        f"{beside_s:.2f} s beside generation, weights synced in {1e3 * step_s['sync']:.0f} ms; "
        + ", ".join(f"{name} {spread(seconds)}" for name, seconds in ways.taken.items())
    )
    alone = [
        [median(seconds[at + 1 : at + STEPS]) for at in range(0, TURNS * STEPS, STEPS)]
        for seconds in (waiting.wait_s, waiting.learn_s)
    ]
    by_turn = {name: middles(ways.taken[name]) for name in ways.algorithms}
    baselines = [
        (max(generate_s, train_s), "the longer part of the synchronous loop: ideal overlap", 0.9,
         list(map(max, *alone))),
        (step_s["waiting"], "the synchronous loop on the same ranks", None, by_turn["waiting"]),
        (step_s["together"], "the synchronous loop, both ranks generating, then training", None,
         by_turn["together"]),
    ]  # fmt: skip
    for way, name in (("ahead", "one step off"), ("eta 1", "asynchronous, eta 1")):
        for baseline, baseline_name, aim, turns in baselines:
            ratios = [theirs / ours for ours, theirs in zip(by_turn[way], turns, strict=True)]
            record_claim(
                Claim(
                    name=f"a step of GRPO {name}, one rank generating, one training",
                    unit="s",
                    ours=step_s[way],
                    baseline=baseline,
                    baseline_name=baseline_name,
                    higher_is_better=False,
                    correct=is_right,
                    detail=f"{len(counted)} steps in {TURNS} turns; {told}; tokens and metrics of "
                    f"{STEPS} steps equal those of straight-line code to the bit",
                    source=COMMAND,
                ),
                aim=aim,
                spread=(min(ratios), max(ratios)),
            )
