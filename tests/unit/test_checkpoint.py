"""The `state/` folder: what a commit costs, what it keeps, and what happens to a folder that was tampered with."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import pluribus
from conftest import assemble_tiny, make_host, run_tiny
from pluribus.errors import DamagedFileError, OtherRunError
from pluribus.storage.checkpoint import Checkpoint, Tensors
from refusals import refused

CLIENTS = 5


def file_of(folder: Path, t: int) -> Path:
    return folder / f"round-{t:06d}.safetensors"


def names_in(folder: Path, t: int) -> set[str]:
    with safe_open(file_of(folder, t), framework="pt") as file:
        return set(file.keys())


def numbers(value: float, size: int = 3) -> Tensors:
    return {"model.weight": torch.full((size,), value), "opt.model.step": torch.tensor(value)}


def message(k: int) -> bytes:
    return bytes([k, 0, 255])


def commit(checkpoint: Checkpoint, t: int, touched: set[int]) -> None:
    """A commit in which every number tells its round and whose it is."""
    states = {k: numbers(t + k / 10) for k in sorted(touched)}
    checkpoint.commit(t, {"head": torch.full((2,), float(t))}, states, {k: message(k) for k in range(CLIENTS)})


def test_a_file_holds_the_server_and_the_clients_that_were_touched(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    commit(checkpoint, 0, {0, 1, 2, 3, 4})
    commit(checkpoint, 1, {3})
    assert names_in(tmp_path, 1) == {"server/head", "client/3/model.weight", "client/3/opt.model.step", "enrolled/3"}


def test_the_size_of_a_commit_follows_the_clients_it_touches(tmp_path: Path) -> None:
    checkpoint, size = Checkpoint(tmp_path), 10_000
    checkpoint.commit(0, {}, {k: numbers(float(k), size) for k in range(100)}, {})
    checkpoint.commit(1, {}, {k: numbers(float(k), size) for k in range(2)}, {})
    tensors = 4 * (size + 1)
    assert file_of(tmp_path, 0).stat().st_size > 100 * tensors
    assert 2 * tensors < file_of(tmp_path, 1).stat().st_size < 2.1 * tensors


def test_tied_tensors_are_saved_each_by_its_own_name(tmp_path: Path) -> None:
    tied = torch.arange(4.0).reshape(2, 2)
    Checkpoint(tmp_path).commit(0, {"encoder": tied, "decoder": tied, "turned": tied.T}, {}, {})
    assert {name: value.tolist() for name, value in Checkpoint(tmp_path).server().items()} == {
        "encoder": [[0.0, 1.0], [2.0, 3.0]],
        "decoder": [[0.0, 1.0], [2.0, 3.0]],
        "turned": [[0.0, 2.0], [1.0, 3.0]],
    }


# ---- against a plain dictionary ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Commit:
    """What the folder should hold after a commit: for each client the round that last touched it."""

    t: int
    rounds: dict[int, int]

    @property
    def files(self) -> set[int]:
        return {self.t, *self.rounds.values()}


def check(checkpoint: Checkpoint, now: Commit | None) -> None:
    rounds = {} if now is None else now.rounds
    assert checkpoint.latest == (None if now is None else now.t)
    if now is not None:
        assert checkpoint.server()["head"].tolist() == [now.t, now.t]
    for k in range(CLIENTS):
        state = checkpoint.client(k)
        if k in rounds:
            assert state is not None
            want = numbers(rounds[k] + k / 10)
            assert state.keys() == want.keys()
            assert all(torch.equal(state[name], want[name]) for name in want)
        else:
            assert state is None
    assert checkpoint.enrolled() == {k: message(k) for k in rounds}


STEPS = st.one_of(
    st.tuples(st.just("commit"), st.sets(st.integers(0, CLIENTS - 1))),
    st.tuples(st.sampled_from(["reopen", "lose the newest"]), st.just(frozenset[int]())),
)


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(STEPS, max_size=14), gap=st.integers(1, 3))
def test_the_folder_is_a_dictionary_with_one_step_back(steps: list[tuple[str, set[int]]], gap: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint, commits = Checkpoint(folder), list[Commit]()
        for step, touched in steps:
            if step == "commit":
                t = commits[-1].t + gap if commits else 0
                commit(checkpoint, t, touched)
                commits.append(Commit(t, (commits[-1].rounds if commits else {}) | dict.fromkeys(touched, t)))
                needed = set().union(*(past.files for past in commits[-2:]))
                assert {path.name for path in folder.iterdir()} == {file_of(folder, t).name for t in needed}
            else:
                if step == "lose the newest" and len(commits) > 1:
                    file_of(folder, commits.pop().t).unlink()
                    del commits[:-1]  # of what was before, only one step is kept
                for leftover in ("round-000099.safetensors.tmp", ".tmpXyZ123"):
                    (folder / leftover).write_bytes(b"cut short")
                checkpoint = Checkpoint(folder)
                assert all(path.match("round-??????.safetensors") for path in folder.iterdir())
            check(checkpoint, commits[-1] if commits else None)


@settings(max_examples=50, deadline=None)
@given(touched=st.lists(st.sets(st.integers(0, CLIENTS - 1)), min_size=2, max_size=6), which=st.integers(0, 10))
def test_a_lost_file_is_noticed_unless_nobody_needs_it(touched: list[set[int]], which: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, rounds = Path(name), dict[int, int]()
        checkpoint = Checkpoint(folder)
        for t, clients in enumerate(touched):
            commit(checkpoint, t, clients)
            rounds |= dict.fromkeys(clients, t)
        older = sorted(folder.iterdir())[:-1]
        lost = older[which % len(older)]
        lost.unlink()
        if lost.name in {file_of(folder, t).name for t in rounds.values()}:
            with refused(DamagedFileError, folder, f"round {len(touched) - 1}", "pluribus run --config"):
                Checkpoint(folder)
        else:
            check(Checkpoint(folder), Commit(len(touched) - 1, rounds))


def test_what_a_crash_left_before_it_deleted_is_deleted_by_the_next_commit(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    for t in range(3):
        commit(checkpoint, t, {0})
        if t == 0:
            first = file_of(tmp_path, 0).read_bytes()
    file_of(tmp_path, 0).write_bytes(first)
    reopened = Checkpoint(tmp_path)
    check(reopened, Commit(2, {0: 2}))
    commit(reopened, 3, {0})
    assert sorted(tmp_path.iterdir()) == [file_of(tmp_path, 2), file_of(tmp_path, 3)]


# ---- a damaged file --------------------------------------------------------------------------------------------------


def test_a_truncated_file_is_named_and_the_run_goes_on_without_it() -> None:
    settings = {"rounds": 3, "checkpoint_every": 1, "participation": 0.5}
    whole, cut = run_tiny("fedgh", **settings), run_tiny("fedgh", **settings)
    (cut.folder / "result.json").unlink()
    newest = file_of(cut.folder / "state", 2)
    written = newest.read_bytes()
    for left in (0, 7, 100, len(written) - 1):
        newest.write_bytes(written[:left])
        with refused(DamagedFileError, newest, "Delete"):
            pluribus.resume(cut.folder, progress=False)
    newest.unlink()
    again = pluribus.resume(cut.folder, progress=False)
    assert again.summary == whole.summary
    for k in range(4):
        mine, other = again.model(k).state_dict(), whole.model(k).state_dict()
        assert all(torch.equal(mine[name], other[name]) for name in other)


def spoil(path: Path) -> None:
    """Make the saved server infinite, as lies did before merges were checked."""
    with safe_open(path, framework="pt") as file:
        facts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    spoiled = {n: torch.full_like(v, torch.inf) if n.startswith("server/head") else v for n, v in tensors.items()}
    assert any(name.startswith("server/head") for name in spoiled)
    save_file(spoiled, path, facts)


def test_a_server_that_was_saved_infinite_is_told_with_the_way_back() -> None:
    settings = {"rounds": 3, "checkpoint_every": 1}
    whole, spoiled = run_tiny("fedgh", **settings), run_tiny("fedgh", **settings)
    (spoiled.folder / "result.json").unlink()
    newest, before = (file_of(spoiled.folder / "state", t) for t in (2, 1))
    spoil(newest)
    with refused(DamagedFileError, "after round 2", "not finite", newest, "after round 1"):
        pluribus.resume(spoiled.folder, progress=False)
    kept = before.read_bytes()
    spoil(before)
    with refused(DamagedFileError, "after round 2", "new run"):
        pluribus.resume(spoiled.folder, progress=False)
    before.write_bytes(kept)
    newest.unlink()
    assert pluribus.resume(spoiled.folder, progress=False).summary == whole.summary


def test_a_file_of_another_program_is_no_commit(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1)}, file_of(tmp_path, 4), {"format": "pt"})
    with refused(DamagedFileError, file_of(tmp_path, 4)):
        Checkpoint(tmp_path)


def test_state_of_another_model_is_a_sentence_not_a_traceback() -> None:
    parts = assemble_tiny("local", models="mlp-64")
    other = make_host(assemble_tiny("local", models="cnn-16")).client(0).tensors()
    with refused(OtherRunError, "client 0", "names differ"):
        make_host(parts, lambda k: other).client(0)
    wider = {name: torch.zeros(2, *value.shape) for name, value in make_host(parts).client(0).tensors().items()}
    with refused(OtherRunError, "client 0", "shape"):
        make_host(parts, lambda k: wider).client(0)
