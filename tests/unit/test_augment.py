"""Augmentation: what happens to an image, by its key; and which images it happens to."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_dropout import python_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pluribus
from conftest import assemble_tiny, make_host, run_tiny
from kit import StopAfter, StoppedError, assert_same, numbers
from pluribus.client import Batch, Client
from pluribus.conformance.kinds import SAMPLES
from pluribus.data.augment import AUGMENTATIONS, AUGMENTS, DRAWS, Augment, parse_augmentations
from pluribus.data.federated import Store
from pluribus.errors import FormatError, MismatchError, SchemaError, UnknownNameError
from pluribus.experiment import Experiment, experiment, flags
from pluribus.inputs import Input
from pluribus.internal.steps import Descent, Eager, Fit
from pluribus.request import Evaluate, Work
from pluribus.sites.agreement import Agreement, Form
from refusals import refused

ALL = "crop,flip,erase"
CPU = torch.device("cpu")


# ---- one image, by hand ----------------------------------------------------------------------------------------------


def by_hand(image: list[list[float]], key: int, names: tuple[str, ...]) -> list[list[float]]:
    """What happens to an image of one channel, pixel by pixel: flipped, then partly erased, then moved."""
    height, width = len(image), len(image[0])
    draw = [python_bits(key, number) for number in range(DRAWS)]
    now = [row[::-1] if "flip" in names and draw[2] < 2**23 else list(row) for row in image]
    if "erase" in names and draw[3] < 2**23:
        area = (0.04 + 0.16 * draw[4] / 2**24) * height * width
        ratio = 2 ** (2 * draw[5] / 2**24 - 1)
        high, wide = (min(max(round(side), 1), most) for side, most in zip(
            ((area * ratio) ** 0.5, (area / ratio) ** 0.5), (height, width), strict=True))  # fmt: skip
        top, left = draw[6] * (height - high + 1) // 2**24, draw[7] * (width - wide + 1) // 2**24
        for i in range(top, top + high):
            for j in range(left, left + wide):
                now[i][j] = 0.0
    if "crop" not in names:
        return now
    most = max(1, height // 8), max(1, width // 8)
    down, right = (draw[d] * (2 * m + 1) // 2**24 - m for d, m in enumerate(most))
    return [
        [now[i][j] if 0 <= i < height and 0 <= j < width else 0.0 for j in range(right, right + width)]
        for i in range(down, down + height)
    ]


OF_IMAGES = tuple(name for name, kind in AUGMENTS.items() if kind == "image")
subsets = st.sets(st.sampled_from(OF_IMAGES), min_size=1).map(lambda some: parse_augmentations(sorted(some)))


@given(st.integers(0, 2**62 - 1), st.integers(1, 20), st.integers(1, 20), subsets)
def test_every_pixel_is_where_the_definition_has_it(key, height, width, names):
    x = torch.arange(1.0, 2 * height * width + 1).view(1, 2, height, width)
    found = Augment(names, torch.tensor([key]))(x)
    assert found[0].tolist() == [by_hand(channel, key, names) for channel in x[0].tolist()]


def key_with(**wanted: Any) -> int:
    """The first key whose draws are as wanted: of the flip, of the moves along 8 pixels, or of the erasing."""
    parts = {
        "down": lambda key: python_bits(key, 0) * 3 // 2**24 - 1,
        "right": lambda key: python_bits(key, 1) * 3 // 2**24 - 1,
        "flipped": lambda key: python_bits(key, 2) < 2**23,
        "erased": lambda key: python_bits(key, 3) < 2**23,
    }
    return next(key for key in range(1000) if all(parts[name](key) == value for name, value in wanted.items()))


def test_a_flip():
    row = torch.tensor([[[[1.0, 2.0, 3.0]]]])
    keys = torch.tensor([key_with(flipped=True), key_with(flipped=False)])
    assert Augment(("flip",), keys)(row.expand(2, 1, 1, 3)).tolist() == [[[[3, 2, 1]]], [[[1, 2, 3]]]]


def test_a_move_fills_with_gray():
    """One pixel of 8. Cut out one row lower and one column to the left, the pixel at (1, 1) comes to (0, 2)."""
    x = torch.full((1, 1, 8, 8), -1.0)
    x[0, 0, 1, 1] = 1.0
    moved = Augment(("crop",), torch.tensor([key_with(down=1, right=-1)]))(x)[0, 0]
    assert moved[0, 2] == 1.0
    assert moved[7].tolist() == [0.0] * 8
    assert moved[:, 0].tolist() == [0.0] * 8
    assert (moved[:7, 1:] == -1).sum() == 48


def test_padding_grows_with_the_side():
    """4 pixels of 32 as in the authors' code, 3 of 28, 1 of 8; never none."""
    for side, most in ((32, 4), (28, 3), (8, 1), (4, 1)):
        x = torch.zeros(2000, 1, side, side)
        x[:, :, side // 2, side // 2] = 1.0
        at = Augment.of(("crop",), 9, 2000, CPU)(x).flatten(1).argmax(1)  # type: ignore[misc]
        moves = Counter((at // side - side // 2).tolist())
        assert set(moves) == set(range(-most, most + 1))
        assert min(moves.values()) > 0.6 * 2000 / (2 * most + 1)


def test_one_half_is_flipped_and_one_half_erased_by_4_to_20_per_cent():
    x = torch.ones(4000, 3, 32, 32)
    x[..., 0] = 2.0
    flipped = Augment.of(("flip",), 5, 4000, CPU)(x)[:, 0, 0, -1] == 2  # type: ignore[misc]
    assert flipped.float().mean().item() == pytest.approx(0.5, abs=0.04)
    gone = (Augment.of(("erase",), 5, 4000, CPU)(x) == 0)[:, 0]  # type: ignore[misc]
    area = gone.flatten(1).sum(1)[gone.flatten(1).any(1)] / 32**2
    assert len(area) / 4000 == pytest.approx(0.5, abs=0.04)
    assert 0.03 < area.min() < 0.05
    assert 0.19 < area.max() < 0.215
    assert area.mean().item() == pytest.approx(0.12, abs=0.005)
    assert (gone[:, 0].float().mean() - gone[:, 31].float().mean()).abs() < 0.05  # anywhere alike


def test_images_do_not_depend_on_their_batch():
    x = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    augment = Augment.of(parse_augmentations(ALL), 77, 10, CPU)
    assert augment is not None
    parts = [part(rows) for part, rows in zip(augment.split([4, 6]), x.split([4, 6]), strict=True)]
    assert torch.equal(torch.cat(parts), augment(x))
    assert torch.equal(augment.part(3, 5)(x[3:5]), augment(x)[3:5])


def test_it_looks_at_no_number():
    """A program for tensors that have shapes and no numbers: nothing in it waits for a GPU."""
    augment = Augment.of(parse_augmentations(ALL), 77, 4, CPU)
    assert augment is not None
    mode = FakeTensorMode()
    keys, x = mode.from_tensor(augment.keys), mode.from_tensor(torch.zeros(4, 3, 8, 8))
    with mode:
        assert Augment(augment.names, keys)(x).shape == x.shape


# ---- signals and tokens ----------------------------------------------------------------------------------------------

KINDS = {"signals": ("jitter", "scale"), "tokens": ("drop",)}


def changed(names: tuple[str, ...], x: Tensor, key: int = 7) -> Tensor:
    augment = Augment.of(names, key, len(x), CPU)
    assert augment is not None
    return augment(x)


def normal_by_hand(key: int, number: int) -> float:
    """The normal number of two draws: Box and Muller."""
    low, high = ((python_bits(key, 2 * number + at) + 0.5) / 2**24 for at in (0, 1))
    return math.sqrt(-2 * math.log(low)) * math.cos(2 * math.pi * high)


@given(key=st.integers(0, 2**40), names=st.sampled_from([("jitter",), ("scale",), ("jitter", "scale")]))
def test_every_sample_of_a_signal_is_as_the_definition_has_it(key, names):
    """Of each channel, the first draw is its factor, and the others are the noise of its samples."""
    x = torch.tensor([[[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]]])
    found = Augment(names, torch.tensor([key]))(x)[0]
    for channel in range(2):
        draws = [normal_by_hand(key, 4 * channel + at) for at in range(4)]
        factor = 1 + 0.1 * draws[0] if "scale" in names else 1
        noise = [0.05 * draw if "jitter" in names else 0 for draw in draws[1:]]
        expected = [factor * value + add for value, add in zip(x[0, channel].tolist(), noise, strict=True)]
        assert found[channel].tolist() == pytest.approx(expected, abs=1e-5)


def test_noise_and_factors_have_their_deviations():
    noise = changed(("jitter",), torch.zeros(500, 3, 20))
    assert noise.std().item() == pytest.approx(0.05, rel=0.03)
    assert noise.mean().item() == pytest.approx(0, abs=0.002)
    factors = changed(("scale",), torch.ones(2000, 3, 4))
    assert (factors[:, :, :1] == factors).all(), "one factor for all samples of a channel"
    assert factors[:, :, 0].std().item() == pytest.approx(0.1, rel=0.05)
    assert factors.mean().item() == pytest.approx(1, abs=0.01)


@given(key=st.integers(0, 2**40))
def test_every_dropped_token_is_as_the_definition_has_it(key):
    x = torch.tensor([[5, 6, 7, 8, 9, 0, 0]])
    dropped = [python_bits(key, at) < int(0.1 * 2**24) for at in range(7)]
    expected = [1 if gone and value else value for gone, value in zip(dropped, x[0].tolist(), strict=True)]
    assert Augment(("drop",), torch.tensor([key]))(x)[0].tolist() == expected


def test_a_tenth_of_all_tokens_becomes_unknown_and_padding_stays():
    x = torch.full((2000, 10), 5)
    x[:, 6:] = 0
    found = changed(("drop",), x)
    assert found.dtype == torch.int64
    assert (found[:, :6] == 1).float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert not found[:, 6:].any()
    assert {*found.unique().tolist()} == {0, 1, 5}


@pytest.mark.parametrize("names", KINDS.values(), ids=KINDS)
def test_rows_do_not_depend_on_their_batch(names):
    x = torch.randint(1, 50, (10, 6)) if names == ("drop",) else torch.randn(10, 3, 6)
    augment = Augment.of(names, 77, 10, CPU)
    assert augment is not None
    parts = [part(rows) for part, rows in zip(augment.split([4, 6]), x.split([4, 6]), strict=True)]
    assert torch.equal(torch.cat(parts), augment(x))
    assert torch.equal(augment(x), augment(x))
    mode = FakeTensorMode()
    with mode:  # nothing in it waits for a GPU
        assert Augment(names, mode.from_tensor(augment.keys))(mode.from_tensor(x)).shape == x.shape


@pytest.mark.parametrize("name", KINDS)
def test_only_training_rows_of_a_kind_are_changed(name):
    (sample,) = (one for one in SAMPLES if one.name == name)
    settings = sample.settings_for(same_model=True) | {"augment": KINDS[name]}
    client, seen, host = watched(**settings)
    plain = watched(**settings | {"augment": ""})[0]
    assert torch.equal(client.sweep(Client.features), plain.sweep(Client.features))
    host.answer(Work(0, 0))
    assert not any(map(torch.equal, seen.images, seen.plain))
    assert_same(*(run_tiny("fedgh", threads=1, **settings) for _ in range(2)))


@pytest.mark.parametrize(
    ("names", "wrong", "known"),
    [("crop", "crop", "drop"), ("jitter", "jitter", "drop"), ("flip,drop", "flip", "drop")],
)
def test_an_augmentation_of_another_kind_is_refused(names, wrong, known):
    tokens = SAMPLES[1].settings_for(same_model=True)
    with refused(MismatchError, f"--augment {wrong}", "tokens", known):
        assemble_tiny("local", **tokens, augment=names)


# ---- which images ----------------------------------------------------------------------------------------------------


class Seen(Eager):
    """Notes what steps see, and what they would see without augmentation."""

    def __init__(self) -> None:
        self.fits: list[Fit] = []
        self.images: list[Tensor] = []
        self.plain: list[Tensor] = []

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        def step(client: Client, batch: Batch) -> Tensor | None:
            self.images.append(batch.x)
            self.plain.append(fit.data.take(batch.i)[0])
            return fit.step(client, batch)

        self.fits.append(fit)
        return super().fit(client, fit._replace(step=step))


def watched(method: str = "local", client: int = 0, **settings: Any) -> tuple[Client, Seen, Any]:
    host = make_host(assemble_tiny(method, **{"augment": ALL, "models": "mlp-64"} | settings))
    seen = host.client(client).runner = Seen()
    return host.client(client), seen, host


def test_off_is_off():
    _, seen, host = watched(augment="")
    host.answer(Work(0, 0))
    assert seen.fits[0].augment is None
    assert all(map(torch.equal, seen.images, seen.plain))


def test_training_images_are_changed_anew_in_every_epoch_round_and_client():
    client, seen, host = watched(epochs=2, batch_size=1000)
    host.answer(Work(0, 0))
    host.answer(Work(0, 1))
    other, seen_too, host = watched(client=1)
    host.answer(Work(1, 0))
    keys = torch.cat([fit.augment.keys for fit in (*seen.fits, *seen_too.fits) if fit.augment is not None])
    assert len(keys) == 4 * client.card.samples + other.card.samples
    assert len(keys.unique()) == len(keys)
    assert not any(map(torch.equal, seen.images, seen.plain))
    first, again = (torch.empty_like(x).index_copy_(0, fit_order, x) for x, fit_order in _in_order(seen))
    assert not torch.equal(first, again)


def _in_order(seen: Seen) -> list[tuple[Tensor, Tensor]]:
    orders = torch.split(seen.fits[0].order, seen.fits[0].sizes)
    return list(zip(seen.images[:2], orders, strict=True))


def test_how_many_batches_are_gathered_at_once_decides_nothing(monkeypatch):
    _, many, host = watched(epochs=2)
    host.answer(Work(0, 0))
    monkeypatch.setattr("pluribus.internal.batches.CHUNK", 1)
    _, one, host = watched(epochs=2)
    host.answer(Work(0, 0))
    assert len(one.images) > 2
    assert all(map(torch.equal, one.images, many.images))


def test_sweeps_and_evaluation_see_images_as_they_are():
    client, _, host = watched()
    plain = watched(augment="")[0]
    assert torch.equal(client.sweep(Client.features), plain.sweep(Client.features))
    assert host.answer(Evaluate(0, 0)).figures == watched(augment="")[2].answer(Evaluate(0, 0)).figures


@pytest.mark.parametrize("names", [("crop",), ("flip",), ("erase",), OF_IMAGES])
@pytest.mark.parametrize("last", [False, True])
def test_the_layout_is_kept(last, names):
    store = Store(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4), CPU, channels_last=last)
    x, _ = store.take(torch.arange(4), Augment.of(names, 7, 4, CPU))
    assert x.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


PUBLIC = {"partition": "dirichlet", "public_fraction": 0.2}


@pytest.mark.parametrize(
    ("method", "settings", "plain"),
    [
        ("fedmd", PUBLIC | {"pretrain_public": 1, "pretrain_private": 1}, {"FedMD.digest"}),
        ("kt-pfl", PUBLIC, {"KTpFL.distil"}),
        ("fccl", PUBLIC | {"pretrain_private": 1}, {"FCCL.correlate"}),
        ("fedh2l", PUBLIC, {"FedH2L.public_step"}),
        ("fedl2g-l", {}, set()),
    ],
)
def test_public_images_that_others_see_too_stay_as_they_are(method, settings, plain, monkeypatch):
    found: dict[str, bool] = {}
    fit = Eager.fit

    def noted(self: Eager, client: Client, one: Fit) -> Tensor | None:
        step = one.step.loss if isinstance(one.step, Descent) else one.step
        found[step.__qualname__] = one.augment is None
        return fit(self, client, one)

    monkeypatch.setattr(Eager, "fit", noted)
    run_tiny(method, augment=ALL, rounds=1, **settings)
    assert {name for name, as_they_are in found.items() if as_they_are} == plain
    assert len(found) > len(plain)


# ---- engines ---------------------------------------------------------------------------------------------------------

RUN = {"augment": ALL, "models": "mlp-64,cnn-16", "epochs": 2, "rounds": 3, "threads": 1}


def test_it_decides_figures_and_repeats():
    one = run_tiny("fedgh", **RUN)
    assert_same(one, run_tiny("fedgh", **RUN))
    assert numbers(one) != numbers(run_tiny("fedgh", **RUN | {"augment": "crop,flip"}))


def test_a_resumed_run_sees_the_same(tmp_path: Path):
    """test_workers.py, test_transports.py and test_parties.py have runs with augmentation, too."""
    one = run_tiny("fedgh", **RUN)
    with pytest.raises(StoppedError):
        run_tiny("fedgh", **RUN, out=tmp_path / "run", observers=[StopAfter(1)])
    assert_same(one, pluribus.resume(tmp_path / "run", progress=False))


# ---- the setting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["flip,crop", " crop , flip", ["flip", "crop"], ("crop", "flip")])
def test_names_as_text_and_as_a_list(given):
    assert Experiment(augment=given).augment == "crop,flip"


def test_no_names():
    assert Experiment().augment == Experiment(augment=()).augment == Experiment(augment="").augment == ""


@pytest.mark.parametrize(
    ("given", "unknown"), [("mixup", "mixup"), ("crop,", ""), ("crop flip", "crop flip"), (["crop", "3"], "3")]
)
def test_names_that_nobody_knows(given, unknown):
    with refused(UnknownNameError, "--augment", repr(unknown), *AUGMENTATIONS):
        Experiment(augment=given)


def test_a_name_that_is_no_text():
    with refused(FormatError, "--augment", "3"):
        Experiment(augment=["crop", 3])


def test_what_is_no_name():
    with refused(FormatError, "--augment", 3):
        Experiment(augment=3)


def test_names_twice():
    with refused(FormatError, "--augment", "crop"):
        Experiment(augment="crop,flip,crop")


def test_in_files_and_on_the_command_line(tmp_path: Path):
    (tmp_path / "one.toml").write_text('augment = ["flip", "erase"]\n')
    assert experiment("local", tmp_path / "one.toml").augment == "flip,erase"
    assert flags(experiment("local", augment=ALL)) == ["--augment", ALL]
    assert "augment" in experiment("local", augment=ALL).decisive()


def test_sites_agree_on_it():
    form = Form(Input("image", (1, 8, 8)))
    agreement = Agreement.of_experiment(experiment("fedgh", augment=ALL), "a", ("x", "y"), form)
    assert Agreement.of(agreement.facts()).local().augment == OF_IMAGES
    with refused(SchemaError, "mixup"):
        Agreement.of(agreement.facts() | {"augment": ["mixup"]})
    with refused(SchemaError):
        Agreement.of(agreement.facts() | {"augment": 3})
