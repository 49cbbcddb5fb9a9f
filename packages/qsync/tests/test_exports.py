import subprocess
import sys

import pytest

import qsync


def test_planning_needs_no_torch():
    code = (
        "import sys, qsync; qsync.Graph, qsync.CostMapper, qsync.Plan, qsync.bucket_ends, "
        "qsync.recover_precision; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'qsync' has no attribute 'spam'"):
        _ = qsync.spam


@pytest.mark.parametrize("name", qsync.__all__)
def test_every_exported_name_is_there(name):
    assert getattr(qsync, name) is not None
