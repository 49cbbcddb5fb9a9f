import pytest

from heta.cli import main


def test_wrong_usage_is_status_2():
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--fast"])
    assert caught.value.code == 2
