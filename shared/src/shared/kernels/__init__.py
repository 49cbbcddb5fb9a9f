"""Numeric kernels of the yard, one folder an operator, each in three forms.

`reference.py` defines the operator in plain torch, `cpu.py` is numba or vectorised torch, `gpu.py`
is Triton. Import the operators from their folders (`from shared.kernels.quantize import
quantize`): a function exported here would hide the folder of its name.
"""

__all__: list[str] = []
