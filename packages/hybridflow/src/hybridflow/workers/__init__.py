"""Workers on ranks: the controller, calls and their protocols, batches, engines."""
