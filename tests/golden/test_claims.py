"""A short form of each table of `docs/claims.md`: what a paper's protocol makes true, and what fails without it."""

from __future__ import annotations

from typing import Any

import pluribus
from conftest import new_folder
from pluribus.assembly import assemble
from pluribus.experiment import Experiment
from pluribus.result import Result
from pluribus.study.reproduce import paper
from pluribus.study.reproduce.beside import Beside
from pluribus.study.reproduce.run import reproduce


def described(table: str, row: str, **settings: Any) -> Experiment:
    """A row of a table, with settings of its own."""
    found = paper.find(table)
    (chosen,) = found.chosen([row])
    return found.experiment(chosen, **settings, device="cpu", threads=1)


def short(table: str, row: str, **settings: Any) -> Result:
    """A row of a table, with fewer rounds or clients."""
    return pluribus.run(described(table, row, out=str(new_folder()), **settings), progress=False)


def test_fedgh_trains_as_its_authors_do() -> None:
    """With momentum and decay clients know their two classes after four rounds; by plain SGD they do not yet."""
    rows = ("Local", "Local (plain SGD)")
    found = reproduce(
        "claim-fedgh", rounds=4, seeds=1, only=rows, out=new_folder(), jobs=1, device="cpu", progress=False
    )
    assert isinstance(found, Beside)
    accuracy = {row: pairs["Acc (%)"].ours.mean for row, pairs in found.pairs.items()}
    assert accuracy["Local"] > 85
    assert accuracy["Local (plain SGD)"] < accuracy["Local"] - 10
    (plain,) = found.differences
    assert plain.marked == "worse"  # not "worse" with a mark: both took as many steps
    assert "4 of 50 rounds" in found.heading


def test_fedl2g_warms_up_before_it_trains_and_that_lowers_the_loss_of_the_task() -> None:
    """Three rounds of training, which once had no warm-up. Vectors that have learned misguide less than random ones."""
    few = {"rounds": 3, "clients": 4, "evaluate_every": 3}
    warm, cold = (short("claim-fedl2g", "FedL2G-l", **few, **how) for how in ({}, {"warmup": 0}))
    moved = [record["notes"]["guides_moved"] for record in warm.history]
    assert moved[warm.warmup - 1] > 0.1 > cold.history[0]["notes"]["guides_moved"]
    assert warm.history[-1]["loss"] < cold.history[-1]["loss"]
    assert len(warm.history) - warm.warmup == len(cold.history) == 3


def test_fedh2l_is_above_its_baselines_at_equal_steps() -> None:
    """Pre-trained, FedMD would take 760 steps here, not 80, and be above FedH2L."""
    rounds, rows = 40, ("FedH2L", "AGG", "FedMD", "IND")
    runs = {row: short("claim-fedh2l", row, rounds=rounds, evaluate_every=rounds) for row in rows}
    assert [run.steps_per_client for run in runs.values()] == [2 * rounds, rounds, 2 * rounds, rounds]
    for figure in ("acc", "fwt"):
        fedh2l, *others = (run.summary["after"]["last"][figure]["mean"] or 0.0 for run in runs.values())
        assert all(fedh2l > other + 0.1 for other in others)
        assert min(others) == others[-1]  # who trains alone knows one domain


def test_fedfree_hands_out_layers_that_fit() -> None:
    """With the layer that came down, before it is trained, a model is about as good as the client's own.

    With starts apart and a server step of 2 %, as it was, the layer is nearly random, and most of what the model had
    learned is gone.
    """
    few = {"rounds": 3, "epochs": 2, "clients": 4, "evaluate_every": 3}
    lost = {}
    for name, own in {"now": {}, "was": {"same_init": False, "same_start": False, "server_lr": 0.01}}.items():
        last = short("claim-fedfree", "FedFree", **few, **own).history[-1]
        replaced = [k for k, said in last["notes"]["layers"].items() if said != "none"]
        assert len(replaced) >= 2
        after, before = (sum(last["clients"][k][view]["test"] for k in replaced) for view in ("after", "before"))
        lost[name] = (after - before) / len(replaced)
    assert lost["now"] < 0.1 < lost["was"]


def test_fedhpl_clients_hold_all_classes_and_are_tested_on_all() -> None:
    """Without the paper's least share per class, clients lack classes that they are tested on."""
    for seed in range(paper.find("claim-fedhpl").seeds):
        parts = assemble(described("claim-fedhpl", "FedHPL", seed=seed))
        assert all(min(parts.data.counts(k)) >= 13 for k in range(5)), "a tenth of 139 or more, rounded down"
        tested = [parts.dataset.y[parts.data.rows(k)["test"]].bincount(minlength=10) for k in range(5)]
        assert all(counts.min() >= 34 and counts.tolist() == tested[0].tolist() for counts in tested)
        old = assemble(described("claim-fedhpl", "FedHPL", seed=seed, min_share=0.0))
        assert min(min(old.data.counts(k)) for k in range(5)) == 0


def test_fedhpl_gains_over_local_tuning() -> None:
    alone, taught = (short("claim-fedhpl", row, rounds=6).accuracy for row in ("Local", "FedHPL"))
    assert alone is not None
    assert taught is not None
    assert taught > alone
