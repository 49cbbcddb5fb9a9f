"""The widths at which rows can be sent: one registry for policies, planner, buffers and reports.

A width is a number of bits a value. The module imports neither torch nor numba, so that
`adaqp --help` can list the widths at once.
"""

from dataclasses import dataclass

from shared.registry import Registry

__all__ = ["AS_IS", "DROPPED", "WIDTHS", "Width"]

# Rows are sent exactly, in their own dtype, whatever its number of bits.
AS_IS = 32
# Nothing is sent, and the receiver sees zeros: a control, which the planner never chooses.
DROPPED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """How values of one width are encoded.

    Attributes:
        is_quantised: whether values become codes of `shared.kernels.quantize`, with a scale and a
            zero point a row; the planner counts the variance that this rounding adds.
        dtype: name of the torch dtype that unquantised values are cast to; None: their own dtype.
        colour: colour of the width in figures, as "#rrggbb".
    """

    is_quantised: bool = False
    dtype: str | None = None
    colour: str = "#999999"


WIDTHS: Registry[int, Width] = Registry("width")
WIDTHS.add(1, Width(is_quantised=True, colour="#f0e442"), "1 bit, stochastic rounding")
WIDTHS.add(2, Width(is_quantised=True, colour="#56B4E9"), "2 bits, stochastic rounding")
WIDTHS.add(4, Width(is_quantised=True, colour="#009E73"), "4 bits, stochastic rounding")
WIDTHS.add(8, Width(is_quantised=True, colour="#0072B2"), "8 bits, stochastic rounding")
WIDTHS.add(16, Width(dtype="bfloat16", colour="#CC79A7"), "bfloat16")
WIDTHS.add(AS_IS, Width(colour="#000000"), "the rows' own dtype, without error")
