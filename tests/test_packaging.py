"""The five import names are this repository's, and no foreign package of the same name wins."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["modules", "datamodules", "callbacks", "conf", "train"])
def test_import_names_resolve_inside_the_repository(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).is_relative_to(ROOT)


def test_the_entry_point_stays_short() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) <= 100


def test_every_source_file_stays_readable() -> None:
    folders = ("modules", "datamodules", "callbacks", "conf", "tests")
    long = [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if len(path.read_text().splitlines()) > 250
    ]
    assert long == []
