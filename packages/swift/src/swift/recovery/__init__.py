"""What to do after a failure, and the transfer of state that it asks for."""
