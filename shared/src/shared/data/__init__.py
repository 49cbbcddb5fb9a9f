"""Data that several packages read: real flights, streams of events, negatives, ranking metrics.

`events` is a list of events, `formats` reads one from files and folders (`tables` and `frames` are
its parts, `node_ids` the user's own ids, `time_units` seconds and others), `streams` and `flights`
need no file; `cli` has the options of commands that read events, and `prediction` those that score
new rows. `negatives` holds what draws of negatives have in common, and `metrics` how well links are
told from others. `texts` is what language models read. Nothing is downloaded.
"""
