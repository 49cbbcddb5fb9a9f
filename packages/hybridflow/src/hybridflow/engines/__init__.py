"""Where workers run: in this process, in processes of this machine, or as Ray's actors."""
