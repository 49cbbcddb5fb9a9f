"""The subcommands verify-log and simulate."""

import json

import torch

from swift import cli
from swift.pipeline.log import BoundaryLog
from swift.pipeline.records import Key, Kind


def test_verify_log_prints_files_and_their_faults(tmp_path, capsys):
    writer = BoundaryLog(tmp_path).open("run-7", 3)
    for iteration in (4, 5):
        writer.append(Key(Kind.GRADIENT, iteration, 0), torch.ones(100))
    writer.close()
    assert cli.main(["verify-log", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "stage 3, run run-7, steps 4 to 5, 2 records" in shown
    assert shown.rstrip().endswith("whole")
    (path,) = tmp_path.rglob("*.log")
    data = bytearray(path.read_bytes())
    data[-60] ^= 1
    path.write_bytes(data)
    assert cli.main(["verify-log", str(tmp_path), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["files"]
    assert "gradient of iteration 5, micro-batch 0" in found["damage"][0]
    path.write_bytes(data[:-100])
    assert cli.main(["verify-log", str(tmp_path)]) == 0
    assert "1 records" in (shown := capsys.readouterr().out)
    assert "bytes torn off" in shown
    assert cli.main(["verify-log", str(tmp_path), "--run", "run-8"]) == 1
    assert "expected messages of run 'run-8', got run 'run-7'" in capsys.readouterr().out


def test_simulate_prints_each_way_for_each_rate(capsys):
    asked = ["simulate", "--steps", "2000", "--mtbf", "20", "200", "--seeds", "2"]
    assert cli.main([*asked, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["mtbf_h"], row["way"]) for row in rows] == [
        (hours, way) for hours in (20, 200) for way in ("replica", "replay", "checkpoint")
    ]
    assert all(row["is_simulated"] for row in rows)
    assert rows[0]["total_s"] < rows[2]["total_s"] > rows[5]["total_s"] >= 2000
    assert cli.main(asked) == 0
    assert capsys.readouterr().out.startswith("simulated: 128 machines")
