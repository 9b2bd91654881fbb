"""Which directory a MODEL argument means."""

import logging

import pytest

from m31jax import CheckpointError, bundled
from m31jax.config import ModelConfig


def test_a_directory_means_itself(tmp_path):
    assert bundled.locate(tmp_path, tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


def test_a_directory_named_tiny_is_reached_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert bundled.locate("./tiny", tmp_path / "cache").resolve() == tmp_path / "tiny"
    assert bundled.locate("tiny", tmp_path / "cache") != tmp_path / "tiny"


def test_tiny_is_made_once_and_says_that_it_is_random(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        first = bundled.locate("tiny", tmp_path)
    assert "random" in caplog.text
    stamps = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert bundled.locate("tiny", tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == stamps
    assert list(tmp_path.iterdir()) == [first]
    config = ModelConfig.from_dir(first)
    assert config.is_m31
    assert config.quantization.experts == "nvfp4"


def test_a_trained_checkpoint_takes_its_place(tmp_path, monkeypatch, caplog):
    (tmp_path / "trained").mkdir()
    monkeypatch.setattr(bundled, "TRAINED", tmp_path / "trained")
    assert bundled.locate("tiny", tmp_path / "cache") == tmp_path / "trained"
    assert "random" not in caplog.text


def test_another_layout_is_another_folder(tmp_path, monkeypatch):
    first = bundled.random_tiny(tmp_path)
    monkeypatch.setattr(bundled, "_SEED", 7)
    assert bundled.random_tiny(tmp_path) != first


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Org/Model", "hf download Org/Model --local-dir Model"),
        ("./Org", "hf download ORG/NAME --local-dir NAME"),
        ("missing", "'missing' does not exist"),
    ],
)
def test_what_is_no_directory_is_refused_with_the_way_out(model, message, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        bundled.locate(model, tmp_path)
    assert message in str(caught.value)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        bundled.locate(tmp_path / "file", tmp_path)
