"""The choice of bit widths: the assignment problem, its solvers and their explanation."""
