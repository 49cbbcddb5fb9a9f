import logging
import time

from numba import njit

from shared.kernels.jit import compile_s, compiled


def test_a_function_that_cannot_be_cached_is_compiled_all_the_same(caplog):
    # numba finds no place to cache a function without a source file and raises: what it also does
    # where neither the source folder nor the user's cache folder can be written.
    namespace: dict = {}
    exec("def triple(x):\n    return 3 * x", namespace)  # noqa: S102
    with caplog.at_level(logging.INFO, logger="shared.kernels.jit"):
        triple = compiled(namespace["triple"])
    assert triple(14) == 42
    assert "no machine-code cache for triple" in caplog.text


def test_only_the_first_call_of_a_kernel_is_compiling():
    def add_up(count):
        total = 0
        for at in range(count):
            total += at * at % 7
        return total

    kernel = njit(add_up)  # without a cache: it is compiled here in any case
    before, begun = compile_s(), time.perf_counter()
    assert kernel(10) == add_up(10)
    first_s, spent_s = compile_s() - before, time.perf_counter() - begun
    assert 0.2 * spent_s < first_s < spent_s
    assert kernel(20_000_000) > 0  # takes a while, of which nothing is compiling
    assert compile_s() - before == first_s
