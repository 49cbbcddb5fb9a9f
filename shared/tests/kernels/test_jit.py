import logging

from shared.kernels.jit import compiled


def test_a_function_that_cannot_be_cached_is_compiled_all_the_same(caplog):
    # numba finds no place to cache a function without a source file and raises: what it also does
    # where neither the source folder nor the user's cache folder can be written.
    namespace: dict = {}
    exec("def triple(x):\n    return 3 * x", namespace)  # noqa: S102
    with caplog.at_level(logging.INFO, logger="shared.kernels.jit"):
        triple = compiled(namespace["triple"])
    assert triple(14) == 42
    assert "no machine-code cache for triple" in caplog.text
