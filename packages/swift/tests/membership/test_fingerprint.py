import sys
from types import SimpleNamespace

from swift.membership.fingerprint import describe_process, first_difference


def test_equal_descriptions_do_not_differ():
    assert first_difference(describe_process({"a": [1]}), describe_process({"a": [1]})) is None


def test_the_first_difference_is_named():
    ours = {"a": {"b": [1, 2, 3]}, "c": 1}
    assert first_difference(ours, {"a": {"b": [1, 5, 3]}, "c": 2}) == "a.b[1]: expected 2, got 5"
    assert first_difference(ours, {"a": {"b": [1, 2, 3]}}) == "c: expected 1, got None"
    assert first_difference(ours, {"a": {"b": [1, 2]}, "c": 1}) == (
        "a.b: expected [1, 2, 3], got [1, 2]"
    )


def test_a_process_tells_its_processor_and_threads(monkeypatch):
    found = describe_process({})
    assert found["processor"][1]
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    assert first_difference(found, describe_process({})).startswith("threads: expected ")


def test_the_scripts_own_modules_are_part_of_its_code(tmp_path, monkeypatch):
    for name in ("train.py", "model.py", "other.py"):
        (tmp_path / name).write_text("pass")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    monkeypatch.setitem(sys.modules, "model", SimpleNamespace(__file__=str(tmp_path / "model.py")))
    ours = describe_process({})
    (tmp_path / "other.py").write_text("1 + 1")
    assert first_difference(ours, describe_process({})) is None
    for name, told in (("model.py", "modules.model.py"), ("train.py", "script")):
        before = describe_process({})
        (tmp_path / name).write_text("1 + 1")
        found = first_difference(before, describe_process({}))
        assert found.startswith(f"{told}: expected "), found
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "other.py")])
    (tmp_path / "other.py").write_text("2 + 2")
    assert first_difference(before, describe_process({})).startswith("script: expected ")


def test_modules_installed_below_the_script_and_those_elsewhere_are_not_its_code(
    tmp_path, monkeypatch
):
    (tmp_path / "train.py").write_text("pass")
    installed = tmp_path / "env" / "site-packages" / "library.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("pass")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    for name, file in [("library", installed), ("copy", f"/mnt{tmp_path}/train.py")]:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__file__=str(file)))
    assert describe_process({})["modules"] == {}


def test_of_modules_those_that_both_have_imported_are_compared(tmp_path, monkeypatch):
    """Rank 0 may import a logger that the others have no use for."""
    for name in ("train.py", "logger.py"):
        (tmp_path / name).write_text("pass")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    without = describe_process({})
    assert without["modules"] == {}
    monkeypatch.setitem(sys.modules, "log", SimpleNamespace(__file__=str(tmp_path / "logger.py")))
    assert first_difference(without, describe_process({})) is None
    assert first_difference(describe_process({}), without) is None
