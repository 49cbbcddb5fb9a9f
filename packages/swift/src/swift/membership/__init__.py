"""Who is in the run: supervisors, ranks, spares, heartbeats and fences."""
