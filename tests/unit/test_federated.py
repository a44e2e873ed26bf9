"""One data set in many hands: nothing lost, nothing twice, and no test image in anybody's training data."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parties import CPU, data_of, noise
from pluribus.assembly import assemble
from pluribus.data import PARTITIONS, Dataset, by_domain, load, partition
from pluribus.data.domains import rotate_images
from pluribus.data.federated import Data, Federated, Fractions
from pluribus.draws import numpy_rng
from pluribus.errors import ConflictError, MismatchError, PartitionError
from pluribus.experiment import experiment
from refusals import refused

PARTS = ("train", "val", "test", "public")


def plain(samples: int, classes: int = 4, official: int | None = None) -> Dataset:
    y = torch.arange(samples) % classes
    return Dataset("plain", noise(samples), y, tuple("abcdefgh"[:classes]), official)


def federated(dataset: Dataset, clients: int, seed: int = 0, kind: str = "iid", **fractions) -> Federated:
    rows = dataset.official if fractions.get("test_on") == "official" else None
    parts = partition(kind, dataset.y[:rows].numpy(), clients, numpy_rng(seed, "partition"), alpha=1.0)
    return Federated(dataset, parts, Fractions(**fractions), seed, CPU)


def turned_digits(clients: int, seed: int = 0, independent: bool = False, **fractions) -> Federated:
    """Twenty digits of each class under three angles; client k holds domain k mod 3."""
    dataset = rotate_images(load("digits"), 20, (0, 20, 40), seed, independent)
    parts = by_domain(dataset.domain.numpy(), clients, numpy_rng(seed, "partition"))
    domain_of = {k: k % 3 for k in range(clients)}
    return Federated(dataset, parts, Fractions(**fractions), seed, CPU, domain_of=domain_of)


def rows_of(data: Federated, client: int) -> dict[str, list[int]]:
    return {name: rows.tolist() for name, rows in data.rows(client).items()}


def identities(data: Federated, part: str) -> list[set[int]]:
    """Per client, the base images in this part."""
    return [set(data.dataset.identity[data.rows(k)[part]].tolist()) for k in range(len(data.parts))]


class TestSets:
    @settings(deadline=None, max_examples=40)
    @given(
        samples=st.integers(40, 200),
        clients=st.integers(1, 5),
        seed=st.integers(0, 100),
        public=st.sampled_from([0.0, 0.1, 0.3]),
        kind=st.sampled_from(["iid", "pathological", "dirichlet"]),
    )
    def test_disjoint_and_complete(self, samples, clients, seed, public, kind):
        data = federated(plain(samples), clients, seed, kind, public=public)
        everyone = []
        for k in range(clients):
            sets = rows_of(data, k)
            assert tuple(sets) == PARTS
            mine = [row for rows in sets.values() for row in rows]
            assert sorted(mine) == data.parts[k].tolist()
            everyone += mine
        assert len(set(everyone)) == len(everyone)
        if kind != "pathological":  # which may leave classes to nobody
            assert sorted(everyone) == list(range(samples))

    def test_fractions(self):
        data = federated(plain(400), 2, val=0.1, test=0.2, public=0.05)
        for k in range(2):
            assert [len(data.rows(k)[name]) for name in PARTS] == [130, 20, 40, 10]
            assert data.samples(k) == 130

    def test_no_share_no_rows(self):
        data = federated(plain(40), 2, val=0.0, test=0.0)
        assert [len(data.rows(0)[name]) for name in PARTS] == [20, 0, 0, 0]

    def test_same_seed_same_sets_other_seed_other_sets(self):
        parts = [np.arange(0, 100), np.arange(100, 200)]
        one, again, other = (Federated(plain(200), parts, Fractions(), seed, CPU) for seed in (0, 0, 1))
        assert rows_of(one, 1) == rows_of(again, 1)
        assert rows_of(one, 1) != rows_of(other, 1)

    def test_a_clients_sets_do_not_depend_on_who_was_asked_before(self):
        one, other = (federated(plain(200), 4) for _ in range(2))
        forwards = [rows_of(one, k) for k in range(4)]
        backwards = [rows_of(other, k) for k in reversed(range(4))]
        assert forwards == backwards[::-1]

    def test_counts_are_those_of_the_training_set(self):
        data = federated(plain(200), 3, kind="dirichlet")
        for k in range(3):
            labels = data.dataset.y[data.rows(k)["train"]]
            assert data.counts(k) == [int((labels == c).sum()) for c in range(4)]
            assert sum(data.counts(k)) == data.samples(k)


class TestOfficial:
    def test_everyone_is_tested_on_the_official_test_set(self):
        data = federated(plain(100, official=80), 4, test_on="official", val=0.1, test=0.5)
        for k in range(4):
            sets = rows_of(data, k)
            assert sets["test"] == list(range(80, 100))
            assert len(sets["train"]) == 18, "the share for testing stays in training"
            assert sorted(sets["train"] + sets["val"]) == data.parts[k].tolist()
            assert max(sets["train"] + sets["val"]) < 80

    def test_refused_where_there_is_none(self):
        with refused(MismatchError, "plain", "--test common", "--test official"):
            federated(plain(100), 4, test_on="official")


class TestCommon:
    """Everyone is tested on a share of all rows that nobody holds."""

    def assembled(self, dataset: Dataset, kind: str, seed: int = 0, clients: int = 3, **settings) -> Federated:
        described = {"partition": kind, "clients": clients, "alpha": 1.0, "seed": seed, "device": "cpu", "width": None}
        return assemble(experiment("local", data="x", test="common", **described | settings), dataset).data

    @pytest.mark.parametrize("kind", PARTITIONS)
    def test_nobody_holds_a_test_row(self, kind):
        domains = {"domain": torch.arange(200) // 4 % 2, "domains": ("p", "q")}
        holders = {"client": torch.arange(200) // 7 % 3, "clients": ("a", "b", "c")}
        dataset = dataclasses.replace(plain(200), **domains, **holders)
        for seed in range(3):
            data = self.assembled(dataset, kind, seed)
            sets = [rows_of(data, k) for k in range(3)]
            assert [one["test"] for one in sets] == [sets[0]["test"]] * 3
            assert len(sets[0]["test"]) == 40
            for k, one in enumerate(sets):
                assert sorted(one["train"] + one["val"]) == data.parts[k].tolist()
                assert not set(one["test"]) & set(data.parts[k].tolist())

    def test_by_class_and_domain_and_by_seed(self):
        """200 rows of four classes in two domains are 25 of each pair, a fifth of which is 5."""
        dataset = dataclasses.replace(plain(200), domain=torch.arange(200) // 4 % 2, domains=("p", "q"))
        tests = [self.assembled(dataset, "iid", seed).rows(0)["test"] for seed in (0, 0, 1)]
        pairs = dataset.y[tests[0]] * 2 + dataset.domain[tests[0]]
        assert torch.bincount(pairs).tolist() == [5] * 8
        assert torch.equal(tests[0], tests[1])
        assert not torch.equal(tests[0], tests[2])

    def test_a_share_of_its_own_rows_is_for_validation(self):
        data = self.assembled(plain(200), "iid", test_fraction=0.4, val_fraction=0.25)
        assert [len(data.rows(0)[name]) for name in PARTS] == [30, 10, 80, 0]

    def test_copies_of_a_test_image_are_nobodys(self):
        base = dataclasses.replace(load("digits"), official=None)
        turned = rotate_images(base, 20, (0, 20, 40), 0, independent=False)
        data = self.assembled(turned, "domain")
        tested, held = (set().union(*identities(data, name)) for name in ("test", "train"))
        assert (len(tested), len(held)) == (40, 144)
        assert not tested & held
        assert [data.counts(k) for k in range(3)] == [[data.counts(0)[c] for c in range(10)]] * 3

    def test_an_exam_is_the_common_rows_of_its_domain(self):
        dataset = dataclasses.replace(plain(200), domain=torch.arange(200) // 4 % 2, domains=("p", "q"))
        data = self.assembled(dataset, "domain", clients=2)
        exams = data.exams
        common = rows_of(data, 0)["test"]
        assert [len(exam["test"]) for exam in exams.values()] == [20, 20]
        for number, exam in enumerate(exams.values()):
            assert exam["test"].rows.tolist() == [row for row in common if dataset.domain[row] == number]
            assert exam["val"].rows.tolist() == rows_of(data, number)["val"]

    def test_a_domain_too_small_for_a_test_row_is_refused(self):
        dataset = dataclasses.replace(plain(200), domain=(torch.arange(200) < 2).long(), domains=("p", "q"))
        with refused(PartitionError, "common", "plain", "'q'", "--test common"):
            self.assembled(dataset, "domain", clients=2, test_fraction=0.05)

    def test_needs_a_share(self):
        with refused(ConflictError, "--test common", "--test-fraction"):
            experiment("local", test="common", test_fraction=0.0)


class TestIdentity:
    @pytest.mark.parametrize("clients", [3, 6, 7])
    @pytest.mark.parametrize("seed", [0, 1])
    def test_copies_of_an_image_are_in_one_part_for_all(self, clients, seed):
        data = turned_digits(clients, seed, public=0.1)
        found = {name: set().union(*identities(data, name)) for name in PARTS}
        assert all(found.values())
        for one in PARTS:
            for other in PARTS:
                assert one == other or not found[one] & found[other]
        assert len(set().union(*found.values())) == 200

    def test_no_rotation_of_a_test_image_in_anyones_training_data(self):
        data = turned_digits(6)
        tests, trains = identities(data, "test"), identities(data, "train")
        for mine in tests:
            for theirs in trains:
                assert not mine & theirs

    def test_the_domains_of_one_base_are_cut_alike(self):
        data = turned_digits(3)
        for name in PARTS[:3]:
            first, *others = identities(data, name)
            assert all(other == first for other in others)
        assert [len(data.rows(0)[name]) for name in PARTS[:3]] == [140, 20, 40]

    def test_shares_hold_in_every_class(self):
        data = turned_digits(3)
        assert data.counts(1) == [14] * 10

    def test_sets_are_disjoint_and_complete(self):
        data = turned_digits(6, public=0.1)
        everyone = sorted(row for k in range(6) for rows in rows_of(data, k).values() for row in rows)
        assert everyone == list(range(600))

    def test_independent_domains_do_leak(self):
        """What the option gives up, and what the tests above can see."""
        data = turned_digits(3, independent=True)
        assert data.dataset.identity is None
        shared = dataclasses.replace(data.dataset, identity=torch.arange(200).repeat(3))
        data.dataset = shared
        assert identities(data, "test")[0] & identities(data, "train")[1]


class TestPublicAndExams:
    def test_public_sets_by_owner(self):
        data = federated(plain(200), 4, public=0.1)
        public = data.public
        assert list(public) == [0, 1, 2, 3]
        for k, known in public.items():
            assert known.rows.tolist() == rows_of(data, k)["public"]
            assert len(known) == 5

    def test_no_share_no_public_data(self):
        assert federated(plain(200), 4).public == {}

    def test_an_exam_is_the_union_of_its_domains_sets(self):
        data = turned_digits(5)
        exams = data.exams
        assert list(exams) == ["M0", "M20", "M40"]
        for number, exam in enumerate(exams.values()):
            for part in ("val", "test"):
                members = [k for k in range(5) if k % 3 == number]
                assert sorted(exam[part].rows.tolist()) == sorted(r for k in members for r in rows_of(data, k)[part])
                assert (data.dataset.domain[exam[part].rows] == number).all()
            assert len(exam["test"]) == 40

    def test_an_official_exam_is_the_official_rows_of_its_domain(self):
        dataset = plain(100, official=80)
        dataset = dataclasses.replace(dataset, domain=torch.arange(100) // 2 % 3, domains=("p", "q", "r"))
        parts = by_domain(dataset.domain[:80].numpy(), 3, numpy_rng(0, "partition"))
        exams = Federated(dataset, parts, Fractions(test_on="official"), 0, CPU, domain_of={0: 0, 1: 1, 2: 2}).exams
        expected = [[row for row in range(80, 100) if row // 2 % 3 == number] for number in range(3)]
        assert [exam["test"].rows.tolist() for exam in exams.values()] == expected
        for number, exam in enumerate(exams.values()):
            assert max(exam["val"].rows.tolist()) < 80
            assert (dataset.domain[exam["val"].rows] == number).all()


class TestImages:
    def test_every_byte_becomes_a_number_in_minus_one_to_one(self):
        data = data_of(torch.arange(256, dtype=torch.uint8).view(256, 1, 1, 1), [0] * 256)
        x, _ = data.take(torch.arange(256))
        assert x.dtype == torch.float32
        assert x.min() == -1
        assert x.max() == 1
        assert (x.flatten().diff() > 0).all()
        torch.testing.assert_close(x.flatten(), torch.arange(256) / 127.5 - 1)

    def test_take_gives_images_and_labels_of_positions(self):
        data = federated(plain(40), 2).sets(1)["train"]
        x, y = data.take(torch.tensor([2, 0]))
        rows = data.rows[[2, 0]]
        torch.testing.assert_close(x, data.store.x[rows] / 127.5 - 1)
        assert torch.equal(y, data.store.y[rows])
        assert torch.equal(data.labels(), data.store.y[data.rows])

    def test_sets_are_indexed_by_positions(self):
        data = Data(data_of(noise(6), range(6)).store, torch.tensor([5, 3, 1, 0]))
        assert data[torch.tensor([2, 0, 0])].rows.tolist() == [1, 5, 5]
        assert data[1:3].rows.tolist() == [3, 1]
        assert data[torch.tensor([True, False, False, True])].rows.tolist() == [5, 0]
        assert data[1:].store is data.store
        with pytest.raises(TypeError, match="int"):
            data[0]

    def test_sets_of_one_store_are_joined_in_order(self):
        store = data_of(noise(6), range(6)).store
        one, other = Data(store, torch.tensor([4, 0])), Data(store, torch.tensor([2, 0]))
        assert (one + other).rows.tolist() == [4, 0, 2, 0]
        assert Data.join([one, other, other]).rows.tolist() == [4, 0, 2, 0, 2, 0]
        assert one.rows.tolist() == [4, 0]
        with pytest.raises(ValueError, match="two stores"):
            one + data_of(noise(6), range(6))
        with pytest.raises(TypeError):
            one + 1

    def test_taking_does_not_change_the_store(self):
        data = data_of(noise(4), [0, 1, 0, 1])
        before = data.store.x.clone()
        data.take(torch.arange(4))[0].zero_()
        assert torch.equal(data.store.x, before)
        assert data.store.x.dtype == torch.uint8
