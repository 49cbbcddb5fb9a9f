import pytest

from shared.errors import TopologyError
from shared.topology import device
from shared.topology.device import PRESETS, Device


def test_presets_are_found_by_name():
    gpus = {"H200", "H100", "A100_80", "A100_40", "A800", "V100_32", "P100_12", "T4", "L4"}
    assert set(PRESETS) == {*gpus, "CPU"}
    assert all(getattr(device, name) is preset for name, preset in PRESETS.items())


def test_presets_name_their_source():
    assert all(name in device.__doc__ for name in PRESETS)


def test_data_sheets_ratios():
    # Published as ratios too: the H200's memory is 1.4 times as fast and 1.76 times as large.
    h200, h100 = PRESETS["H200"], PRESETS["H100"]
    assert h200.memory_bytes_per_s / h100.memory_bytes_per_s == pytest.approx(1.43, abs=0.01)
    assert h200.memory_bytes / h100.memory_bytes == pytest.approx(1.76, abs=0.01)
    # A V100's tensor cores multiply 8 times as fast as its other cores.
    assert PRESETS["V100_32"].flops_per_s / PRESETS["V100_32"].flops_fp32_per_s == pytest.approx(
        8, rel=0.01
    )


def test_narrow_types_have_peaks_where_matrix_units_take_them():
    for name in ("H100", "L4", "T4", "A100_40"):
        assert PRESETS[name].int8_ops_per_s == pytest.approx(
            2 * PRESETS[name].flops_per_s, rel=0.01
        )
    for name in ("V100_32", "P100_12", "CPU"):
        assert PRESETS[name].int8_ops_per_s is None
    with_fp8 = {name for name, preset in PRESETS.items() if preset.fp8_flops_per_s}
    assert with_fp8 == {"H200", "H100", "L4"}


@pytest.mark.parametrize(
    "key",
    ["flops_per_s", "flops_fp32_per_s", "memory_bytes_per_s", "int8_ops_per_s", "fp8_flops_per_s"],
)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_numbers_must_be_positive(key, value):
    numbers = dict.fromkeys(("flops_per_s", "flops_fp32_per_s", "memory_bytes_per_s"), 1.0)
    with pytest.raises(TopologyError, match=f"device 'X': {key} must be positive and finite"):
        Device(name="X", kind="cpu", memory_bytes=1, **{**numbers, key: value})
