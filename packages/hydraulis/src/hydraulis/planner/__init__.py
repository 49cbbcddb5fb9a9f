"""Plans: which ranks take which documents, in which micro-batches."""
