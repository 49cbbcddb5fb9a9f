"""The widths that rows may travel at: one registry for policies, planner, buffers and reports.

A width is a number of bits a value. It imports nothing heavy, so that `adaqp --help` can list it.
"""

from dataclasses import dataclass

from shared.registry import Registry

__all__ = ["AS_IS", "DROPPED", "WIDTHS", "Width"]

# The rows' own dtype, whatever it is, without error.
AS_IS = 32
# Nothing is sent, and the receiver sees zeros: for controls, not to be chosen by a planner.
DROPPED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """How values of one width are coded.

    Attributes:
        is_quantised: codes of `shared.kernels.quantize`, with a scale and a zero point a row; the
            planner counts the variance that rounding adds.
        dtype: name of the torch dtype that other values are cast to; None: their own.
        colour: of the width in pictures.
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
