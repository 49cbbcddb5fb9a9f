"""Full-graph GNN training across hosts with adaptively quantised messages behind compute."""

import shared

# Other distributions install a module of this name too, and theirs may have replaced ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "adaqp needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install adaqp again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

__version__ = "0.1.0"
