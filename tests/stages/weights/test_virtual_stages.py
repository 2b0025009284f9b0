"""The cache of stage files: nothing is cut, hashed or fetched twice, and a damaged file is noticed."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from spanmesh_proto.errors import ModelError, UncuttableModel
from stages.certification import certify as certification
from stages.certification.certify import certify
from stages.layers import LayerRange
from stages.slicing.architectures import cutting_rules
from stages.weights.assembly import wrong_pieces
from stages.weights.disk_cache import Stamp, default_root, make_room
from stages.weights.virtual_stages import StageCache, StageFile
from tests.support.tiny_models import TinyModel

LAYERS = LayerRange(2, 5)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return TinyModel("llama").write(tmp_path / "model.gguf")


@pytest.fixture
def cache(tmp_path: Path) -> StageCache:
    return StageCache(tmp_path / "cache")


def stored_files(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache" / "stages").iterdir()}


def damage(path: Path) -> None:
    """Change one byte, keeping the size."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def whole_stage(sha256: str) -> set[str]:
    return {f"{sha256}.gguf", f"{sha256}.json", f"{sha256}.recipe"}


def test_a_stage_file_is_named_by_its_recipe(cache: StageCache, source: Path, tmp_path: Path) -> None:
    stage = cache.cut(source, LAYERS)
    assert (stage.layers, stage.n_layers) == (LAYERS, 6)
    assert stage.path.name == f"{stage.sha256}.gguf"
    recipe = cache.recipe(stage.sha256)
    assert recipe is not None
    assert wrong_pieces(recipe, stage.path) == []
    assert stage.size_bytes == stage.path.stat().st_size == recipe.size_bytes
    assert cache.find(stage.sha256) == stage.path
    assert stored_files(tmp_path) == whole_stage(stage.sha256)


def test_a_second_cut_reads_neither_source_nor_stage(cache: StageCache, source: Path, tmp_path: Path) -> None:
    stage = cache.cut(source, LAYERS)
    changed_at = stage.path.stat().st_mtime_ns
    totals: list[tuple[int, int]] = []
    again = StageCache(tmp_path / "cache").cut(
        source, LAYERS, progress=lambda done, total: totals.append((done, total))
    )
    assert again == stage
    assert again.path.stat().st_mtime_ns == changed_at
    assert totals == [(stage.size_bytes, stage.size_bytes)]  # nothing was hashed


def test_other_layers_are_another_stage(cache: StageCache, source: Path) -> None:
    assert cache.cut(source, LayerRange(0, 2)).sha256 != cache.cut(source, LAYERS).sha256


def test_a_copy_of_the_model_is_the_same_model(cache: StageCache, source: Path, tmp_path: Path) -> None:
    stage = cache.cut(source, LAYERS)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(source.read_bytes())
    assert cache.cut(copy, LAYERS) == stage


def test_a_changed_model_is_cut_again(cache: StageCache, source: Path) -> None:
    stage = cache.cut(source, LAYERS)
    TinyModel("llama", seed=2).write(source)
    other = cache.cut(source, LAYERS)
    assert other.sha256 != stage.sha256
    assert other.path.read_bytes() != stage.path.read_bytes()


@pytest.mark.parametrize("harm", ["truncated", "altered", "removed", "stamp lost"])
def test_a_damaged_stage_is_made_again(cache: StageCache, source: Path, harm: str) -> None:
    stage = cache.cut(source, LAYERS)
    whole = stage.path.read_bytes()
    if harm == "truncated":
        os.truncate(stage.path, stage.size_bytes - 1)
    elif harm == "altered":
        damage(stage.path)
    elif harm == "removed":
        stage.path.unlink()
    else:
        damage(stage.path)
        stage.path.with_suffix(".json").write_text("{")
    assert cache.find(stage.sha256) is None
    assert not stage.path.exists()
    assert cache.cut(source, LAYERS) == stage
    assert stage.path.read_bytes() == whole


def test_a_stage_that_was_only_touched_stays(cache: StageCache, source: Path) -> None:
    stage = cache.cut(source, LAYERS)
    os.utime(stage.path)
    assert cache.find(stage.sha256) == stage.path


def test_a_damaged_index_does_not_matter(cache: StageCache, source: Path, tmp_path: Path) -> None:
    stage = cache.cut(source, LAYERS)
    (entry,) = (tmp_path / "cache" / "sources").iterdir()
    entry.write_text("nonsense")
    stage.path.with_suffix(".recipe").write_text("nonsense")
    assert StageCache(tmp_path / "cache").cut(source, LAYERS) == stage


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_only_a_hash_becomes_a_path(cache: StageCache, name: str) -> None:
    for use in (cache.find, cache.store.partial, cache.recipe):
        with pytest.raises(ModelError, match="is not a sha256 in lower-case hex"):
            use(name)


def test_an_unknown_family_is_checked_once_for_each_cut(
    cache: StageCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(cutting_rules.FAMILIES, "internlm2")
    source = TinyModel("internlm2").write(tmp_path / "model.gguf")
    with capture_logs() as logs:
        cache.cut(source, LayerRange(0, 2))
        cache.cut(source, LayerRange(2, 6))
    events = [entry["event"] for entry in logs]
    assert events == ["self_check_started", "self_check_passed", "stage_cut", "stage_cut"]


def test_cutting_at_the_same_time(source: Path, tmp_path: Path) -> None:
    def cut(_number: int) -> StageFile:
        return StageCache(tmp_path / "cache").cut(source, LAYERS)

    with ThreadPoolExecutor(8) as threads:
        stages = set(threads.map(cut, range(16)))
    assert len(stages) == 1
    (stage,) = stages
    recipe = StageCache(tmp_path / "cache").recipe(stage.sha256)
    assert recipe is not None
    assert wrong_pieces(recipe, stage.path) == []
    assert stored_files(tmp_path) == whole_stage(stage.sha256)


def test_a_refused_family_leaves_no_stage(
    cache: StageCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certification, "certify_isolated", certify)
    monkeypatch.delitem(cutting_rules.FAMILIES, "granite")
    source = TinyModel("granite").write(tmp_path / "model.gguf")
    for _ in range(2):
        with pytest.raises(UncuttableModel, match="no certified rules for 'granite'"):
            cache.cut(source, LAYERS)
    assert not (tmp_path / "cache" / "stages").exists()


def test_a_cache_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"cannot make the folder .*file"):
        StageCache(tmp_path / "file").cut(source, LAYERS)


def test_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "spanmesh"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "spanmesh"


def test_files_that_are_no_stages_are_left_alone(cache: StageCache, source: Path) -> None:
    stage = cache.cut(source, LAYERS)
    foreign = stage.path.with_name("notes.gguf")
    foreign.write_bytes(b"mine")
    assert [found.sha256 for found in cache.store.stages()] == [stage.sha256]
    make_room(cache.store, 0, 1)
    assert foreign.exists()
    assert not stage.path.exists()


def test_what_has_come_of_a_stage_counts(cache: StageCache, source: Path) -> None:
    stage = cache.cut(source, LAYERS)
    coming = "ab" * 32
    cache.store.partial(coming).write_bytes(os.urandom(2**16))
    limit_bytes = sum(found.size_bytes for found in cache.store.stages())
    make_room(cache.store, 0, limit_bytes, keep={coming})
    assert stage.path.exists()
    make_room(cache.store, 1, limit_bytes, keep={coming})
    assert not stage.path.exists()
    assert cache.store.partial(coming).exists()


def test_a_stage_that_goes_while_it_is_looked_at_is_not_there(
    cache: StageCache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = cache.cut(source, LAYERS)
    load = Stamp.load

    def load_and_remove(path: Path) -> Stamp | None:
        stamp = load(path)
        stage.path.unlink(missing_ok=True)
        return stamp

    monkeypatch.setattr(Stamp, "load", load_and_remove)
    assert cache.find(stage.sha256) is None


def test_a_stage_that_is_read_again_is_on_the_disk_before_it_is_believed(
    cache: StageCache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = cache.cut(source, LAYERS)
    stage.path.with_suffix(".json").unlink()
    synced, fsync = set[int](), os.fsync

    def note_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_fsync)
    assert cache.find(stage.sha256) == stage.path
    assert stage.path.stat().st_ino in synced
