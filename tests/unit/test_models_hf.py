"""Text encoders of Hugging Face as models: pooled to one vector, with random or pretrained weights, from a folder."""

import sys

import pytest
import torch
from safetensors.torch import save_file

import pluribus
from pluribus import draws
from pluribus.data import Dataset
from pluribus.engines.observe import Observed
from pluribus.errors import MismatchError, PackageError, UnknownNameError, WeightsError
from pluribus.inputs import Input
from pluribus.internal import torchvision as _torchvision  # noqa: F401  before transformers, see there
from pluribus.models import build, has_weights, zoo
from refusals import refused

TOKENS = Input("tokens", (12,), vocabulary=90)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    zoo._hf_entry.cache_clear()
    with refused(PackageError, "pluribus[hf]"):
        build("hf:any", shape=TOKENS, classes=3)


transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder per kind of encoder, as save_pretrained writes it: with other ids of padding, and with a decoder."""
    transformers.utils.logging.disable_progress_bar()
    sizes = {"vocab_size": 100, "max_position_embeddings": 40, **SMALL}
    configs = {
        "bert": transformers.BertConfig(**sizes),
        "roberta": transformers.RobertaConfig(**sizes),
        "t5": transformers.T5Config(vocab_size=100, d_model=32, num_layers=2, num_heads=2, d_ff=64, d_kv=16),
        "gpt2": transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=40),
    }
    found = {}
    for name, config in configs.items():
        found[name] = tmp_path_factory.mktemp("encoders") / name
        with draws.seeded(name):
            transformers.AutoModel.from_config(config).save_pretrained(found[name])
    return found


def rows():
    x = torch.randint(2, 90, (3, 12), generator=torch.Generator().manual_seed(0))
    x[0, 5:] = 0
    return x


KINDS = ["bert", "roberta", "t5", "gpt2"]


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_the_mean_of_the_states_of_tokens(folders, kind):
    model = build(f"hf:{folders[kind]}", shape=TOKENS, classes=3, weights="hf").eval()
    net = transformers.AutoModel.from_pretrained(folders[kind]).eval()
    net = net.get_encoder() if net.config.is_encoder_decoder else net
    for row, features in zip(rows(), model.features(rows()), strict=True):
        tokens = row[row != 0]  # alone, without padding and mask
        expected = net(input_ids=tokens[None]).last_hidden_state[0].mean(0)
        assert torch.allclose(features, expected, atol=1e-5)


def test_padding_has_the_id_of_the_encoder(folders):
    backbone, seen = build(f"hf:{folders['roberta']}", shape=TOKENS, classes=3).features.backbone, []
    backbone.net.register_forward_pre_hook(lambda *given: seen.append(given[2]["input_ids"]), with_kwargs=True)
    backbone(rows())
    assert seen[0][0].tolist() == rows()[0, :5].tolist() + [1] * 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_can_be_captured_and_trains_everything(folders, kind):
    model = build(f"hf:{folders[kind]}", shape=TOKENS, classes=3, width=16).train()
    with Observed() as watch:
        model(rows()).square().sum().backward()
    assert watch.reason is None
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    with torch.no_grad():  # no dropout, whose draws would have no key
        assert torch.equal(model(rows()), model(rows()))


def test_random_weights_depend_on_the_seed_alone(folders):
    def weights(seed):
        with draws.seeded(seed):
            return build(f"hf:{folders['bert']}", shape=TOKENS, classes=3).state_dict()

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    word = "features.backbone.net.embeddings.word_embeddings.weight"
    assert not torch.equal(first[word], other[word])
    with torch.device("meta"):
        assert weights(0).keys() == first.keys()


def test_weights_from_a_folder_of_files(folders, tmp_path):
    name = f"hf:{folders['bert']}"
    assert not has_weights(name)
    assert has_weights(name, "hf")
    pretrained = build(name, shape=TOKENS, classes=3, weights="hf").features.backbone
    file = tmp_path / f"{name.replace('/', '--')}.safetensors"
    save_file({key: value.clone() for key, value in pretrained.net.state_dict().items()}, file)
    again = build(name, shape=TOKENS, classes=3, weights=str(tmp_path)).features.backbone
    assert torch.equal(again(rows()), pretrained(rows()))
    file.unlink()
    with refused(WeightsError, file.name):
        build(name, shape=TOKENS, classes=3, weights=str(tmp_path))
    with refused(WeightsError, "timm", "--weights hf"):
        build(name, shape=TOKENS, classes=3, weights="timm")


def test_what_an_encoder_has_no_room_for(folders, monkeypatch):
    name = f"hf:{folders['bert']}"
    with refused(MismatchError, name, 100, 101, "--tokenizer", "--vocabulary 100"):
        build(name, shape=Input("tokens", (12,), vocabulary=101), classes=3)
    with refused(MismatchError, name, 40, 41, "--length 40"):
        build(name, shape=Input("tokens", (41,), vocabulary=90), classes=3)
    with refused(MismatchError, "roberta", 39, "--length 38"):  # its positions begin after the id of padding
        build(f"hf:{folders['roberta']}", shape=Input("tokens", (39,), vocabulary=90), classes=3)
    with refused(MismatchError, name, "tokens", "images"):
        build(name, shape=(1, 8, 8), classes=3)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refused(UnknownNameError, "'hf:/nowhere'", "save_pretrained"):
        build("hf:/nowhere", shape=TOKENS, classes=3)


def test_clients_with_an_encoder_and_a_small_model(folders):
    y = torch.arange(36) % 3
    data = Dataset("texts", rows().int().repeat(12, 1), y, ("a", "b", "c"), kind="tokens", vocabulary=90)
    models = f"hf:{folders['bert']},fasttext"
    settings = {"clients": 2, "rounds": 2, "partition": "iid", "min_samples": 4, "weights": None, "width": 16}
    result = pluribus.run("fedproto", data=data, models=models, progress=False, **settings)
    assert [client.model for client in result.clients.values()] == models.split(",")
