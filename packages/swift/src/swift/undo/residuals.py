"""What an inverse misses of a tensor: units in the last place, one byte a value."""

from dataclasses import dataclass, field

from torch import Tensor

from shared.kernels.adam import ESCAPE, add_ulps, ulps_between

__all__ = ["Residuals"]


@dataclass(slots=True)
class Residuals:
    """By tensor name: codes of its shape (int8), and the values whose code escapes, in order."""

    codes: dict[str, Tensor] = field(default_factory=dict)
    escapes: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for held in (self.codes, self.escapes) for t in held.values())

    def keep(self, name: str, value: Tensor, guess: Tensor) -> None:
        """Store what turns `guess` into `value`, float32 or bfloat16, in place of what was kept."""
        codes = ulps_between(value, guess)
        if name in self.codes and self.codes[name].shape == codes.shape:
            self.codes[name].copy_(codes)
        else:
            self.codes[name] = codes
        self.escapes[name] = value[codes == ESCAPE]

    def restore(self, name: str, guess: Tensor) -> Tensor:
        """The value that was kept, bit for bit, of the same guess."""
        codes = self.codes[name]
        value = add_ulps(guess, codes)
        value[codes == ESCAPE] = self.escapes[name]
        return value
