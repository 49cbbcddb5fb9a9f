"""The job: sums of many ranges of one array, by a method from the registry.

`ranges` checks what is asked and dispatches; `registry` names the methods, each in a file of its own.
"""
