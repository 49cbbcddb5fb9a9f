import subprocess
import sys

LOAD = """
import sys
from shared.comms.launch.shipping import found
name, file, qualname = sys.argv[1:]
function = found(name, file, qualname)
assert found(name, file, qualname) is function
print(function())
"""


def loaded(name, file):
    """What a process that can import nothing but packages gets from a shipped function."""
    command = [sys.executable, "-I", "-c", LOAD, name, str(file), "answer"]
    run = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/", timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_a_file_is_loaded_by_its_path(tmp_path):
    file = tmp_path / "alone.py"
    file.write_text("def answer(): return __name__\n")
    assert loaded("alone", file) == "alone"


def test_a_file_finds_its_siblings_where_no_path_leads_to_them(tmp_path):
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "outer" / "further.py").write_text("VALUE = 40\n")
    (folder / "near.py").write_text("from ..further import VALUE\nNEAR = VALUE + 1\n")
    file = folder / "module.py"
    file.write_text("from .near import NEAR\ndef answer(): return NEAR + 1\n")
    assert loaded("outer.inner.module", file) == "42"


def test_a_package_is_loaded_by_its_init_file(tmp_path):
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "outer" / "beside.py").write_text("VALUE = 1\n")
    (folder / "near.py").write_text("NEAR = 2\n")
    file = folder / "__init__.py"
    file.write_text(
        "from ..beside import VALUE\nfrom .near import NEAR\ndef answer(): return VALUE + NEAR\n"
    )
    assert loaded("outer.inner", file) == "3"


def test_a_parent_package_runs_its_init_file(tmp_path):
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("VALUE = 7\n")
    file = folder / "module.py"
    file.write_text("from . import VALUE\ndef answer(): return VALUE\n")
    assert loaded("outer.inner.module", file) == "7"


SCRIPT = """
import multiprocessing
from shared.comms import RankPool

def doubled(value):
    return 2 * value

def in_a_process(value):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(doubled, (value,))

if __name__ == "__main__":
    with RankPool(1) as pool:
        print(*pool.run(in_a_process, 21).results)
"""


def test_a_rank_starts_processes_that_know_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, str(script)], check=False, capture_output=True, text=True, timeout=100
    )
    assert run.stdout == "42\n", run.stderr
