"""The notebook of the yard: committed without results, and each of its cells does what it says."""

import re
import time
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
NOTEBOOK = Path(__file__).parents[1] / "examples/yard.ipynb"
LIMIT_S = 180


def test_notebook_is_whole_and_carries_no_results():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) > 5
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_notebook_runs_and_shows_what_it_says(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    begun = time.monotonic()
    nbclient.NotebookClient(
        notebook, timeout=LIMIT_S, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert time.monotonic() - begun < LIMIT_S
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    text = "".join(one.text for one in outputs if one.output_type == "stream")
    pictures = [
        one.data["image/svg+xml"] for one in outputs if "image/svg+xml" in one.get("data", {})
    ]
    assert len(pictures) == 1
    assert "14,000 departures, 25 features each" in text
    ours, bank = map(
        float, re.search(r"average precision ([\d.]+); .* ([\d.]+)$", text, re.MULTILINE).groups()
    )
    assert ours > 0.5
    assert bank > 0.5
    shares = [float(share) for share in re.findall(r"^step \d+: ([\d.]+)% of", text, re.MULTILINE)]
    assert shares
    assert min(shares) > 95
    found = re.findall(r"^(\w+): accuracy ([\d.]+), ([\d.]+) MB sent$", text, re.MULTILINE)
    (_, exact, exact_mb), (_, adaptive, adaptive_mb) = found
    assert float(exact) > 0.3, "the largest of 16 airlines flies 17 % of the flights"
    assert float(adaptive) > float(exact) - 0.03
    assert float(adaptive_mb) < float(exact_mb) / 2
    assert list(tmp_path.iterdir()) == [], "nothing is left beside the notebook"
