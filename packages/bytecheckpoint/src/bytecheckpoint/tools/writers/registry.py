"""The formats that a checkpoint is converted into; `convert`, its command and its help read them.

A writer is called with an open `Checkpoint`, the local path of what to make, and `progress`: None,
or a function that takes the number of bytes written since its last call. One with a parameter
`prefix` also takes the prefix of the names of the tensors to write. Writers are imported on first
use, so that the command line lists them without loading torch.
"""

from collections.abc import Callable

from shared.registry import Registry

__all__ = ["WRITERS"]

WRITERS: Registry[str, Callable[..., None]] = Registry("format")
WRITERS.add(
    "dcp",
    "bytecheckpoint.tools.writers.dcp:write_dcp",
    "a folder of torch.distributed.checkpoint",
)
WRITERS.add(
    "safetensors",
    "bytecheckpoint.tools.writers.hf:write_hf",
    "a Hugging Face folder of the model's weights alone",
)
WRITERS.add(
    "torch",
    "bytecheckpoint.tools.writers.torch:write_torch",
    "one file of torch.save, which torch.load(weights_only=True) reads",
)
