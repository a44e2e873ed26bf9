"""Image files: the same picture gives the same bytes, however deep its pixels are and whichever way up it is stored."""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image, TiffImagePlugin

import pluribus
from conftest import new_folder, run_tiny
from pluribus.data import load
from pluribus.data.images import TURNS, decode, decode_all, find_images, picture_notes, skipped_note
from pluribus.errors import DamagedDataError
from refusals import refused

GREY = arrays(np.uint8, st.tuples(st.integers(1, 6), st.integers(1, 6)))
QUICK = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
ORIENTATION = 0x0112


def png(values: np.ndarray, color_type: int) -> bytes:
    """A PNG file with 16 bits per channel, written by hand: Pillow writes gray ones alone."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def pgm(values: np.ndarray, most: int) -> bytes:
    height, width = values.shape
    kind = ">u2" if most > 255 else "u1"
    return f"P5\n{width} {height}\n{most}\n".encode() + values.astype(kind).tobytes()


def tiff(values: np.ndarray, **tags: Any) -> bytes:
    written, info = BytesIO(), TiffImagePlugin.ImageFileDirectory_v2()
    for number, value in tags.items():
        info[int(number[1:])] = value
    Image.fromarray(values).save(written, "TIFF", tiffinfo=info)
    return written.getvalue()


def twelve_bits(values: np.ndarray) -> bytes:
    """A TIFF file with two pixels in three bytes, written by hand."""
    height, width = values.shape
    assert width % 2 == 0
    first, second = values[:, ::2].astype(int), values[:, 1::2].astype(int)
    packed = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], -1).astype(np.uint8).tobytes()
    tags = [(256, width), (257, height), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1), (278, height)]
    tags.append((279, len(packed)))
    entries = b"".join(struct.pack("<HHII", number, 4, 1, value) for number, value in tags)
    return struct.pack("<2sHI", b"II", 42, 8 + len(packed)) + packed + struct.pack("<H", len(tags)) + entries + bytes(4)


def read(file: Path, content: bytes, channels: int = 1) -> np.ndarray:
    """What a file with this content becomes at its own size."""
    file.write_bytes(content)
    _, picture = decode(file, (channels, 1, 1))
    x, _ = decode(file, (channels, picture.height, picture.width))
    return x.squeeze(0).numpy() if channels == 1 else x.permute(1, 2, 0).numpy()


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    written = BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


class TestDepth:
    def test_sixteen_bits_by_hand(self, tmp_path: Path) -> None:
        """255 v / 65535 is v / 257, rounded to the nearest: 128 is the last that is nearer to 0."""
        values = np.array([[0, 128, 129, 257, 32767, 32896, 65406, 65407, 65535]], np.uint16)
        expected = [[0, 0, 1, 1, 127, 128, 254, 255, 255]]
        assert read(tmp_path / "a.png", png(values, 0)).tolist() == expected
        assert read(tmp_path / "a.tif", tiff(values)).tolist() == expected
        assert read(tmp_path / "a.pgm", pgm(values, 65535)).tolist() == expected

    @QUICK
    @given(GREY)
    def test_eight_and_sixteen_bits_of_one_image_are_the_same_bytes(self, tmp_path: Path, image: np.ndarray) -> None:
        deep = image.astype(np.uint16) * 257
        files = {
            "a.png": saved(Image.fromarray(image), "PNG"),
            "b.png": png(deep, 0),
            "c.tif": tiff(image),
            "d.tif": tiff(deep),
            "e.tif": tiff(deep.astype(">u2")),
            "f.pgm": pgm(image, 255),
            "g.pgm": pgm(deep, 65535),
            "h.bmp": saved(Image.fromarray(image), "BMP"),
            "i.png": png(np.repeat(deep[..., None], 3, -1), 2),
            "j.webp": saved(Image.fromarray(image).convert("RGB"), "WEBP", lossless=True),
        }
        for name, content in files.items():
            color = read(tmp_path / name, content, channels=3)
            assert (color == image[..., None]).all(), name

    @QUICK
    @given(arrays(np.uint16, st.tuples(st.just(1), st.integers(2, 9))))
    def test_scaling_is_monotone_and_off_by_half_a_level_at_most(self, tmp_path: Path, image: np.ndarray) -> None:
        image.sort()
        found = read(tmp_path / "a.png", png(image, 0)).astype(int)
        assert (np.diff(found) >= 0).all()
        assert (np.abs(found * 257 - image.astype(int)) <= 128).all()

    def test_twelve_bits_are_scaled_by_4095(self, tmp_path: Path) -> None:
        values = np.array([[0, 8, 9, 4095], [2047, 2048, 4086, 4087]])
        found = read(tmp_path / "a.tif", twelve_bits(values))
        assert found.tolist() == [[round(v * 255 / 4095) for v in row] for row in values.tolist()]
        assert decode(tmp_path / "a.tif", (1, 1, 1))[1].bits == 12

    @pytest.mark.parametrize("kind", [np.uint8, np.uint16])
    def test_where_zero_is_white_it_is_white(self, tmp_path: Path, kind: type) -> None:
        found = read(tmp_path / "a.tif", negative(kind))
        assert found.tolist() == [[255, 0]]

    @pytest.mark.parametrize("kind", [np.int32, np.float32])
    def test_pixels_without_a_known_depth_are_refused(self, tmp_path: Path, kind: type) -> None:
        file = tmp_path / "a.tif"
        file.write_bytes(tiff(np.array([[0, 1], [2, 3]], kind)))
        with refused(DamagedDataError, file):
            decode(file, (1, 2, 2))

    def test_a_range_that_is_hardly_used_is_said(self, tmp_path: Path) -> None:
        """12 bits in files of 16: 4095 of 65535 is the level 16 of 255."""
        file = tmp_path / "a.png"
        file.write_bytes(png(np.array([[0, 4095]]), 0))
        x, pictures = decode_all([file], (1, 1, 2))
        assert x.flatten().tolist() == [0, 16]
        assert any("17 of 256" in note for note in picture_notes([file], pictures))
        file.write_bytes(png(np.array([[0, 40950]]), 0))
        assert not any("256" in note for note in picture_notes([file], decode_all([file], (1, 1, 2))[1]))


def negative(kind: type) -> bytes:
    """A file with the pixels 0 and the largest, in this order, where 0 is white."""
    pixels = np.array([[0, np.iinfo(kind).max]], kind)
    content = tiff(pixels, t262=0)
    with Image.open(BytesIO(content)) as image:
        offset = image.tag_v2[273][0]
        assert image.tag_v2[262] == 0
    return content[:offset] + pixels.tobytes() + content[offset + pixels.nbytes :]


class TestModes:
    def test_one_bit_palette_and_cmyk(self, tmp_path: Path) -> None:
        colors = np.array([[[255, 0, 0], [0, 128, 255]]], np.uint8)
        image = Image.fromarray(colors)
        palette = saved(image.convert("P", palette=Image.Palette.ADAPTIVE), "PNG")
        assert read(tmp_path / "p.png", palette, 3).tolist() == colors.tolist()
        assert read(tmp_path / "c.tif", saved(image.convert("CMYK"), "TIFF"), 3).tolist() == colors.tolist()
        bits = Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1")
        assert read(tmp_path / "b.png", saved(bits, "PNG")).tolist() == [[0, 255]]

    def test_alpha_is_dropped_and_said_where_it_is_not_opaque(self, tmp_path: Path) -> None:
        clear, solid = (Image.new("RGBA", (2, 1), (9, 8, 7, alpha)) for alpha in (40, 255))
        gray = Image.new("LA", (2, 1), (9, 0))
        palette = Image.new("P", (2, 1), 1)
        palette.putpalette([1, 2, 3, 9, 8, 7])
        files = {
            "clear.png": saved(clear, "PNG"),
            "solid.png": saved(solid, "PNG"),
            "gray.png": saved(gray, "PNG"),
            "palette.png": saved(palette, "PNG", transparency=1),
            "other.png": saved(palette, "PNG", transparency=0),
        }
        paths = [tmp_path / name for name in files]
        for path, content in zip(paths, files.values(), strict=True):
            path.write_bytes(content)
        x, pictures = decode_all(paths, (3, 1, 2))
        assert x[:, :, 0, 0].tolist() == [[9, 8, 7], [9, 8, 7], [9, 9, 9], [9, 8, 7], [9, 8, 7]]
        assert [one.transparent for one in pictures] == [True, False, True, True, False]
        assert any("3 of 5" in note for note in picture_notes(paths, pictures))

    def test_several_pages_or_frames_are_refused_with_their_number(self, tmp_path: Path) -> None:
        pages = [Image.new("L", (2, 2), shade) for shade in (0, 90, 200)]
        for name, kind in (("a.tif", "TIFF"), ("a.gif", "GIF"), ("a.webp", "WEBP"), ("a.png", "PNG")):
            (tmp_path / name).write_bytes(saved(pages[0], kind, save_all=True, append_images=pages[1:]))
            with refused(DamagedDataError, name) as refusal:
                decode(tmp_path / name, (1, 2, 2))
            assert "3" in str(refusal.value).rpartition(name)[2]

    def test_the_photo_of_a_camera_file_with_previews_is_read_and_said(self, tmp_path: Path) -> None:
        photo, preview = (Image.new("RGB", (8, 8), (shade,) * 3) for shade in (200, 10))
        file = tmp_path / "a.jpg"
        file.write_bytes(saved(photo, "MPO", save_all=True, append_images=[preview]))
        x, pictures = decode_all([file], (1, 1, 1))
        assert int(x) == pytest.approx(200, abs=2)
        assert pictures[0].further == 1
        assert len(picture_notes([file], pictures)) == 1

    def test_a_plain_image_has_nothing_to_be_said(self, tmp_path: Path) -> None:
        file = tmp_path / "a.png"
        Image.new("RGB", (4, 4), (1, 2, 3)).save(file)
        assert picture_notes([file], decode_all([file], (3, 4, 4))[1]) == []

    @QUICK
    @given(st.sampled_from(["PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF", "PPM"]), st.floats(0, 1), st.booleans())
    def test_a_file_that_was_cut_is_refused_or_gives_the_whole_image(
        self, tmp_path: Path, kind: str, share: float, deep: bool
    ) -> None:
        image = np.random.default_rng(0).integers(0, 256, (40, 30), dtype=np.uint8)
        if deep and kind in ("PNG", "TIFF", "PPM"):
            image = image.astype(np.uint16) * 257
        content = saved(Image.fromarray(image), kind)
        whole = read(tmp_path / "whole", content)
        (tmp_path / "cut").write_bytes(content[: int(share * len(content))])
        with contextlib.suppress(DamagedDataError):  # nothing but a sentence, or all of it
            assert (decode(tmp_path / "cut", (1, 40, 30))[0][0].numpy() == whole).all()

    def test_all_damaged_files_are_counted(self, tmp_path: Path) -> None:
        files = [tmp_path / f"{number}.png" for number in range(3)]
        for file in files:
            file.write_text("no image")
        with refused(DamagedDataError, files[0], "2 more", "pluribus data check"):
            decode_all(files, (1, 1, 1))


def stored(image: Image.Image, orientation: int) -> Image.Image:
    """As a camera that is held so stores it."""
    inverse = {6: TURNS[8], 8: TURNS[6]}.get(orientation, TURNS.get(orientation))
    return image if inverse is None else image.transpose(inverse)


class TestOrientation:
    @QUICK
    @given(GREY, st.integers(1, 8), st.sampled_from(["PNG", "TIFF", "WEBP"]))
    def test_any_orientation_gives_the_upright_image(
        self, tmp_path: Path, image: np.ndarray, orientation: int, kind: str
    ) -> None:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        upright = Image.fromarray(image).convert("RGB")
        options = {"lossless": True} if kind == "WEBP" else {}
        content = saved(stored(upright, orientation), kind, exif=exif, **options)
        found = read(tmp_path / f"a.{kind.lower()}", content, channels=3)
        assert found.tolist() == np.asarray(upright).tolist()

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_photos_and_deep_images_too(self, tmp_path: Path, orientation: int) -> None:
        """The corners by hand: bright above left, and less bright above right."""
        corners = np.zeros((32, 48), np.uint8)
        corners[:16, :24], corners[:16, 24:] = 240, 120
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        jpg, deep = tmp_path / "a.jpg", tmp_path / "b.png"
        jpg.write_bytes(saved(stored(Image.fromarray(corners), orientation), "JPEG", exif=exif, quality=95))
        wide = Image.fromarray(corners.astype(np.uint16) * 257)
        deep.write_bytes(saved(stored(wide, orientation), "PNG", exif=exif))
        x, pictures = decode_all([jpg, deep], (1, 32, 48))
        for one in x[:, 0].float():
            assert [float(one[8, 12]), float(one[8, 36]), float(one[24, 12])] == pytest.approx([240, 120, 0], abs=4)
        assert {(one.height, one.width) for one in pictures} == {(32, 48)}
        notes = picture_notes([jpg, deep], pictures)
        assert any("2 of 2" in note and "EXIF" in note for note in notes) == (orientation != 1)

    @QUICK
    @given(st.binary(max_size=60))
    def test_damaged_exif_data_neither_stop_nor_turn_an_image(self, tmp_path: Path, rubbish: bytes) -> None:
        image = Image.fromarray(np.array([[0, 255]], np.uint8))
        file = tmp_path / "a.png"
        file.write_bytes(saved(image, "PNG", exif=b"Exif\0\0" + b"XX" + rubbish))
        x, picture = decode(file, (1, 1, 2))
        assert x.flatten().tolist() == [0, 255]
        assert picture.orientation in (None, 1)

    def test_an_orientation_that_does_not_exist_is_upright(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[ORIENTATION] = 9
        image = Image.fromarray(np.array([[0, 255]], np.uint8))
        assert read(tmp_path / "a.png", saved(image, "PNG", exif=exif)).tolist() == [[0, 255]]


class TestFiles:
    def test_what_is_found_and_what_is_skipped(self, tmp_path: Path) -> None:
        for name in (
            "b.TIF",
            "a.png",
            "deep/c.Jpeg",
            "notes.txt",
            "deep/more.TXT",
            ".DS_Store",
            ".git/d.png",
            "LICENSE",
        ):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        found = find_images(tmp_path)
        assert [str(file.relative_to(tmp_path)) for file in found.images] == ["a.png", "b.TIF", "deep/c.Jpeg"]
        assert {kind: len(files) for kind, files in found.skipped.items()} == {
            "hidden": 2,
            ".txt": 2,
            "without a suffix": 1,
        }
        (note,) = skipped_note(found.skipped, tmp_path)
        assert note.startswith("5 files")
        assert "2 .txt (such as deep/more.TXT)" in note
        assert skipped_note({}, tmp_path) == []

    def test_links_to_folders_are_followed_but_not_in_circles(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "a.png").touch()
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")
        assert [file.name for file in find_images(tmp_path / "data").images] == ["a.png"]

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
    def test_a_folder_that_may_not_be_looked_into(self, tmp_path: Path) -> None:
        (tmp_path / "shut").mkdir(mode=0)
        with refused(DamagedDataError, tmp_path / "shut"):
            find_images(tmp_path)


# ---- from end to end -------------------------------------------------------------------------------------------------


def sides(folder: Path, deep: bool) -> Path:
    """Gray images that are bright on the left or on the right."""
    for at, name in enumerate(("left", "right")):
        (folder / name).mkdir(parents=True)
        for number in range(24):
            pixels = np.random.default_rng([at, number]).integers(1, 100, (8, 8))
            pixels[:, 4 * at : 4 * at + 4] += 100
            kind = pixels.astype(np.uint16) * 257 if deep else pixels.astype(np.uint8)
            Image.fromarray(kind).save(folder / name / f"{number:02d}.png")
    return folder


def test_a_run_and_its_predictions_are_the_same_with_8_and_with_16_bits() -> None:
    folders = [sides(Path(new_folder()) / "sides", deep) for deep in (False, True)]
    settings = {"clients": 2, "partition": "iid", "models": "mlp-64", "image_size": 8, "lr": 0.1, "rounds": 3}
    plain, deep = (run_tiny("local", data=str(folder), **settings) for folder in folders)
    assert plain.accuracy == deep.accuracy == 1.0
    assert plain.warnings == []
    assert ["48 of 48" in text for text in deep.warnings] == [True]
    told: list[str] = []
    answers = [pluribus.predict(plain.folder, folder, 0, tell=told.append) for folder in folders]
    scores = [[(one.label, one.score) for one in answer] for answer in answers]
    assert scores[0] == scores[1]
    assert {(Path(str(one.file)).parent.name, one.label) for one in answers[1]} == {
        ("left", "left"),
        ("right", "right"),
    }
    assert ["48 of 48" in text for text in told] == [True]


def test_notes_reach_the_result_and_its_file() -> None:
    folder = sides(Path(new_folder()) / "sides", deep=False)
    (folder / "left" / "notes.txt").touch()
    (folder / ".DS_Store").touch()
    result = run_tiny("local", data=str(folder), clients=2, partition="iid", models="mlp-64", image_size=8)
    assert ["2 files" in text and ".txt" in text and "hidden" in text for text in result.warnings] == [True]
    assert result.to_json()["warnings"] == result.warnings
    assert load(str(folder)).notes == tuple(result.warnings)
    assert load(str(folder), image_size=4).notes == tuple(result.warnings), "resizing loses none"
    assert torch.equal(load(str(folder), image_size=8).y, torch.tensor([0] * 24 + [1] * 24))


@pytest.mark.parametrize("which", ["", "a", "a/1.png"])
def test_what_this_user_may_not_read_is_named(which: str, tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / "scans" / label).mkdir(parents=True)
        for number in range(3):
            Image.new("L", (8, 8), 20 * number).save(tmp_path / "scans" / label / f"{number}.png")
    for folder in (tmp_path, *tmp_path.parents[:-1]):  # others may pass, up to the folder of all tests
        if folder.stat().st_uid == os.getuid() and folder != Path("/tmp"):
            folder.chmod(0o755)
    closed = tmp_path / "scans" / which
    closed.chmod(0)
    is_root = os.geteuid() == 0
    try:
        if is_root:  # who may read everything
            os.seteuid(65534)
        with refused(DamagedDataError, str(closed), "Permission denied"):
            load(str(tmp_path / "scans"))
    finally:
        if is_root:
            os.seteuid(0)
        closed.chmod(0o755)
