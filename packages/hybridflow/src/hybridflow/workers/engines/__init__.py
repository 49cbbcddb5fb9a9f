"""Where workers run: here, in processes of this machine, in torchrun's, or as Ray's actors."""
