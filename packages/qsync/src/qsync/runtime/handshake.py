"""Agreement of all ranks on plan, operators and parameters, before they exchange gradients.

Ranks that disagree would sum unlike tensors, which NCCL does without a word. They compare notes in the
process group's store, so the handshake adds no collective.
"""

import json
from itertools import count
from typing import Any

from torch import nn

from qsync.runtime.modules import get_precision, list_operators
from shared.comms.group import Group, ProcessGroup
from shared.errors import CommError, ConfigError

__all__ = ["agree_on_model"]

_handshakes = count()


def agree_on_model(
    model: nn.Module, process_group: ProcessGroup, fingerprint: str
) -> frozenset[str]:
    """Checks that all ranks have the same plan and the same float32 parameters.

    Every rank calls it, as often as the others. It raises the same error on all ranks.

    Args:
        model: this rank's model.
        process_group: the ranks.
        fingerprint: of the plan that was applied, empty without one.

    Returns:
        The precisions that operators of any rank compute in.

    Raises:
        ConfigError: a plan, a parameter's name, shape or type, or what is trained, differs between
            ranks, or a trained parameter is not float32.
        CommError: a rank did not come within the group's timeout.
    """
    notes = _exchange(_describe(model, fingerprint), process_group)
    first = notes[0]
    for rank, note in enumerate(notes):
        if note["plan"] != first["plan"]:
            raise ConfigError(
                f"plan: expected the same on all ranks, got {first['plan'] or 'none'} on rank 0 and "
                f"{note['plan'] or 'none'} on rank {rank}; apply the plan that `qsync.plan` returned, "
                "or one file, on every rank"
            )
        for name in [*first["parameters"], *note["parameters"]]:
            expected = first["parameters"].get(name, "missing")
            got = note["parameters"].get(name, "missing")
            if expected != got:
                raise ConfigError(
                    f"parameter {name!r}: expected the same on all ranks, got {expected} on rank 0 "
                    f"and {got} on rank {rank}; build the same model on every rank"
                )
            if got.endswith("trained") and not got.startswith("float32"):
                raise ConfigError(
                    f"parameter {name!r}: expected float32, as gradients are summed in it, got {got} "
                    f"on rank {rank}; convert the model by `.float()`, a plan lowers its operators"
                )
        if list(first["parameters"]) != list(note["parameters"]):
            raise ConfigError(
                f"parameters: expected rank 0's order on all ranks, got another on rank {rank}; build "
                "the same model on every rank"
            )
    return frozenset(precision for note in notes for precision in note["precisions"])


def _describe(model: nn.Module, fingerprint: str) -> dict[str, Any]:
    """What a rank tells the others."""
    parameters = {}
    for name, parameter in model.named_parameters():
        words = [str(parameter.dtype).removeprefix("torch."), "x".join(map(str, parameter.shape))]
        words.append("trained" if parameter.requires_grad else "frozen")
        parameters[name] = " ".join(words)
    precisions = {get_precision(module) for module in list_operators(model).values()}
    return {"plan": fingerprint, "parameters": parameters, "precisions": sorted(precisions)}


def _exchange(note: dict[str, Any], group: ProcessGroup) -> list[dict[str, Any]]:
    """Returns the notes of all ranks."""
    world = Group.world()
    timeout = world.timeout
    store = world.board(f"qsync/handshake/{group.group_name}/{next(_handshakes)}")
    store.set(str(group.rank()), json.dumps(note))
    notes = []
    for rank in range(group.size()):
        try:
            store.wait([str(rank)], timeout)
        except RuntimeError as error:
            raise CommError(
                f"handshake: expected rank {rank} within {timeout.total_seconds():g} s, got no word "
                "of it; look at its own output for what stopped it"
            ) from error
        notes.append(json.loads(store.get(str(rank))))
    return notes
