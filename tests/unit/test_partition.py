"""Partitions and splits: what they promise for any labels, and small cases by hand."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import few_digits
from pluribus.assembly import assemble
from pluribus.data import PARTITIONS, Manifest, by_domain, load, partition, split
from pluribus.data.partition import _cut, _cut_above, _cut_within
from pluribus.draws import numpy_rng
from pluribus.errors import (
    ConfigError,
    ConflictError,
    DamagedDataError,
    FormatError,
    PartitionError,
    RangeError,
    UnknownNameError,
)
from pluribus.experiment import experiment
from refusals import assert_facts, refused

examples = settings(deadline=None, max_examples=60)

FEDHPL = ("fedhpl-noniid", "fedhpl-dir", "fedhpl-dir-clients")
TRAIN_VAL_TEST = {"train": 0.7, "val": 0.1, "test": 0.2}
any_labels = st.lists(st.integers(0, 6), min_size=1, max_size=120).map(np.array)
large_classes = st.lists(st.integers(20, 40), min_size=2, max_size=7).map(lambda n: np.repeat(np.arange(len(n)), n))
seeds = st.integers(0, 2**32)


def rng(*key) -> np.random.Generator:
    return numpy_rng(0, "test", *key)


def balanced(classes: int, each: int) -> np.ndarray:
    return rng("labels").permutation(np.repeat(np.arange(classes), each))


def sizes(parts) -> list[int]:
    return [len(part) for part in parts]


def counts(labels, parts) -> np.ndarray:
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


def assert_sorted_rows(parts, rows: int) -> None:
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
        assert part.min() >= 0
        assert part.max() < rows


def assert_complete_and_disjoint(parts, rows: int) -> None:
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(rows))


class TestEveryKind:
    @pytest.mark.parametrize("kind", PARTITIONS)
    @examples
    @given(classes=st.integers(2, 8), each=st.integers(20, 50), clients=st.integers(2, 8), seed=seeds)
    def test_promises(self, kind, classes, each, clients, seed):
        labels = balanced(classes, each)
        domain = labels % 2
        own = {"domain": domain, "holder": np.arange(len(labels)) % clients, "alpha": 1.0, "mass": "3:1"}
        draw = [partition(kind, labels, clients, rng(s), **own) for s in (seed, seed, seed + 1)]
        for parts in draw:
            assert len(parts) == clients
            assert_sorted_rows(parts, len(labels))
            if PARTITIONS[kind].disjoint:
                rows = np.concatenate(parts)
                assert len(np.unique(rows)) == len(rows)
        assert all(np.array_equal(one, same) for one, same in zip(draw[0], draw[1], strict=True))

    @pytest.mark.parametrize("kind", [kind for kind in PARTITIONS if kind != "natural"])
    def test_another_key_draws_another_partition(self, kind):
        labels = balanced(4, 50)
        one, other = (partition(kind, labels, 4, rng(key), domain=labels % 2, alpha=1.0) for key in "ab")
        assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    @pytest.mark.parametrize("kind", ["iid", "dirichlet", "fedhpl-noniid", "domain"])
    @examples
    @given(labels=large_classes, clients=st.integers(1, 6), seed=seeds)
    def test_nothing_is_left_over(self, kind, labels, clients, seed):
        domain = np.arange(len(labels)) % clients
        parts = partition(kind, labels, clients, rng(seed), domain=domain, alpha=5.0)
        assert_complete_and_disjoint(parts, len(labels))

    @pytest.mark.parametrize("kind", ["dirichlet", "fedhpl-noniid", "fedhpl-dir", "fedhpl-dir-clients"])
    @examples
    @given(seed=seeds, least=st.integers(1, 30), alpha=st.sampled_from([0.5, 1.0, 100.0]))
    def test_the_minimum_is_kept(self, kind, seed, least, alpha):
        parts = partition(kind, balanced(10, 40), 5, rng(seed), alpha=alpha, min_samples=least)
        assert min(sizes(parts)) >= least

    @pytest.mark.parametrize("kind", ["dirichlet", "fedhpl-noniid", "fedhpl-dir", "fedhpl-dir-clients"])
    def test_an_impossible_minimum_is_refused_at_once(self, kind):
        with refused(PartitionError, "400 samples", "5 clients", 81, "--clients", "--min-samples"):
            partition(kind, balanced(10, 40), 5, rng(), alpha=1.0, min_samples=81)

    @pytest.mark.parametrize("kind", ["dirichlet", "fedhpl-noniid", "fedhpl-dir-clients"])
    def test_a_minimum_that_is_never_reached(self, kind):
        with refused(PartitionError, "1000 draws", "20 clients", "2 samples", "--clients", "--min-samples", "--alpha"):
            partition(kind, balanced(2, 20), 20, rng(), alpha=0.001, min_samples=2)

    @pytest.mark.parametrize("kind", ["iid", "domain", "pathological"])
    def test_a_client_without_data_is_refused(self, kind):
        labels = np.array([0, 1, 0, 1])
        with refused(PartitionError, "--clients"):
            partition(kind, labels, 8, rng(), domain=labels)
        with refused(PartitionError, "client 4", "'iid'", "--clients"):
            partition("iid", labels, 5, rng())

    def test_a_kind_ignores_what_it_does_not_read(self):
        labels = balanced(5, 20)
        plain = partition("iid", labels, 5, rng())
        dressed = partition(
            "iid", labels, 5, rng(), classes_per_client=99, unequal=True, alpha=0.1, min_samples=5, min_share=1
        )
        assert all(np.array_equal(a, b) for a, b in zip(plain, dressed, strict=True))
        assert PARTITIONS["iid"].reads == ()
        assert PARTITIONS["pathological"].reads == ("classes_per_client", "unequal")
        assert PARTITIONS["dirichlet"].reads == ("alpha", "min_samples")
        assert PARTITIONS["fedhpl-dir"].reads == ("alpha", "min_samples", "min_share")

    def test_wrong_settings(self):
        labels = balanced(5, 20)
        with refused(UnknownNameError, "'dirichle'", "'dirichlet'", "pluribus list partitions"):
            partition("dirichle", labels, 2, rng())
        with refused(RangeError, "--clients", 1, 0):
            partition("iid", labels, 0, rng())
        for alpha in (0, -1, float("inf"), float("nan")):
            with refused(RangeError, "--alpha", alpha):
                partition("dirichlet", labels, 2, rng(), alpha=alpha)
        for share in (-0.1, 1.1, float("nan")):
            with refused(RangeError, "--min-share", "[0, 1]", share):
                partition("fedhpl-dir", labels, 2, rng(), min_share=share)
        with refused(RangeError, "--classes-per-client", "1..5", 6):
            partition("pathological", labels, 2, rng(), classes_per_client=6)
        with refused(PartitionError, "'domain'", "domains"):
            partition("domain", labels, 2, rng())

    def test_only_the_fedhpl_dir_kinds_overlap(self):
        assert [kind for kind, entry in PARTITIONS.items() if not entry.disjoint] == [
            "fedhpl-dir",
            "fedhpl-dir-clients",
        ]


class TestIid:
    def test_sizes_differ_by_one_at_most(self):
        assert sorted(sizes(partition("iid", balanced(2, 51), 4, rng()))) == [25, 25, 26, 26]

    def test_classes_are_mixed(self):
        labels = balanced(2, 5000)
        assert abs(counts(labels, partition("iid", labels, 4, rng())) - 1250).max() < 150

    def test_many_clients_are_quick(self):
        labels = np.arange(200_000) % 10
        start = time.perf_counter()
        parts = partition("iid", labels, 10_000, rng())
        assert time.perf_counter() - start < 1
        assert set(sizes(parts)) == {20}


class TestPathological:
    @examples
    @given(classes=st.integers(2, 10), clients=st.integers(1, 12), seed=seeds, unequal=st.booleans(), data=st.data())
    def test_exact_classes_and_even_holders(self, classes, clients, seed, unequal, data):
        s = data.draw(st.integers(1, classes))
        labels = balanced(classes, 30)
        parts = partition("pathological", labels, clients, rng(seed), classes_per_client=s, unequal=unequal)
        table = counts(labels, parts)
        assert ((table > 0).sum(axis=1) == s).all()
        holders = (table > 0).sum(axis=0)
        assert set(holders) <= {clients * s // classes, -(-clients * s // classes)}
        assert (table.sum(axis=0)[holders > 0] == 30).all()
        if not unequal:
            assert all(np.ptp(column[column > 0]) <= 1 for column in table.T[holders > 0])

    def test_by_hand(self):
        """Four clients with two of four classes: every class has two holders with half of it each."""
        labels = balanced(4, 10)
        table = counts(labels, partition("pathological", labels, 4, rng(), classes_per_client=2))
        assert sorted(table.ravel().tolist()) == [0] * 8 + [5] * 8
        assert table.sum(axis=0).tolist() == [10] * 4

    def test_unequal_shares_are_unequal_within_bounds(self):
        labels = balanced(2, 10_000)
        table = counts(labels, partition("pathological", labels, 10, rng(), classes_per_client=1, unequal=True))
        held = np.sort(table.sum(axis=1))
        assert held[-1] > 1.5 * held[0]
        assert held[-1] < 10.5 * held[0]

    def test_classes_may_be_nobodys(self):
        labels = balanced(10, 10)
        table = counts(labels, partition("pathological", labels, 2, rng(), classes_per_client=3))
        assert (table.sum(axis=0) > 0).sum() == 6

    def test_more_holders_than_samples(self):
        with refused(PartitionError, "3 samples", "4 clients", "--clients", "--classes-per-client"):
            partition("pathological", balanced(2, 3), 4, rng(), classes_per_client=2)


class TestClassMass:
    def drawn(self, labels, clients, rng, mass: str) -> tuple[list[np.ndarray], ConfigError | None]:
        """The parts, or why there are none."""
        try:
            return partition("class-mass", labels, clients, rng, mass=mass), None
        except (FormatError, PartitionError) as refusal:
            return [], refusal

    @examples
    @given(
        labels=large_classes,
        clients=st.integers(1, 9),
        mass=st.lists(st.integers(1, 9), min_size=1, max_size=7),
        seed=seeds,
    )
    def test_every_client_has_its_shares(self, labels, clients, mass, seed):
        """Equal sizes, as many classes as masses, each within a row of its share; the largest that the data allow."""
        classes, text = labels.max() + 1, ":".join(map(str, mass))
        parts, refusal = self.drawn(labels, clients, rng(seed), text)
        if refusal:
            assert type(refusal) is PartitionError
            assert_facts(
                refusal.sentence, f"--mass {text}", f"{len(mass)} classes" if len(mass) > classes else "--clients"
            )
            return
        assert_sorted_rows(parts, len(labels))
        assert len(np.unique(np.concatenate(parts))) == sum(sizes(parts))
        (each,) = set(sizes(parts))
        held = -np.sort(-counts(labels, parts), axis=1)
        wanted = np.zeros(classes)
        wanted[: len(mass)] = np.sort(mass)[::-1] / np.sum(mass) * each
        assert abs(held - wanted).max() <= 1  # sums of shares are rounded, so a tie moves one row between classes
        assert ((held > 0).sum(axis=1) == len(mass)).all()
        left = np.bincount(labels) - counts(labels, parts).sum(axis=0)
        assert left.min() < 2 * clients + 1  # one row more for each would be too many, but for rounding

    @pytest.mark.parametrize(("mass", "held"), [("8:1:1", (40, 5, 5)), ("6:2:2", (30, 10, 10))])
    def test_levels_of_skew_by_hand(self, mass, held):
        """Ten clients, ten classes of 50: all rows are used, and every class is the first one of one client."""
        labels = balanced(10, 50)
        table = counts(labels, partition("class-mass", labels, 10, rng(), mass=mass))
        for lines in (table, table.T):
            assert [tuple(sorted(line[line > 0], reverse=True)) for line in lines] == [held] * 10

    def test_the_scarcest_class_decides(self):
        """Two clients with 3:1 of two classes of 40 and 12: 9 + 3 rows of the scarce one, 9 + 3 of the other."""
        labels = np.repeat([0, 1], [40, 12])
        table = counts(labels, partition("class-mass", labels, 2, rng(), mass="3:1"))
        assert sorted(table.tolist()) == [[3, 9], [9, 3]]

    @examples
    @given(text=st.text(max_size=8))
    def test_whatever_is_written(self, text):
        parts, refusal = self.drawn(balanced(4, 20), 4, rng(), text)
        assert len(parts) == 4 or "--mass" in refusal.sentence

    def test_more_classes_than_there_are(self):
        with refused(PartitionError, "--mass 2:1:1:1:1", "5 classes", 4):
            partition("class-mass", balanced(4, 20), 4, rng(), mass="2:1:1:1:1")

    @pytest.mark.parametrize("mass", ["", "8:", "8:0", "8:-1", "a:b", "inf:1", "nan"])
    def test_what_is_no_mass(self, mass):
        with refused(FormatError, "--mass", f"'{mass}'", "8:1:1"):
            partition("class-mass", balanced(4, 20), 4, rng(), mass=mass)

    def test_a_class_without_a_row(self):
        with refused(PartitionError, "20 samples", "--mass 99:1", "--clients"):
            partition("class-mass", balanced(4, 20), 4, rng(), mass="99:1")


class TestDirichlet:
    def test_small_alpha_is_uneven_and_large_alpha_even(self):
        labels = balanced(10, 1000)
        held = {a: counts(labels, partition("dirichlet", labels, 10, rng(), alpha=a)) for a in (0.1, 1000.0)}
        assert (held[0.1] == 0).sum() > 20
        assert abs(held[1000.0] - 100).max() < 40

    def test_full_clients_get_no_further_class(self):
        """Classes are dealt in order, so whoever holds n/N rows of the first ones holds none of a later one."""
        labels = np.repeat(np.arange(10), 100)
        for key in range(20):
            table = counts(labels, partition("dirichlet", labels, 5, rng(key), alpha=0.3))
            held = np.cumsum(table, axis=1)
            full = held[:, :-1] >= 1000 / 5
            assert full.any()
            assert (table[:, 1:][full] == 0).all()

    def test_classes_per_client_as_measured_for_htfllib(self):
        """CIFAR-100 merged, 20 clients, Dir(0.1), at least 40: 40 to 45 classes each."""
        labels = balanced(100, 600)
        means = [
            (counts(labels, partition("dirichlet", labels, 20, rng(k), alpha=0.1, min_samples=40)) > 0)
            .sum(axis=1)
            .mean()
            for k in range(3)
        ]
        assert 39 < np.mean(means) < 46

    def test_alpha_is_one_by_default(self):
        labels = balanced(10, 100)
        default, explicit = (partition("dirichlet", labels, 5, rng(), alpha=alpha) for alpha in (None, 1.0))
        assert all(np.array_equal(a, b) for a, b in zip(default, explicit, strict=True))


class TestFedHPL:
    def test_dir_gives_everyone_an_equal_number_and_overlaps(self):
        labels = balanced(10, 500)
        parts = partition("fedhpl-dir", labels, 5, rng())
        assert sizes(parts) == [1000] * 5
        assert len(np.unique(np.concatenate(parts))) < 5000

    @examples
    @given(labels=large_classes, clients=st.integers(1, 5), seed=seeds, alpha=st.sampled_from([None, 0.05, 1.0]))
    def test_dir_never_asks_for_more_than_there_is(self, labels, clients, seed, alpha):
        parts = partition("fedhpl-dir", labels, clients, rng(seed), alpha=alpha)
        assert sizes(parts) == [round(len(labels) / clients)] * clients
        assert_sorted_rows(parts, len(labels))

    def test_dir_clients_has_the_shares_of_noniid_but_overlaps(self):
        labels = balanced(10, 500)
        dealt, drawn = (partition(kind, labels, 5, rng()) for kind in ("fedhpl-noniid", "fedhpl-dir-clients"))
        np.testing.assert_array_equal(counts(labels, dealt), counts(labels, drawn))
        assert_complete_and_disjoint(dealt, len(labels))
        assert sum(sizes(drawn)) == 5000
        assert len(np.unique(np.concatenate(drawn))) < 5000

    def test_a_random_alpha_differs_from_class_to_class(self):
        labels = balanced(10, 1000)
        share = counts(labels, partition("fedhpl-noniid", labels, 5, rng())) / 1000
        assert len(set(share.argmax(axis=0))) > 1

    @pytest.mark.parametrize("kind", FEDHPL)
    @examples
    @given(
        labels=large_classes,
        clients=st.integers(1, 8),
        seed=seeds,
        alpha=st.sampled_from([None, 0.05, 1.0]),
        part=st.floats(0, 1),
    )
    def test_everyone_holds_the_least_share_of_every_class(self, kind, labels, clients, seed, alpha, part):
        share = part / clients
        try:
            parts = partition(kind, labels, clients, rng(seed), alpha=alpha, min_share=share)
        except PartitionError as refusal:  # no draw of many left every client a row
            assert_facts(refusal.sentence, f"{clients} clients", "--alpha")
            return
        assert (counts(labels, parts) >= np.floor(np.bincount(labels) * share)).all()
        assert_sorted_rows(parts, len(labels))
        if kind == "fedhpl-noniid":
            assert_complete_and_disjoint(parts, len(labels))
        if kind == "fedhpl-dir":
            assert sizes(parts) == [round(len(labels) / clients)] * clients

    @pytest.mark.parametrize("kind", ["fedhpl-noniid", "fedhpl-dir-clients"])
    def test_svhn_leaves_27_of_label_7_to_four_clients(self, kind):
        """Appendix C.5.4. Label 7 has 5,595 training images, 0.5 % of which is 27.975."""
        svhn = np.array([4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659])
        labels = np.repeat(np.arange(10), svhn)
        held = [
            counts(labels, partition(kind, labels, 5, rng(key), alpha=0.001, min_samples=10, min_share=0.005))[:, 7]
            for key in range(20)
        ]
        assert {min(row) for row in held} == {27}
        assert [27] * 4 + [5595 - 4 * 27] in [sorted(row) for row in held]

    def test_clients_above_the_floor_share_the_rest_by_their_excess(self):
        """100 rows by 0, 0.2 and 0.8 with a floor of 0.1: excess 0, 0.1 and 0.7 of the 70 rows that are left."""
        found = _cut_above(10, 100, np.array([0.0, 0.2, 0.8]), 0.1)
        assert found.tolist() == [10, 10 + 9, 10 + 61]

    def test_an_equal_floor_for_all_leaves_no_choice(self):
        """Five clients and a least share of a fifth: 7 rows are one for each, and two more to somebody."""
        labels = np.repeat([0, 1], [10, 7])
        assert counts(labels, partition("fedhpl-noniid", labels, 5, rng(), min_share=0.2)).min(axis=0).tolist() == [
            2,
            1,
        ]
        even = _cut_above(1, 7, np.full(5, 0.2), 0.2)
        assert (even.sum(), even.min()) == (7, 1)

    def test_a_share_of_zero_leaves_the_draw_as_it_is(self):
        """Digests from before there was a least share."""
        labels = np.arange(300) % 10
        digests = {
            kind: Manifest.of(kind, {}, 0, labels, partition(kind, labels, 5, rng(), min_share=0), 10).digest[:12]
            for kind in FEDHPL
        }
        assert digests == {
            "fedhpl-noniid": "f98538c157ea",
            "fedhpl-dir": "313c9c416a31",
            "fedhpl-dir-clients": "4c3fcd840bf3",
        }

    @pytest.mark.parametrize(
        ("settings", "left"),
        [
            ({"partition": "class-mass", "clients": 4}, "1,101 of 1,797"),  # 4 clients of 174 rows
            ({"partition": "pathological", "clients": 5}, None),  # ten places for ten classes
            ({"partition": "fedhpl-dir", "clients": 5}, None),  # drawn anew for each client
            ({"partition": "iid", "clients": 4, "test": "common"}, None),  # test rows are not left over
        ],
    )
    def test_rows_that_nobody_holds_are_told(self, settings, left):
        told = [
            text for text in assemble(experiment("local", device="cpu", **settings)).warnings if "no client" in text
        ]
        assert [left in text for text in told] == ([True] if left else [])

    @pytest.mark.parametrize("kind", FEDHPL)
    def test_a_share_that_clients_cannot_all_hold_is_refused(self, kind):
        with refused(PartitionError, "11 clients", 0.1, "--clients", "--min-share", "1/11"):
            partition(kind, balanced(10, 40), 11, rng(), alpha=1.0, min_share=0.1)

    @pytest.mark.parametrize(
        ("data", "given", "expected"),
        [("cifar100", None, 0.1), ("svhn", None, 0.005), ("x", None, 0.01), ("svhn", 0, 0)],
    )
    def test_the_least_share_goes_by_the_data_set(self, data, given, expected):
        dataset = dataclasses.replace(load(few_digits(400)), name=data)
        settings = {"partition": "fedhpl-noniid", "clients": 5, "min_share": given, "device": "cpu"}
        parts = assemble(experiment("local", data=data, **settings), dataset)
        assert parts.manifest.parameters["min_share"] == expected
        least = np.floor(np.bincount(dataset.y) * expected)
        assert (np.array(parts.manifest.counts) >= least).all()


class TestDomain:
    def test_client_k_holds_domain_k_mod_d(self):
        domain = rng("d").permutation(np.repeat([0, 1, 2], [7, 8, 9]))
        parts = by_domain(domain, 5, rng())
        assert [set(domain[part]) for part in parts] == [{0}, {1}, {2}, {0}, {1}]
        assert sizes(parts) == [4, 4, 9, 3, 4]
        assert_complete_and_disjoint(parts, 24)

    def test_too_few_clients(self):
        with refused(PartitionError, "3 domains", "--clients", 2):
            by_domain(np.array([0, 1, 2]), 2, rng())


class TestWholeNumbers:
    @examples
    @given(total=st.integers(0, 1000), shares=st.lists(st.floats(1e-6, 1), min_size=1, max_size=20).map(np.array))
    def test_cut_stays_within_one_of_the_shares(self, total, shares):
        cut = _cut(total, shares)
        assert cut.sum() == total
        assert (cut >= 0).all()
        assert (abs(cut - total * shares / shares.sum()) <= 1 + 1e-6).all()

    def test_cut_within_spills_over_by_share(self):
        """10 by 0.8, 0.1, 0.1 into 4, 10, 10: four, then the other six in two equal shares."""
        assert _cut_within(10, np.array([0.8, 0.1, 0.1]), np.array([4, 10, 10])).tolist() == [4, 3, 3]
        assert _cut_within(10, np.array([1.0, 0.0, 0.0]), np.array([4, 10, 2])).tolist() == [4, 5, 1]


class TestManifest:
    labels = np.array([0, 1, 1, 0, 2, 2])
    parts = (np.array([0, 1, 4]), np.array([2, 3, 5]))

    def manifest(self, parts=parts, labels=labels) -> Manifest:
        return Manifest.of("iid", {"alpha": None}, 7, labels, list(parts), 4)

    def test_counts_by_hand(self):
        assert self.manifest().counts == [[1, 1, 1, 0], [1, 1, 1, 0]]

    def test_round_trip(self):
        assert Manifest.from_json(self.manifest().to_json()) == self.manifest()

    def test_digest_is_the_same_everywhere(self):
        assert self.manifest().digest == "c8c1ce9d8b86740606073541aa777af8916c52b5b3d86daf216f72e139319b2e"
        narrow = self.manifest([part.astype(">i4") for part in self.parts], self.labels.astype(np.int16))
        assert narrow.digest == self.manifest().digest

    @pytest.mark.parametrize(
        "parts",
        [
            ([0, 1, 5], [2, 3, 4]),
            ([0, 1], [2, 3, 4, 5]),
            ([2, 3, 5], [0, 1, 4]),
        ],
    )
    def test_digest_sees_every_row_and_every_border(self, parts):
        assert self.manifest([np.array(part) for part in parts]).digest != self.manifest().digest

    def test_digest_sees_a_border_move_between_neighbors(self):
        one, other = ([np.array([0, 1]), np.array([2])], [np.array([0]), np.array([1, 2])])
        assert self.manifest(one).digest != self.manifest(other).digest

    def test_digest_sees_the_labels(self):
        assert self.manifest(labels=np.array([0, 1, 1, 0, 2, 1])).digest != self.manifest().digest

    @pytest.mark.parametrize("text", ["", "[1]", "{}", '{"kind": "iid"}'])
    def test_other_text_is_refused(self, text):
        with refused(DamagedDataError, "manifest"):
            Manifest.from_json(text)


fractions = (
    st.lists(st.integers(0, 5), min_size=1, max_size=4)
    .filter(lambda w: w[0] > 0)
    .map(lambda w: {f"part{at}": value / sum(w) for at, value in enumerate(w)})
)


class TestSplit:
    @examples
    @given(labels=any_labels, shares=fractions, seed=seeds)
    def test_promises(self, labels, shares, seed):
        parts, again = (split(labels, shares, rng(seed)) for _ in range(2))
        assert list(parts) == list(shares)
        assert_complete_and_disjoint(list(parts.values()), len(labels))
        for name, part in parts.items():
            np.testing.assert_array_equal(part, again[name])
            assert part.dtype == np.int64
            assert (np.diff(part) > 0).all()
            if shares[name] == 0:
                assert len(part) == 0
        first = next(iter(parts.values()))
        assert set(labels[first]) == set(labels)
        used = sum(share > 0 for share in shares.values())
        spare = len(labels) - len(np.unique(labels))
        if spare >= used - 1:
            assert all(len(parts[name]) for name in shares if shares[name] > 0)

    @examples
    @given(labels=large_classes, shares=fractions, seed=seeds)
    def test_stratified_and_near_the_totals(self, labels, shares, seed):
        """Classes that are large enough for every part: nobody is a whole sample off in total."""
        classes, counted = np.unique(labels, return_counts=True)
        for name, part in split(labels, shares, rng(seed)).items():
            assert abs(len(part) - len(labels) * shares[name]) < 1
            for label, size in zip(classes, counted, strict=True):
                assert (labels[part] == label).sum() >= np.floor(size * shares[name] + 1e-9)

    def test_fedh2l_by_hand(self):
        labels = balanced(10, 100)
        parts = split(labels, {"private": 0.65, "public": 0.10, "val": 0.10, "test": 0.15}, rng())
        assert sizes(parts.values()) == [650, 100, 100, 150]
        expected = {"private": 65, "public": 10, "val": 10, "test": 15}
        for name, part in parts.items():
            assert np.bincount(labels[part]).tolist() == [expected[name]] * 10

    def test_fractions_that_float_numbers_miss(self):
        """100 * 0.29 is a hair below 29: the 29th is not an odd sample that the small classes could take away."""
        labels = np.repeat([0, 1, 2, 3], [100, 2, 2, 2])
        for key in range(20):
            test = split(labels, {"train": 0.71, "test": 0.29}, rng(key))["test"]
            assert (labels[test] == 0).sum() == 29

    def test_odd_samples_balance_the_totals(self):
        """Ten classes of 5 at 0.7/0.1/0.2: whole samples are 3/0/1 each, the ten odd ones make 35/5/10."""
        parts = split(balanced(10, 5), TRAIN_VAL_TEST, rng())
        assert sizes(parts.values()) == [35, 5, 10]

    @pytest.mark.parametrize(
        ("labels", "expected"),
        [
            ([4], [1, 0, 0]),
            ([4, 4], [1, 0, 1]),
            ([4, 4, 4], [1, 1, 1]),
            ([1, 2, 3], [3, 0, 0]),
            ([1, 1, 2, 3], [3, 0, 1]),
            ([1, 1, 1, 2, 2], [3, 1, 1]),
            ([1] * 10, [7, 1, 2]),
            ([], [0, 0, 0]),
        ],
    )
    def test_few_samples_by_hand(self, labels, expected):
        assert sizes(split(np.array(labels, int), TRAIN_VAL_TEST, rng()).values()) == expected

    def test_a_rare_class_stays_in_training(self):
        labels = np.array([0] * 99 + [1])
        for key in range(20):
            assert 99 in split(labels, TRAIN_VAL_TEST, rng(key))["train"]

    def test_another_key_draws_another_split(self):
        labels = balanced(3, 30)
        assert not np.array_equal(*(split(labels, TRAIN_VAL_TEST, rng(key))["train"] for key in "ab"))

    @pytest.mark.parametrize("shares", [{"train": 0.7, "test": 0.2}, {"train": 1.2, "test": -0.2}])
    def test_fractions_must_sum_to_one(self, shares):
        with refused(RangeError, *(f"{name} {share:g}" for name, share in shares.items())):
            split(np.array([0, 1]), shares, rng())

    def test_training_needs_a_share(self):
        with refused(ConflictError, "train 0", "test 1"):
            split(np.array([0, 1]), {"train": 0.0, "test": 1.0}, rng())
