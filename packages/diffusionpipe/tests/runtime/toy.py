"""A small job in float64 with skips, frozen functions and draws, its plans, and plain training."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from diffusionpipe.job.chain import chain
from diffusionpipe.job.draws import Draw, decide
from diffusionpipe.job.job import Job
from diffusionpipe.job.layers import OUTPUT, ChainLayer
from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.planner.schedule import list_orders_by_events, order_1f1b, order_opposite

WIDTH, DEPTH, BATCH = 6, 4, 12
NUM_LAYERS = 2 * DEPTH + 1


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.sample = nn.Linear(WIDTH, WIDTH)
        self.time = nn.Linear(1, WIDTH)

    def forward(self, sample, timestep):
        return self.sample(sample), self.time(timestep[:, None].to(sample) / 1000).tanh()


class Block(nn.Module):
    def __init__(self, num_inputs):
        super().__init__()
        self.inner = nn.Linear(num_inputs * WIDTH, WIDTH)

    def forward(self, *values):
        return values[0] + self.inner(torch.cat(values, 1)).tanh()


class Toy(nn.Module):
    """h0, emb = head; h1..h4 down; u3, u2, u1 up with skips h3, h2, h1; output with skip h0."""

    def __init__(self):
        super().__init__()
        self.head = Head()
        self.down = nn.ModuleList([Block(3) for _ in range(DEPTH)])
        self.up = nn.ModuleList([Block(3) for _ in range(DEPTH)])

    def forward(self, sample, timestep, text):
        h, emb = self.head(sample, timestep)
        skips = []
        for block in self.down:
            skips.append(h)
            h = block(h, emb, text)
        for block in self.up:
            h = block(h, emb, skips.pop())
        return h

    def list_layers(self):
        def head(state):
            h, emb = self.head(state["sample"], state["timestep"])
            return {"h0": h, "emb": emb}

        layers = [ChainLayer("head", head, ("sample", "timestep"), ("h0", "emb"), (self.head,))]
        for i, block in enumerate(self.down):
            reads = (f"h{i}", "emb", "text")
            layers.append(make_layer(f"down {i}", block, reads, f"h{i + 1}"))
        hidden = f"h{DEPTH}"
        for i, block in enumerate(self.up):
            skip = f"h{DEPTH - 1 - i}"
            written = OUTPUT if i == DEPTH - 1 else f"u{i}"
            layers.append(make_layer(f"up {i}", block, (hidden, "emb", skip), written))
            hidden = written
        return layers


def make_layer(name, block, reads, written):
    def call(state):
        return {written: block(*(state[key] for key in reads))}

    return ChainLayer(name, call, reads, (written,), (block,))


def encode_pixels(batch):
    return batch["pixels"] @ matrix(0)


def encode_ids(batch):
    return matrix(1)[batch["ids"]].mean(1)


def matrix(number):
    generator = torch.Generator().manual_seed(number + 100)
    return torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)


def make_inputs(batch, frozen, draw):
    clean = frozen["z"]
    noise = draw.normal((WIDTH,), like=clean)
    timestep = draw.integers(0, 1000)
    level = timestep[:, None].to(clean) / 1000
    sample = (1 - level) * clean + level * noise
    target = noise - clean
    return {"sample": sample, "timestep": timestep, "text": frozen["text"], "target": target}


def square(output, target):
    return (output - target).square().mean(1)


def make_model(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return Toy().to(dtype)


def make_job(model=None, **settings):
    model = make_model() if model is None else model
    frozen = {"z": encode_pixels, "text": encode_ids}
    return Job(chain(model.list_layers()), **{
        "frozen": frozen, "inputs": make_inputs, "loss": square, **settings
    })  # fmt: skip


def make_batch(number, num_rows=BATCH):
    generator = torch.Generator().manual_seed(number)
    return {
        "pixels": torch.randn(num_rows, WIDTH, generator=generator, dtype=torch.float64),
        "ids": torch.randint(0, WIDTH, (num_rows, 3), generator=generator),
    }


def make_batches(num_steps=3, last_rows=BATCH):
    sizes = [BATCH] * (num_steps - 1) + [last_rows]
    return [make_batch(number, size) for number, size in enumerate(sizes)]


def make_sgd(parameters):
    return torch.optim.SGD(parameters, 0.5)


def make_slow_sgd(parameters):
    return torch.optim.SGD(parameters, 0.02)


def make_adam(parameters):
    return torch.optim.AdamW(parameters, 1e-2)


def train_plainly(batches, optimizer=make_sgd, seed=0, model=None):
    """Losses and weights of one process without any of the package's runtime."""
    model = make_model() if model is None else model
    own = optimizer(list(model.parameters()))
    losses = []
    for step, batch in enumerate(batches):
        draw = Draw(seed, step, range(len(batch["ids"])))
        made = make_inputs(batch, {"z": encode_pixels(batch), "text": encode_ids(batch)}, draw)
        target = made.pop("target")
        loss = square(model(**made), target).mean()
        own.zero_grad()
        loss.backward()
        own.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


PROBABILITY = 0.5


def make_conditioned_inputs(batch, frozen, draw):
    """What was estimated, if anything was, is added to the sample."""
    made = make_inputs(batch, frozen, draw)
    if "estimate" in frozen:
        made["sample"] = made["sample"] + 0.5 * frozen["estimate"]
    return made


def make_conditioned_job():
    return make_job(inputs=make_conditioned_inputs, self_conditioning=PROBABILITY)


def train_conditioned_plainly(batches, optimizer=make_slow_sgd, seed=0):
    """Plain training that in some steps predicts first, without gradients."""
    model = make_model()
    own = optimizer(list(model.parameters()))
    losses = []
    for step, batch in enumerate(batches):
        draw = Draw(seed, step, range(len(batch["ids"])))
        made = make_inputs(batch, {"z": encode_pixels(batch), "text": encode_ids(batch)}, draw)
        target = made.pop("target")
        if decide(seed, step, PROBABILITY):
            with torch.no_grad():
                made["sample"] = made["sample"] + 0.5 * model(**made)
        loss = square(model(**made), target).mean()
        own.zero_grad()
        loss.backward()
        own.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def make_inputs_of_two(batch, frozen, draw):
    """The second backbone learns from other noise, and of no pixels."""
    first = make_inputs(batch, frozen, draw)
    noise = draw.normal((WIDTH,), "second", like=frozen["text"])
    sample = frozen["text"] + noise
    second = {"timestep": first["timestep"], "text": frozen["text"], "target": noise}
    return first, {"sample": sample, **second}


def make_job_of_two():
    chains = tuple(chain(make_model(seed).list_layers()) for seed in (0, 1))
    frozen = {"z": encode_pixels, "text": encode_ids}
    return Job(chains, frozen, make_inputs_of_two, square)


def train_two_plainly(batches, optimizer=make_sgd, seed=0):
    """Plain training of both, whose losses are added up."""
    models = [make_model(seed) for seed in (0, 1)]
    own = optimizer([p for model in models for p in model.parameters()])
    losses = []
    for step, batch in enumerate(batches):
        draw = Draw(seed, step, range(len(batch["ids"])))
        frozen = {"z": encode_pixels(batch), "text": encode_ids(batch)}
        loss = torch.zeros(())
        for model, made in zip(models, make_inputs_of_two(batch, frozen, draw), strict=True):
            target = made.pop("target")
            loss = loss + square(model(**made), target).mean()
        own.zero_grad()
        loss.backward()
        own.step()
        losses.append(float(loss.detach()))
    return losses, {
        f"{index}.{name}": value.detach().clone()
        for index, model in enumerate(models)
        for name, value in model.named_parameters()
    }


def make_opposite_plan(num_devices, num_micro_batches=2, batch_size=BATCH):
    """Two chains in opposite directions; the first rank encodes all."""
    seconds = [(1.0, 2.0)] * num_devices
    passes = order_opposite(seconds, seconds, num_micro_batches)
    devices = tuple((d,) for d in [*range(num_devices), *reversed(range(num_devices))])
    rows = [(0, batch_size), *[(0, 0)] * (num_devices - 1)]
    return Plan(
        placement="opposite", num_stages=num_devices, num_micro_batches=num_micro_batches,
        batch_size=batch_size, spans=cut_spans(num_devices) * 2, devices=devices,
        backbones=(0,) * num_devices + (1,) * num_devices,
        order=tuple(tuple(fill([*own, Action("step")], r)) for own, r in zip(passes, rows, strict=True)),
    )  # fmt: skip


def make_conditioned_plan(placement, devices, num_micro_batches=2, num_groups=1):
    """`make_plan` with an order of steps that predict twice."""
    plan = make_plan(placement, devices, num_micro_batches, num_groups)
    device_of = [devices.index(list(ranks)) for ranks in plan.devices]
    ones = [1.0] * len(device_of)
    twos = [2.0] * len(device_of)
    orders = list_orders_by_events(device_of, ones, twos, num_micro_batches, has_estimate=True)
    passes = next(orders)
    order = []
    for rank, own in enumerate(plan.order):
        device = next(d for d, ranks in enumerate(devices) if rank in ranks)
        rows = [row for a in own if a.kind == "encode" for row in a.samples]
        rows = (min(rows), max(rows))
        order.append(tuple(fill(add_sums(passes[device], plan.devices), rows)))
    return replace(plan, estimate_order=tuple(order))


def cut_spans(num_spans, num_layers=NUM_LAYERS):
    ends = [round(i * num_layers / num_spans) for i in range(num_spans + 1)]
    return tuple(pairwise(ends))


def make_plan(
    placement,
    devices,
    num_micro_batches=2,
    num_groups=1,
    batch_size=BATCH,
    num_layers=NUM_LAYERS,
    components=("text", "z"),
):
    """A plan by hand; each rank encodes an equal part of both components.

    Args:
        placement: "data", "chain" or "folded".
        devices: ranks of each device of a pipeline.
    """
    num_devices = len(devices)
    if placement == "folded":
        devices_of = [*range(num_devices), *range(num_devices - 2, -1, -1)]
        ones = [1.0] * len(devices_of)
        twos = [2.0] * len(ones)
        passes = next(list_orders_by_events(devices_of, ones, twos, num_micro_batches))
    else:
        passes = order_1f1b(num_devices, num_micro_batches)
        devices_of = list(range(num_devices))
    by_stage = tuple(tuple(devices[device]) for device in devices_of)
    ranks = sorted(rank for own in devices for rank in own)
    share = batch_size // len(ranks)
    order = []
    for rank in ranks:
        device = next(d for d, own in enumerate(devices) if rank in own)
        rows = (rank * share, (rank + 1) * share if rank < len(ranks) - 1 else batch_size)
        order.append(tuple(fill(add_sums(passes[device], by_stage), rows, components)))
    return Plan(
        placement=placement, num_stages=num_devices, num_micro_batches=num_micro_batches,
        num_groups=num_groups, batch_size=batch_size, spans=cut_spans(len(by_stage), num_layers),
        devices=by_stage, order=tuple(order), bucket_bytes=400,
    )  # fmt: skip


def add_sums(actions, devices):
    last = {action.stage: index for index, action in enumerate(actions)}
    for index, action in enumerate(actions):
        yield action
        if last[action.stage] == index and len(devices[action.stage]) > 1:
            yield Action("sum", action.stage)
    yield Action("step")


def fill(actions, rows, components=("text", "z")):
    """Puts the components' rows, one by one, before backward passes and at the end."""
    jobs = [
        Action("encode", name=name, samples=(row, row + 1))
        for name in components
        for row in range(*rows)
    ]
    for action in actions:
        if action.kind == "backward" and jobs:
            yield jobs.pop(0)
        if action.kind == "step":
            yield from jobs
        yield action


PLANS = {
    "one process": lambda: make_plan("data", [[0]]),
    "chain of 2": lambda: make_plan("chain", [[0], [1]], 4),
    "chain of 2, one micro-batch": lambda: make_plan("chain", [[0], [1]], 1),
    "folded 2": lambda: make_plan("folded", [[0], [1]], 3),
    "data 2": lambda: make_plan("data", [[0, 1]], 2),
    "chain of 4": lambda: make_plan("chain", [[0], [1], [2], [3]], 6),
    "folded 4": lambda: make_plan("folded", [[0], [1], [2], [3]], 4),
    "chain of 2, replicated": lambda: make_plan("chain", [[0, 1], [2, 3]], 3, 2),
    "folded 2, replicated": lambda: make_plan("folded", [[0, 2], [1, 3]], 2, 2),
    "chain of 3 and 1 replicas": lambda: make_plan("chain", [[0, 1, 2], [3]], 2),
    "chain of 1, 2 and 1 replicas": lambda: make_plan("chain", [[0], [1, 2], [3]], 3),
    "data 4": lambda: make_plan("data", [[0, 1, 2, 3]], 1, 4),
}

CONDITIONED_PLANS = {
    "one process": lambda: make_conditioned_plan("data", [[0]], 3),
    "chain of 2": lambda: make_conditioned_plan("chain", [[0], [1]], 4),
    "folded 2": lambda: make_conditioned_plan("folded", [[0], [1]], 3),
    "data 2": lambda: make_conditioned_plan("data", [[0, 1]], 2),
    "chain of 4": lambda: make_conditioned_plan("chain", [[0], [1], [2], [3]], 4),
    "chain of 2, replicated": lambda: make_conditioned_plan("chain", [[0, 2], [1, 3]], 2, 2),
    "chain of 3 and 1 replicas": lambda: make_conditioned_plan("chain", [[0, 1, 2], [3]], 2),
}
