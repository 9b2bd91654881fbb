"""bench: one honest row a cell and implementation."""

import json

import pytest
from click.testing import CliRunner

from m31jax.ops import bench, oracle, rms_norm

FIGURES = {"median_us", "p10_us", "p90_us", "gb_s", "floor_us", "ratio_to_floor", "bytes_moved"}


@pytest.fixture
def one_cell(monkeypatch):
    monkeypatch.setattr(rms_norm, "CELLS", rms_norm.CELLS[2:])
    return rms_norm.CELLS[0]


def test_rows(one_cell):
    (row,) = bench.run(["rms_norm"], rounds=3)
    assert (row["op"], row["cell"], row["impl"], row["arch"]) == (
        "rms_norm",
        one_cell.why,
        "reference",
        "cpu",
    )
    assert row["ok"] is True
    assert row["bytes_moved"] == rms_norm.bytes_moved(one_cell.spec)
    assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]
    assert row["gb_s"] == pytest.approx(row["bytes_moved"] / row["median_us"] / 1e3, abs=1e-3)
    assert row["ratio_to_floor"] == pytest.approx(row["median_us"] / row["floor_us"], rel=0.01)
    assert row["device"] == oracle.device().device_kind
    assert set(row["versions"]) == {"python", "m31jax", "jax", "jaxlib"}
    assert "ratios" in row["note"]
    assert row["is_cold"] is False


def test_a_wrong_implementation_is_timed_and_told(one_cell, monkeypatch):
    wrong = oracle.Verdict("rms_norm", one_cell.why, oracle.Impl(), "disagrees", "all wrong")
    monkeypatch.setattr(oracle, "verdict", lambda *args: wrong)
    (row,) = bench.run(["rms_norm"], rounds=2)
    assert row["ok"] is False
    assert row["problem"] == "all wrong"
    assert set(row) >= FIGURES
    result = CliRunner().invoke(bench.main, ["rms_norm", "--rounds", "2"])
    assert result.exit_code == 1
    assert "all wrong" in result.stdout
    assert "disagrees" in result.stderr


def test_what_is_not_covered_is_not_timed(one_cell, monkeypatch):
    limit = oracle.Verdict("rms_norm", one_cell.why, oracle.Impl(), "not covered", "rows of 7")
    monkeypatch.setattr(oracle, "verdict", lambda *args: limit)
    (row,) = bench.run(["rms_norm"], rounds=2)
    assert row["ok"] is None
    assert row["problem"] == "rows of 7"
    assert not set(row) & FIGURES
    assert "rows of 7" in bench.table([row])


def test_command(one_cell):
    result = CliRunner().invoke(bench.main, ["rms_norm", "--rounds", "2", "--json"])
    assert result.exit_code == 0
    assert result.stderr.strip() == bench.CPU_NOTE
    (row,) = json.loads(result.stdout)
    assert set(row) >= FIGURES
    assert CliRunner().invoke(bench.main, ["softmax"]).exit_code == 2


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no kind 'fast'"):
        bench.run(["rms_norm"], kinds=["fast"])
    with pytest.raises(ValueError, match="no op 'softmax'"):
        bench.run(["softmax"])
    assert bench.run(["rms_norm"], kinds=["cute"]) == []


def test_copies_follow_the_inputs_on_a_gpu(monkeypatch):
    """Enough copies to exceed the cache, but not more than one program can hold."""

    class Device:
        platform = "gpu"

    class Held:
        def __init__(self, nbytes):
            self.nbytes = nbytes

    monkeypatch.setattr(oracle, "device", Device)
    mib = 1 << 20
    assert bench._copies([Held(6 * mib)]) == (22, True)
    assert bench._copies([Held(1 * mib)]) == (32, False)
    assert bench._copies([Held(400 * mib)]) == (2, True)
