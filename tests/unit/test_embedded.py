"""The data sets that ship with the package: their rows, and the promises a split relies on."""

from __future__ import annotations

import numpy as np
import pytest

from pluribus.data.embedded import decode_texts, read_embedded
from pluribus.errors import UnknownNameError


@pytest.mark.parametrize(
    ("name", "labels", "rows", "classes", "clients", "groups", "fewest"),
    [("speeches", "label", 2610, 6, 8, 435, 24), ("watch", "y", 1833, 7, 10, 140, 15)],
)
def test_every_client_has_every_class_and_a_group_lies_within_one_client_and_class(
    name: str, labels: str, rows: int, classes: int, clients: int, groups: int, fewest: int
) -> None:
    arrays = read_embedded(name)
    label, client, group = arrays[labels].astype(int), arrays["client"].astype(int), arrays["group"].astype(int)
    assert len(label) == len(client) == len(group) == rows
    assert (len(arrays["classes"]), len(arrays["clients"]), len(arrays["groups"])) == (classes, clients, groups)
    assert np.bincount(client * classes + label, minlength=clients * classes).min() == fewest
    assert label.max() == classes - 1
    assert client.max() == clients - 1
    assert np.array_equal(np.unique(group), np.arange(groups))
    assert len(np.unique(np.stack([group, client, label], axis=1), axis=0)) == groups


def test_passages_are_distinct_and_of_40_to_80_words() -> None:
    texts = decode_texts(read_embedded("speeches"))
    assert len(set(texts)) == len(texts) == 2610
    assert {len(text.split()) for text in texts} <= set(range(40, 81))


def test_windows_are_distinct_and_follow_each_other_within_a_recording() -> None:
    arrays = read_embedded("watch")
    x, time, group = arrays["x"], arrays["time"], arrays["group"]
    assert x.shape[1:] == (len(arrays["channels"]), 32) == (len(arrays["scale"]), 32)
    assert len(np.unique(x.reshape(len(x), -1), axis=0)) == len(x)
    seconds = x.shape[2] / float(arrays["rate"])
    for recording in range(140):
        starts = time[group == recording]
        assert np.allclose(starts, np.arange(len(starts)) * seconds)


def test_the_scale_gives_the_accelerometer_one_g_at_the_middle() -> None:
    arrays = read_embedded("watch")
    g = arrays["x"][:, :3] * arrays["scale"][:3, None]
    assert np.median(np.linalg.norm(g, axis=1)) == pytest.approx(1.0, abs=0.1)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownNameError):
        read_embedded("songs")
