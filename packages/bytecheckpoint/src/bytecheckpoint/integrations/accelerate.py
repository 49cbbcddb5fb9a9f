"""Makes Accelerator.save_state and load_state store models and other objects in our format."""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from bytecheckpoint.loading.one_checkpoint import load
from bytecheckpoint.saving.one_checkpoint import save
from bytecheckpoint.state.rng import rng_state
from bytecheckpoint.storage.files.manifest import MANIFEST_NAME
from shared.errors import ConfigError

__all__ = ["attach"]

_FOLDER = "bytecheckpoint"


def attach(accelerator: Accelerator, objects: dict[str, Any]) -> None:
    """Saves and loads objects with every `accelerator.save_state` and `load_state` from now on.

    Accelerate then no longer writes the models' weights; they, and everything else in `objects`,
    are stored in the subfolder `bytecheckpoint` with checksums, each tensor once, and load on any
    number of ranks. Accelerate still writes optimizers and schedulers, and loads its own copies.
    Under its FSDP and DeepSpeed plugins Accelerate also writes models itself: use `Checkpointer`
    there.

    Args:
        accelerator: the Accelerator that has prepared the models.
        objects: objects to save, by name, as `accelerator.prepare` returned them: at least all
            models.
    """

    def state() -> dict[str, Any]:
        plain = {
            name: value.optimizer if isinstance(value, AcceleratedOptimizer) else value
            for name, value in objects.items()
        }
        return plain | {"rng": rng_state()}

    def on_save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        known = {id(value) for value in objects.values()}
        missing = [type(model).__name__ for model in models if id(model) not in known]
        if missing:
            raise ConfigError(
                f"expected all models that the Accelerator prepared among {list(objects)}, but "
                f"not {', '.join(missing)}; give attach() what prepare() returned"
            )
        save(os.path.join(output_dir, _FOLDER), state(), overwrite=True)
        weights.clear()

    def on_load(models: list[nn.Module], input_dir: str) -> None:
        folder = os.path.join(input_dir, _FOLDER)
        if not os.path.exists(os.path.join(folder, MANIFEST_NAME)):
            # Saved before this was attached: Accelerate loads it.
            return
        load(folder, state())
        models.clear()

    accelerator.register_save_state_pre_hook(on_save)
    accelerator.register_load_state_pre_hook(on_load)
