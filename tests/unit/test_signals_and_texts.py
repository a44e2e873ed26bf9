"""Windows of signals and tokens of texts from files, by hand."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from pluribus.data import Dataset, load
from pluribus.data.reading import Reading, parse_columns
from pluribus.data.tokens import hash_word, split_words
from pluribus.data.windows import cut
from pluribus.errors import ConflictError, DataError, MissingDataError, PackageError
from refusals import refused


def read(path: Path, columns: str = "", **how) -> Dataset:
    return load(str(path), reading=Reading(parse_columns(columns), **how))


def write(folder: Path, content: str) -> Path:
    file = folder / "data.csv"
    file.write_text(content, encoding="utf-8")
    return file


def write_samples(folder: Path, rows: list[tuple], header: str = "x,y,label") -> Path:
    return write(folder, "\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


class TestWindows:
    def test_cut_by_hand(self):
        recording = np.array([7, 7, 7, 7, 7, 2, 2, 2])
        label = np.array([0, 0, 0, 1, 1, 1, 1, 1])
        found = cut(recording, [label], None, window=2, stride=1)
        assert found.samples.tolist() == [[0, 1], [1, 2], [3, 4], [5, 6], [6, 7]]
        assert found.start.tolist() == [0, 1, 3, 0, 1]
        assert found.left == 0
        apart = cut(recording, [label], None, window=2, stride=2)
        assert (apart.samples.tolist(), apart.left) == ([[0, 1], [3, 4], [5, 6]], 2)

    def test_interleaved_recordings_and_times(self):
        recording = np.array([1, 0, 1, 0, 1, 0])
        assert cut(recording, [], None, 3, 3).samples.tolist() == [[0, 2, 4], [1, 3, 5]]
        time = np.array([3.0, 1, 2, 2, 1, 3])
        assert cut(recording, [], time, 3, 3).samples.tolist() == [[4, 2, 0], [1, 3, 5]]

    @pytest.mark.parametrize("seed", range(4))
    def test_against_a_loop(self, seed):
        """Every window that a plain loop finds, in the same order, and the same number of samples in none."""
        rng = np.random.default_rng(seed)
        recording, label = rng.integers(0, 2, 60).repeat(2), rng.integers(0, 2, 30).repeat(4)
        window, stride = int(rng.integers(2, 5)), int(rng.integers(1, 6))
        wanted, used = [], set()
        for one in dict.fromkeys(recording.tolist()):
            rows = np.flatnonzero(recording == one).tolist()
            begin = 0
            while begin < len(rows):
                end = begin
                while end < len(rows) and label[rows[end]] == label[rows[begin]]:
                    end += 1
                for at in range(begin, end - window + 1, stride):
                    wanted.append(rows[at : at + window])
                    used |= {*wanted[-1]}
                begin = end
        found = cut(recording, [label], None, window, stride)
        assert found.samples.tolist() == wanted
        assert found.left == len(recording) - len(used)

    def test_signals_of_a_file(self, tmp_path):
        rows = [(at, -at, "walk" if at < 5 else "sit") for at in range(9)]
        found = read(write_samples(tmp_path, rows), window=2)
        assert (found.kind, found.x.shape, found.classes) == ("signal", (4, 2, 2), ("sit", "walk"))
        assert found.x.tolist() == [
            [[0, 1], [0, -1]],
            [[2, 3], [-2, -3]],
            [[5, 6], [-5, -6]],
            [[7, 8], [-7, -8]],
        ]
        assert (found.y.tolist(), found.time.tolist(), found.span) == ([1, 1, 0, 0], [0, 2, 5, 7], 0)
        assert any("1 of 9 samples" in note for note in found.notes)
        assert found.group is None

    def test_a_window_is_of_one_client_group_and_split(self, tmp_path):
        rows = [
            (at, 0, who, part, split)
            for at, (who, part, split) in enumerate(
                [("p", 1, "train")] * 3 + [("p", 2, "train")] * 2 + [("q", 2, "train")] * 3 + [("q", 2, "test")] * 2
            )
        ]
        found = read(write_samples(tmp_path, rows, "x,label,client,group,split"), window=2)
        assert found.x[:, 0].tolist() == [[0, 1], [3, 4], [5, 6], [8, 9]]
        assert (found.client.tolist(), found.part.tolist()) == ([0, 0, 1, 1], [0, 0, 0, 2])
        assert found.group.tolist() == [0, 1, 3, 3], "the same name at two clients is two recordings"

    def test_overlapping_windows_last(self, tmp_path):
        file = write_samples(tmp_path, [(at, 0.5 * at, 0) for at in (1, 0, 2, 3)], "x,time,label")
        found = read(file, window=3, stride=1)
        assert found.x[:, 0].tolist() == [[0, 1, 2], [1, 2, 3]]
        assert (found.time.tolist(), found.span) == ([0, 0.5], 1.5)
        assert any("--split-by time" in note for note in found.notes)
        without = read(file, "ignore=time", window=3, stride=1)
        assert (without.time.tolist(), without.span) == ([0, 1], 3)

    def test_numbers_are_averaged_over_a_window(self, tmp_path):
        file = write_samples(tmp_path, [(0, 1.0), (0, 2.0), (0, 4.0), (0, 5.0)], "x,label")
        assert read(file, window=2, label_kind="numbers").y.tolist() == [[1.5], [4.5]]

    @pytest.mark.parametrize(
        ("rows", "facts"),
        [
            ([(1, 0, 0), ("nan", 0, 0)], ("row 2 (line 3)", "'x'")),
            ([(1, 0, 0), (1, "", 0)], ("row 2 (line 3)", "'y'")),
            ([(1, 0, 0), (1, "high", 0)], ("row 2 (line 3)", "'y'", "'high'")),
            ([(1, 0, 0), (1, 0, 1)], ("2 samples", "--window")),
        ],
    )
    def test_refused(self, tmp_path, rows, facts):
        with refused(DataError, *facts):
            read(write_samples(tmp_path, rows), window=2)


class TestTexts:
    def test_words(self):
        assert split_words("Don't   PANIC, it's 42\u00b0 & e\u0301te\u0301_1") == [
            *("don", "'", "t", "panic", ",", "it", "'", "s", "42", "\u00b0", "&", "\u00e9t\u00e9_1")
        ]

    def test_the_hash_is_the_same_everywhere(self):
        """From the definition: 8 bytes of BLAKE2b, most significant first, on the ids from 2."""
        for word in ("panic", "\u00e9t\u00e9"):
            number = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
            assert hash_word(word, 100) == 2 + number % 98
        assert hash_word("panic", 8192) == 4187
        assert {hash_word(str(number), 5) for number in range(100)} == {2, 3, 4}

    def test_tokens_of_a_file(self, tmp_path):
        file = write(tmp_path, 'text,label,id\n"Hi there, you",a,1\nhi,b,2\n')
        found = read(file, vocabulary=50)
        hi, there, comma, you = (hash_word(word, 50) for word in ("hi", "there", ",", "you"))
        assert (found.kind, found.vocabulary, found.x.tolist()) == (
            "tokens",
            50,
            [[hi, there, comma, you], [hi, 0, 0, 0]],
        )
        assert found.y.tolist() == [0, 1]
        assert any("'text'" in note for note in found.notes)
        assert any("id is not used" in note for note in found.notes)
        short = read(file, length=2)
        assert short.x.shape == (2, 2)
        assert any("1 of 2 texts are cut" in note for note in short.notes)

    def test_the_default_length_leaves_out_five_in_a_hundred(self, tmp_path):
        lengths = [3] * 94 + [7] + [50] * 5
        file = write(tmp_path, "say,label\n" + "".join(f"{'a ' * length},0\n" for length in lengths))
        found = read(file, "text=say")
        assert found.x.shape == (100, 7)
        assert any("5 of 100 texts" in note for note in found.notes)
        file = write(tmp_path, "text,label\n" + f"{'a ' * 900},0\n" * 3)
        assert read(file).x.shape == (3, 256)

    def test_texts_without_a_token(self, tmp_path):
        with refused(DataError, "row 2 (line 3)", "'text'", "no value"):
            read(write(tmp_path, "text,label\nhi,0\n  ,0\n"))
        with refused(ConflictError, "--window"):
            read(write(tmp_path, "say,label\nhi,0\n"), "text=say", window=2)


def save_tokenizer(folder: Path, words: list[str], **special: str) -> str:
    """A tokenizer of Hugging Face in a folder, which needs no network."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    model = tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]")
    fast = tokenizers.Tokenizer(model)
    fast.normalizer = tokenizers.normalizers.Replace("~", "")
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [(word, words.index(word)) for word in ("[CLS]", "[SEP]") if word in words]
    if ends:
        fast.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]", **special)
    whole.save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


class TestTokenizersOfHuggingFace:
    def test_padding_becomes_0(self, tmp_path):
        name = save_tokenizer(tmp_path, ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "hi", "you"], pad_token="[PAD]")
        found = read(write(tmp_path, "text,label\nhi you you,0\nhi,1\n"), tokenizer=name)
        assert found.vocabulary == 6
        assert found.x.tolist() == [[1, 4, 5, 5, 2], [1, 4, 2, 0, 0]], "ids 0 and 1 are exchanged"
        short = read(write(tmp_path, "text,label\nhi you you,0\nno,1\n"), tokenizer=name, length=3)
        assert short.x.tolist() == [[1, 4, 2], [1, 3, 2]], "the end of a cut text stays"
        with refused(DataError, "row 2 (line 3)", "'text'", "token"):
            read(write(tmp_path, "text,label\nhi,0\n~,1\n"), tokenizer=name)

    def test_without_padding_all_ids_move(self, tmp_path):
        name = save_tokenizer(tmp_path, ["hi", "[UNK]", "you"])
        found = read(write(tmp_path, "text,label\nhi you,0\nyou,1\n"), tokenizer=name)
        assert (found.vocabulary, found.x.tolist()) == (4, [[1, 3], [3, 0]])

    def test_missing(self, tmp_path, monkeypatch):
        file = write(tmp_path, "text,label\nhi,0\n")
        monkeypatch.setitem(__import__("sys").modules, "transformers", None)
        with refused(PackageError, "bert", "pluribus[hf]"):
            read(file, tokenizer="bert")

    def test_unknown(self, tmp_path):
        pytest.importorskip("transformers")
        with refused(MissingDataError, tmp_path / "none"):
            read(write(tmp_path, "text,label\nhi,0\n"), tokenizer=str(tmp_path / "none"))
