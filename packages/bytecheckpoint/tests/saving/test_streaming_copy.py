import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bytecheckpoint.saving.streaming_copy import MIN_BYTES, is_streamable, stream


@given(num_bytes=st.integers(0, 3000), at=st.integers(0, 70), source_at=st.integers(0, 70))
@example(num_bytes=33_554_433, at=3, source_at=5)
def test_copies_these_bytes_and_no_others(num_bytes, at, source_at):
    source = torch.randint(0, 256, (num_bytes + source_at,), dtype=torch.uint8)[source_at:]
    memory = torch.full((num_bytes + at + 70,), 7, dtype=torch.uint8)
    stream([(memory[at : at + num_bytes], source)])
    assert torch.equal(memory[at : at + num_bytes], source)
    assert (memory[:at] == 7).all()
    assert (memory[at + num_bytes :] == 7).all()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_tensors_of_several_types(num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        values = [
            torch.randn(n).to(kind)
            for n in (1, 100_003, 9_000_001)
            for kind in (torch.float32, torch.bfloat16, torch.complex64)
        ]
        targets = [torch.zeros_like(value) for value in values]
        stream(zip(targets, values, strict=True))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(targets, values, strict=True))


def test_only_plain_bytes_are_streamable():
    large = torch.randn(MIN_BYTES // 4 + 256)
    assert is_streamable(torch.empty_like(large), large)
    square = large[: 256 * 256].view(256, 256)
    for source in (
        large[: MIN_BYTES // 8],
        square.t(),
        torch.view_as_complex(large[: len(large) // 2 * 2].view(-1, 2)).conj(),
        large.double(),
        large.to("meta"),
    ):
        target = torch.empty(
            source.shape, dtype=torch.float32 if source.is_floating_point() else source.dtype
        )
        assert not is_streamable(target, source)
