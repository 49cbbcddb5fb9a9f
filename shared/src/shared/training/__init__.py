"""What long runs tell their users: sentences (`messages`), and progress and metrics (`progress`)."""

from shared.training.messages import (
    check_device,
    check_gpu,
    check_loss,
    check_num_nodes,
    check_shapes,
    log_resumed,
    show_resumed,
)

__all__ = [
    "check_device",
    "check_gpu",
    "check_loss",
    "check_num_nodes",
    "check_shapes",
    "log_resumed",
    "show_resumed",
]
