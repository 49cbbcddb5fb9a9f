"""Agreement of all ranks on plan, operators and parameters, before they exchange gradients.

Ranks that disagree would sum unlike tensors, which NCCL does without a word. They compare notes in the
process group's store, so the handshake adds no collective.
"""

import json
from typing import Any

from torch import Tensor, nn

from qsync.runtime.modules import get_precision, list_operators
from shared.comms.group import Group, ProcessGroup
from shared.errors import CommError, ConfigError

__all__ = ["agree_on_model"]


def agree_on_model(
    model: nn.Module, process_group: ProcessGroup, fingerprint: str
) -> frozenset[str]:
    """Checks that all ranks have the same plan, the same float32 parameters and the same buffers.

    Every rank calls it, as often as the others. It raises the same error on all ranks.

    Args:
        model: this rank's model.
        process_group: the ranks.
        fingerprint: of the plan that was applied, empty without one.

    Returns:
        The precisions that operators of any rank compute in.

    Raises:
        ConfigError: a plan, a name, shape or type of a parameter or buffer, or what is trained,
            differs between ranks, or a trained parameter is not float32.
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
        for name in [*first["tensors"], *note["tensors"]]:
            expected = first["tensors"].get(name, "missing")
            got = note["tensors"].get(name, "missing")
            if expected != got:
                raise ConfigError(
                    f"{name}: expected the same on all ranks, got {expected} on rank 0 and {got} on "
                    f"rank {rank}; build the same model on every rank"
                )
            if got.endswith("trained") and not got.startswith("float32"):
                raise ConfigError(
                    f"{name}: expected float32, as gradients are summed in it, got {got} on rank "
                    f"{rank}; convert the model by `.float()`, a plan lowers its operators"
                )
        if list(first["tensors"]) != list(note["tensors"]):
            raise ConfigError(
                f"parameters: expected rank 0's order on all ranks, got another on rank {rank}; build "
                "the same model on every rank"
            )
    return frozenset(precision for note in notes for precision in note["precisions"])


def _describe(model: nn.Module, fingerprint: str) -> dict[str, Any]:
    """What a rank tells the others."""
    tensors = {}
    for name, parameter in model.named_parameters():
        state = "trained" if parameter.requires_grad else "frozen"
        tensors[f"parameter {name!r}"] = f"{_describe_tensor(parameter)} {state}"
    for name, buffer in model.named_buffers():
        tensors[f"buffer {name!r}"] = _describe_tensor(buffer)
    precisions = {get_precision(module) for module in list_operators(model).values()}
    return {"plan": fingerprint, "tensors": tensors, "precisions": sorted(precisions)}


def _describe_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape))}"


def _exchange(note: dict[str, Any], group: ProcessGroup) -> list[dict[str, Any]]:
    """Returns the notes of all ranks."""
    world = Group.world()
    timeout, me = world.timeout, str(group.rank())
    store = world.board(f"qsync/handshake/{group.group_name}")
    # Counted by group, as ranks may be members of other groups too.
    turn = store.add(me, 1)
    store.set(f"{turn}/{me}", json.dumps(note))
    keys = [f"{turn}/{rank}" for rank in range(group.size())]
    for rank, key in enumerate(keys):
        try:
            store.wait([key], timeout)
        except RuntimeError as error:
            if not _settle(store, turn, "failed"):
                break
            raise CommError(
                f"handshake: expected rank {rank} within {timeout.total_seconds():g} s, got no word "
                "of it; look at its own output for what stopped it"
            ) from error
    if not _settle(store, turn, "agreed"):
        raise CommError(
            "handshake: expected all ranks within the timeout, got this one when another had given up or "
            "was gone; build the wrapper again on all ranks"
        )
    return [json.loads(store.get(key)) for key in keys]


def _settle(store: Any, turn: int, outcome: str) -> bool:
    """Whether a turn has this outcome on all ranks: the first rank to decide decides for the others.

    Else one rank would go on while another tries again, in a turn that the first one never joins.
    """
    try:
        return store.compare_set(f"{turn}/outcome", "", outcome) == outcome.encode()
    except RuntimeError:  # the rank that has the store is gone
        return outcome == "failed"
