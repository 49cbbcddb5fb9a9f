"""Finds accesses to private names of other objects: `other._name`, `from file import _name`.

A name that begins with one underscore is its class's own, or its file's. An object reaches its own
by `self`, `cls` and `super()`, and a file reaches those of the classes that stand in it. A file
that itself begins with an underscore belongs to its folder. Strings count too, where
`monkeypatch.setattr`, `patch`, `getattr` and their like take a name, and as keys of
`vars(other)` and `other.__dict__`. Private names of other projects stand in `FOREIGN`, with what they are needed for.
"""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FOREIGN", "Access", "find_private_accesses"]

# A name covers what lies below it; one that begins with a dot is an attribute of any object. A name
# of a variable is given where a class of ours has a private name of the same spelling.
FOREIGN = {
    "._cdata": "torch.Storage: which storage it is, whether its memory is there or not",
    "._asdict": "namedtuple: its public methods begin with an underscore, as fields are the user's",
    "config._attn_implementation": "transformers: a model's attention, which has no other name",
    "._fields": "namedtuple",
    "._forward_hooks": "a test sees that no hook is left on a module",
    "._forward_pre_hooks": "a test sees that no hook is left on a module",
    "._replace": "namedtuple",
    "_thread.start_new_thread": "a signal handler starts a thread without the locks of `threading`",
    "atexit._run_exitfuncs": "a rank that leaves by os._exit still runs its exit functions",
    "model._expand_parallel_plan": "transformers: a plan of the experts, whose peer is a benchmark's",
    "module._conv_forward": "torch's convolution layers: the product alone, with a weight given",
    "os._exit": "a forked process leaves without its parent's exit functions",
    "sys._current_frames": "whether the main thread waits for a message, asked by another one",
    "sys._getframe": "a test looks at who calls, to stop a save at each of its lines",
    "ray._private": "a test counts the references that a worker holds",
    "torch._C": "hooks in force, whether torch.compile is at work, and who holds a storage",
    "._boxed_call": "torch.compile: whether a compiled function empties the list of its arguments",
    "gradient._version": "torch: how often a tensor was written to",
    "torch._functorch.partitioners": "which values a captured forward pass keeps",
    "torch._functorch._aot_autograd": "which output of a backward graph is whose gradient",
    "torch._ops": "what kind of operator a node of a graph calls",
    "torch.distributed._functional_collectives": "the exchange that torch.compile captures",
    "torch.fx.graph._BoxedCodeGen": "generated code that frees its arguments as it reads them",
    "torch.ops._c10d_functional": "the collectives in a captured graph",
    "torch._check": "tells torch.compile what a size may be",
    "torch._dynamo": "what torch.compile makes of a module",
    "torch._functorch.config": "torch.compile's budget of activations, the peer of a benchmark",
    "torch._foreach_add_": "one launch for many tensors, as torch's optimizers do it",
    "torch._foreach_copy_": "one launch for many tensors, as torch's optimizers do it",
    "torch._inductor": "compiles a graph of aten operators; its overlap pass, which a benchmark meets",
    "torch._int_mm": "products of 8-bit integers, which have no other name",
    "torch._scaled_mm": "products of 8-bit floats in the peer of a benchmark",
    "torch._subclasses": "fake tensors: shapes without values, which have no other home",
    "torch._utils": "functions that files of torch.save name",
    "torch.autograd.Variable._execution_engine": "the end of a backward pass, as torch's DDP finds it",
    "torch.cuda._sleep": "keeps a GPU busy for a given number of cycles",
    "._set_params_and_buffers_to_ignore_for_model": "DDP: parameters that it leaves to the user",
    "torch.distributed._compute_bucket_assignment_by_size": "a test compares with DDP's own buckets",
    "torch.distributed._shard": "sharded tensors of old checkpoints, written by a test",
    "torch.distributed.checkpoint._fsspec_filesystem": "the peer of a benchmark",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "what torch's metadata file holds",
    "torch.distributed.checkpoint.state_dict_loader._load_state_dict_from_keys": "as Megatron loads",
    "torch.distributed.distributed_c10d._world": "names of process groups count those there are",
    "torch.distributed.tensor.placement_types._StridedShard": "the placement of FSDP2 over TP",
    "torch.nn.modules.conv._ConvNd": "what torch's convolution layers have in common",
    "torch.ops.aten._convert_weight_to_int4pack": "the peer of a benchmark",
    "torch.ops.aten._convert_weight_to_int4pack_for_cpu": "the peer of a benchmark",
    "torch.ops.aten._scaled_dot_product_flash_attention": "attention that returns its log-sum-exp",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward": "its backward pass",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "the same on a CPU",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "its backward pass",
    "torch.ops.aten._unsafe_view": "another shape that operators in place may write to",
    "torch.ops.aten._weight_int4pack_mm": "the peer of a benchmark",
    "torch.ops.aten._weight_int4pack_mm_for_cpu": "the peer of a benchmark",
    "torch.storage._dtype_to_storage_type_map": "names of storages in files of torch.save",
    "torch.Tensor._make_wrapper_subclass": "a test's tensor subclass",
    "torch.utils._python_dispatch": "a test watches what torch runs",
    "torch.utils._pytree": "a test watches what torch runs",
    "process_group._get_backend": "the timeout of a group that the user made",
    "(...).options._timeout": "the timeout of a group that the user made",
    "._local_tensor": "DTensor: the shard without a step in the autograd graph",
    "._spec": "DTensor: mesh, placements and shape as one object that is cached by identity",
    "._split_tensor": "placement: torch's own split, which a test compares with",
    "._schema": "operator: its name, in a test that watches what torch runs",
    "._compiled_call_impl": "torch.nn.Module: what Module.compile made",
    "._loss_function": "transformers: the loss that a model was given, if not its own",
    "._local_mapping": "transformers: which attention functions were replaced, in a test",
    "tensor._version": "torch.Tensor: how often it was changed in place",
    "optimizer._opt_called": "torch.optim: what schedulers look at, to warn of a step left out",
    "optimizer._optimizer_step_post_hooks": "torch.optim: whether the user hooked onto the step",
    "optimizer._optimizer_step_pre_hooks": "torch.optim: whether the user hooked onto the step",
    "._orig_mod": "torch.compile's wrapper: the user's module",
    "._non_persistent_buffers_set": "torch.nn.Module: which buffers a state dict leaves out",
    "module._buffers": "torch.nn.Module: the tensors that it holds itself",
    "module._handle": "FSDP1: the flat parameter of a module",
    "module._parameters": "torch.nn.Module: the tensors that it holds itself",
    "flat._fqns": "FSDP1: what a flat parameter consists of",
    "flat._local_shard": "FSDP1: the shard while the whole parameter is gathered",
    "flat._numels": "FSDP1: what a flat parameter consists of",
    "flat._params": "FSDP1: the parameters before they were flattened",
    "flat._shapes": "FSDP1: what a flat parameter consists of",
    "flat._shard_param_infos": "FSDP1: what a flat parameter consists of",
    "hook._update": "tgm-lib: the part of a hook that inserts, which a benchmark times",
}

# Functions that take an object and an attribute's name, or a dotted name.
_TAKE_NAMES = {"delattr", "getattr", "hasattr", "patch", "setattr", "__setattr__"}
_OWN = ("self", "cls", "mcs")


@dataclass(frozen=True, order=True)
class Access:
    """One access to a private name: file, line, and the name as the code has it."""

    path: Path
    line: int
    name: str
    foreign: str | None = None


def find_private_accesses(path: Path, ours: frozenset[str]) -> tuple[Access, ...]:
    """Returns the accesses of a file to private names of other objects.

    Args:
        path: The Python file.
        ours: First parts of the dotted names of our own modules.

    Returns:
        The accesses. `foreign` is the entry of `FOREIGN` that allows one, None where none does.
    """
    return _accesses(path, path.read_text(encoding="utf-8"), ours)


@functools.cache  # as several rules ask about the same files
def _accesses(path: Path, text: str, ours: frozenset[str]) -> tuple[Access, ...]:
    nodes = list(ast.walk(ast.parse(text, path)))
    bound = _bound_modules(nodes)
    own = _own_names(nodes)
    found = []
    for node in nodes:
        if not isinstance(
            node, ast.Import | ast.ImportFrom | ast.Attribute | ast.Call | ast.Subscript
        ):
            continue
        for name, is_import in _private_names(node, bound, own):
            is_ours = name.split(".")[0] in ours
            if not (is_import and is_ours and _is_file_of_the_folder(name, path)):
                found.append(Access(path, node.lineno, name, _foreign(name, is_ours)))
    return tuple(found)


def _is_private(name: str) -> bool:
    return len(name) > 1 and name[0] == "_" and not name.startswith("__")


def _foreign(name: str, is_ours: bool) -> str | None:
    """Returns the entry of FOREIGN that covers a dotted name."""
    for entry in FOREIGN:
        if entry.startswith("."):
            if name.endswith(entry):
                return entry
        elif not is_ours and f"{name}.".startswith(f"{entry}."):
            return entry
    return None


def _is_file_of_the_folder(name: str, path: Path) -> bool:
    """Says whether all that is private in an import is a file of a folder that the path lies in."""
    parts = name.split(".")
    private = [at for at, part in enumerate(parts) if _is_private(part)]
    if len(private) != 1:
        return False
    folder, file = parts[private[0] - 1], parts[private[0]]
    return any(p.name == folder and (p / f"{file}.py").is_file() for p in path.parents)


def _bound_modules(nodes: list[ast.AST]) -> dict[str, str]:
    """Returns the dotted name behind each name that an import binds."""
    bound = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


def _own_names(nodes: list[ast.AST]) -> set[str]:
    """Returns the private names that the file's classes define."""
    own = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in _OWN:
                own.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    own.add(each.name)
                elif isinstance(each, ast.Assign):
                    own.update(t.id for t in each.targets if isinstance(t, ast.Name))
                    # Names in __slots__ among them.
                    own.update(
                        c.value
                        for c in ast.walk(each.value)
                        if isinstance(c, ast.Constant) and isinstance(c.value, str)
                    )
                elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    own.add(each.target.id)
    return {name for name in own if _is_private(name)}


def _dotted(node: ast.expr, bound: dict[str, str]) -> str:
    """Writes an expression as a dotted name, modules by their full names."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, bound)}.{node.attr}"
    if isinstance(node, ast.Name):
        return bound.get(node.id, node.id)
    return "(...)"


def _private_names(
    node: ast.AST, bound: dict[str, str], own: set[str]
) -> Iterator[tuple[str, bool]]:
    """Yields the private names that one node reaches for, and whether it is an import."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        base = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
        for alias in node.names:
            name = base + alias.name
            if any(_is_private(part) for part in name.split(".")):
                yield name, True
    elif isinstance(node, ast.Attribute):
        if _is_private(node.attr) and not _is_own(node.value, node.attr, bound, own):
            yield _dotted(node, bound), False
    elif isinstance(node, ast.Call):
        yield from ((name, False) for name in _names_in_strings(node, bound, own))
        if isinstance(node.func, ast.Attribute) and node.args:
            yield from _key_of_names(node.func.value, node.args[0], bound, own)
    elif isinstance(node, ast.Subscript):
        yield from _key_of_names(node.value, node.slice, bound, own)


def _key_of_names(
    names: ast.expr, key: ast.expr, bound: dict[str, str], own: set[str]
) -> Iterator[tuple[str, bool]]:
    """Yields a private name that is a key of `vars(other)` or `other.__dict__`."""
    if isinstance(names, ast.Attribute) and names.attr == "__dict__":
        owner = names.value
    elif isinstance(names, ast.Call) and _dotted(names.func, bound) == "vars" and names.args:
        owner = names.args[0]
    else:
        return
    name = key.value if isinstance(key, ast.Constant) else None
    if isinstance(name, str) and _is_private(name) and not _is_own(owner, name, bound, own):
        yield f"{_dotted(owner, bound)}.{name}", False


def _is_own(value: ast.expr, name: str, bound: dict[str, str], own: set[str]) -> bool:
    """Says whether `value.name` is a name of the object itself or of a class of this file."""
    if isinstance(value, ast.Name) and value.id in _OWN:
        return True
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        if value.func.id == "super":
            return True
        if value.func.id == "type" and value.args:
            return _is_own(value.args[0], name, bound, own)
    is_module = isinstance(value, ast.Name) and value.id in bound
    return name in own and not is_module


def _names_in_strings(call: ast.Call, bound: dict[str, str], own: set[str]) -> Iterator[str]:
    """Yields private names that a call takes as a string: getattr, setattr, patch and their like."""
    function = _dotted(call.func, bound)
    if function.split(".")[-1] not in _TAKE_NAMES and not function.endswith("patch.object"):
        return
    texts = [a.value if isinstance(a, ast.Constant) else None for a in call.args[:2]]
    if texts and isinstance(texts[0], str) and "." in texts[0]:
        if any(_is_private(part) for part in texts[0].split(".")):
            yield texts[0]
    elif len(texts) == 2 and isinstance(texts[1], str) and _is_private(texts[1]):
        owner, name = call.args[0], texts[1]
        if not _is_own(owner, name, bound, own):
            yield f"{_dotted(owner, bound)}.{name}"
