"""Compiled graphs: a folder per driver and model, emptied when what is in it cannot be trusted."""

from __future__ import annotations

from pathlib import Path

from inference.compiled import CompiledGraphs, compiled_graphs, driver_identity, wanted


def compiled(graphs: CompiledGraphs) -> Path:
    file = graphs.folder / "graph"
    file.write_text("binary")
    return file


def test_what_was_compiled_and_proven_is_found_again(tmp_path: Path) -> None:
    first = compiled_graphs(tmp_path, "vx", ["model", "driver"])
    assert first.cold
    file = compiled(first)
    first.prove()
    again = compiled_graphs(tmp_path, "vx", ["model", "driver"])
    assert (again.cold, again.folder, file.exists()) == (False, first.folder, True)


def test_another_model_or_driver_has_another_folder(tmp_path: Path) -> None:
    folders = {compiled_graphs(tmp_path, "vx", identity).folder for identity in (["m", "d"], ["m2", "d"], ["m", "d2"])}
    assert len(folders) == 3


def test_a_compile_that_was_cut_short_leaves_nothing(tmp_path: Path) -> None:
    file = compiled(compiled_graphs(tmp_path, "vx", ["m"]))
    assert compiled_graphs(tmp_path, "vx", ["m"]).cold
    assert not file.exists()


def test_a_graph_that_was_whole_may_fail_once_but_not_twice(tmp_path: Path) -> None:
    first = compiled_graphs(tmp_path, "vx", ["m"])
    file = compiled(first)
    first.prove()
    assert not compiled_graphs(tmp_path, "vx", ["m"]).cold
    assert not compiled_graphs(tmp_path, "vx", ["m"]).cold
    assert file.exists()
    assert compiled_graphs(tmp_path, "vx", ["m"]).cold
    assert not file.exists()


def test_only_the_latest_three_are_kept_and_other_accelerators_are_left_alone(tmp_path: Path) -> None:
    other = compiled_graphs(tmp_path, "other", ["m"])
    for number in range(5):
        last = compiled_graphs(tmp_path, "vx", [str(number)])
    assert len(list(tmp_path.glob("vx-*"))) == 3
    assert last.folder.exists()
    assert other.folder.exists()


def test_a_driver_is_known_by_its_library_and_its_modules(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(b"one")
    version = tmp_path / "module" / "galcore" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("6.4.11\n")
    before = driver_identity(str(library), ["galcore"], tmp_path)
    assert before == driver_identity(str(library), ["galcore"], tmp_path)
    version.write_text("6.4.12\n")
    updated = driver_identity(str(library), ["galcore"], tmp_path)
    library.write_bytes(b"two")
    assert len({tuple(before), tuple(updated), tuple(driver_identity(str(library), ["galcore"], tmp_path))}) == 3
    assert driver_identity("libedgetpu.so.1", [], tmp_path)


def test_the_placeholder_is_filled_in_where_a_profile_has_it(tmp_path: Path) -> None:
    graphs = CompiledGraphs(tmp_path / "x")
    assert wanted({"a": "b"}, {"cache": "{cache}/g"})
    assert not wanted({"a": "b"}, {})
    assert graphs.fill_in({"a": "b", "cache": "{cache}/g"}) == {"a": "b", "cache": f"{tmp_path}/x/g"}
