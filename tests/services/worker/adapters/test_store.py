"""Orders to load adapters, and their reports."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.adapters.memory import AdapterMemory
from services.worker.adapters.sites import LoadedAdapter, Part, Site, layers_of
from services.worker.adapters.store import AdapterStore
from services.worker.layers.linear import Linear
from services.worker.layers.parallel import as_shard
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import LoadAdapter
from tests.services.worker.adapters.adapter_folders import random_layers, write_adapter

QUERY = "model.layers.0.self_attn.q_proj"
SHAPES = {QUERY: (32, 16)}
SITES = [Site(Linear(16, {"q_proj": 32}), {QUERY: Part(0, as_shard(32), as_shard(16))})]


class Loaded:
    """A store, and its adapters."""

    def __init__(self, **settings: Any) -> None:
        self.adapters: list[LoadedAdapter] = []
        config = WorkerConfig(**settings)
        layers, dtype = layers_of(SITES), torch.float32
        memory = AdapterMemory(config, SITES, layers, dtype)
        self.store = AdapterStore(
            config, layers, dtype, memory, self.adapters.append, lambda name: None
        )
        self.store.fill()

    def load(self, name: str, path: str | None = None, load: str = "1", **options: Any) -> str:
        """The problem of an order, or nothing."""
        self.store.load(LoadAdapter(load, name, name if path is None else path, **options))
        rows = [row for row in self.store.rows if row.load == load]
        assert len(rows) == 1
        return rows[0].problem

    @property
    def names(self) -> list[str]:
        return [row.name for row in self.store.rows if not row.problem]


def write(folder: Path, seed: int = 0) -> Path:
    return write_adapter(folder, random_layers(SHAPES, 4, seed))


def test_adapters_of_the_settings(tmp_path: Path) -> None:
    directory = tmp_path / "dir"
    for name in ("b", "a"):
        write(directory / name)
    (directory / "bad").mkdir()
    (directory / "notes.txt").touch()
    found = Loaded(lora_modules=[f"a={write(tmp_path / 'own', seed=1)}"], lora_dir=directory)
    assert found.names == ["a", "b"]
    assert [each.digest for each in found.adapters] == [
        row.digest for row in found.store.rows if not row.problem
    ]
    assert found.store.rows[0].rank == 4
    assert found.store.rows[0].num_bytes == 4 * 4 * (32 + 16)
    assert "no adapter_config.json" in found.store.rows[-1].problem


def test_a_bad_module_of_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lora-modules: sql: there is no such folder"):
        Loaded(lora_modules=[f"sql={tmp_path / 'none'}"])
    with pytest.raises(ConfigError, match=r"lora-dir: .*none: No such file"):
        Loaded(lora_dir=tmp_path / "none")


def test_orders(tmp_path: Path) -> None:
    write(tmp_path / "in" / "sql")
    found = Loaded(lora_dir=tmp_path)
    assert "no adapter_config.json" in found.store.rows[0].problem  # of the folder ``in``
    assert found.load("sql", "in/sql") == ""
    assert found.names == ["sql"]
    (row,) = (row for row in found.store.rows if not row.problem)
    assert (row.path, row.load, row.digest) == ("in/sql", "1", found.adapters[0].digest)
    found.store.load(LoadAdapter("1", "sql", "in/sql"))  # from another scheduler
    assert len(found.adapters) == 1

    assert found.load("sql", "in/sql", load="3") == ""  # the same bytes
    assert found.names == ["sql"]
    write(tmp_path / "in" / "sql", seed=1)
    assert found.load("sql", "in/sql", load="4") == ""
    assert found.names == ["sql", "sql"]
    first, second = (row for row in found.store.rows if not row.problem)
    assert first.digest != second.digest
    assert first.loaded_s <= second.loaded_s
    found.store.forget(first)
    assert [row.digest for row in found.store.rows if not row.problem] == [second.digest]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/etc", "'/etc' is not a relative path in lora-dir"),
        ("../own", "is not a relative path"),
        ("a/../../own", "is not a relative path"),
        ("a\0", "is not a relative path"),
        ("out", "'out' leads out of lora-dir"),
        ("none", "there is no such folder"),
        ("n" * 300, "cannot be read: File name too long"),
        ("loop", "'loop' cannot be read: Symlink loop"),
        ("files", "'files' leads out of lora-dir"),
        (".", "no adapter_config.json"),
    ],
)
def test_paths(tmp_path: Path, path: str, problem: str) -> None:
    write(tmp_path / "own")
    directory = tmp_path / "dir"
    directory.mkdir()
    (directory / "out").symlink_to(tmp_path / "own")
    (directory / "loop").symlink_to("loop")
    (directory / "files").mkdir()
    for file in (tmp_path / "own").iterdir():
        (directory / "files" / file.name).symlink_to(file)
    (directory / os.fsdecode(b"no\xff text")).mkdir()
    found = Loaded(lora_dir=directory, lora_modules=[])
    before = found.names
    assert before == []
    assert problem in found.load("sql", path)
    assert found.names == before


def test_nothing_is_read_without_a_directory(tmp_path: Path) -> None:
    assert "lora-dir is not set" in Loaded(enable_lora=True).load("sql", str(tmp_path))


def test_the_memory_of_adapters(tmp_path: Path) -> None:
    """Room is for two adapters of the largest rank."""
    for name in ("a", "b", "c"):
        write(tmp_path / name)
    found = Loaded(lora_dir=tmp_path, max_cpu_loras=2, max_lora_rank=4)
    assert found.names == ["a", "b"]
    assert found.load("c") == (
        "max-cpu-loras: 2 of rank 4 are 1536 bytes of memory, 1536 of which are taken, and this"
        " adapter needs 768; raise it, or unload another one"
    )
    found.store.forget(found.store.rows[0])
    assert found.load("c", load="2") == ""
    assert found.names == ["b", "c"]


def test_problems_are_few(tmp_path: Path) -> None:
    found = Loaded(lora_dir=tmp_path)
    for number in range(40):
        assert found.load("sql", "none", load=str(number))
    assert [row.load for row in found.store.rows] == [str(number) for number in range(24, 40)]
