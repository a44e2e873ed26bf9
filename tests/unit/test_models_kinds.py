"""Models for signals, tokens and tables: their sizes, padding, gradients, stacking, and what they refuse."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

import pluribus
from conftest import assemble_tiny, make_host
from pluribus import draws
from pluribus.data import Dataset
from pluribus.data.embedded import read_embedded
from pluribus.engines.observe import Observed
from pluribus.engines.stacked import is_stackable
from pluribus.errors import MismatchError, UnknownNameError
from pluribus.inputs import Input
from pluribus.models import GROUP_OF, GROUPS, build, entries, register_model, zoo
from pluribus.models.layers import layers_of
from pluribus.models.sizes import size_of, typical_input
from pluribus.ops import recurrent
from refusals import refused

K = 64
SIGNAL = Input("signal", (6, 32))  # as the embedded recordings of watches
TOKENS = Input("tokens", (12,), vocabulary=50)
TABLE = Input("table", (7,), categories=(3, 4))  # five numbers and two categories
FORMS = {"signal": SIGNAL, "tokens": TOKENS, "table": TABLE}
NAMES = [name for name, entry in entries().items() if entry.takes[0] in FORMS]


def form_of(name):
    return FORMS[entries()[name].takes[0]]


def made(name, form=None, classes=3, **options):
    with draws.seeded(name):
        return build(name, shape=form or form_of(name), classes=classes, **options)


def rows(form, number=4):
    draw = torch.Generator().manual_seed(0)
    if form.kind == "tokens":  # the first row is full, the others have 1, 2, ... tokens
        x = torch.randint(1, form.vocabulary, (number, *form.shape), generator=draw)
        lengths = torch.tensor([form.shape[0], *range(1, number)])[:, None]
        return torch.where(torch.arange(form.shape[0]) < lengths, x, 0)
    x = torch.randn(number, *form.shape, generator=draw)
    for at, size in enumerate(form.categories, form.shape[0] - len(form.categories)):
        x[:, at] = torch.randint(size, (number,), generator=draw).float()
    return x


# ---- sizes, by hand --------------------------------------------------------------------------------------------------


def conv(before, after, kernel, bias=True):
    return before * after * kernel + (after if bias else 0)


def linear(before, after):
    return before * after + after


BLOCK = 2 * 2 * K + linear(K, 3 * K) + linear(K, K) + linear(K, 2 * K) + linear(2 * K, K)
HEAD = linear(K, 10)
WORDS = 8192 * K


def blocks(depth):
    return depth * BLOCK + 2 * K


def rnn(gates, before):
    return gates * (before * K + K * K + 2 * K)


SIZES = {
    # 9 channels, 128 time steps; a normalization has two numbers per channel
    "cnn1d-2": conv(9, 32, 9) + conv(32, 64, 9) + 2 * (32 + 64),
    "cnn1d-3": conv(9, 32, 9) + conv(32, 64, 9) + conv(64, 64, 9) + 2 * (32 + 64 + 64),
    "cnn1d-4": conv(9, 32, 9) + conv(32, 64, 9) + conv(64, 128, 9) + conv(128, 64, 9) + 2 * (32 + 64 + 128 + 64),
    "resnet1d": conv(9, 32, 9, bias=False)
    + 2 * conv(32, 32, 5, bias=False)
    + conv(32, 64, 5, bias=False)
    + conv(32, 64, 1)
    + 3 * conv(64, 64, 5, bias=False)
    + conv(64, 64, 1)
    + 2 * (3 * 32 + 4 * 64),
    "lstm1d": rnn(4, 9),
    "gru1d": rnn(3, 9),
    "transformer1d": conv(9, K, 4) + 32 * K + blocks(2),
    "fasttext": WORDS + linear(K, K),
    "textcnn": WORDS + conv(K, K, 3) + conv(K, K, 4) + conv(K, K, 5) + linear(3 * K, K),
    "textlstm": WORDS + rnn(4, K),
    "textbilstm": WORDS + 2 * rnn(4, K) + linear(2 * K, K),
    "textgru": WORDS + rnn(3, K),
    "texttransformer-1": WORDS + blocks(1),
    "texttransformer-2": WORDS + blocks(2),
    "texttransformer-4": WORDS + blocks(4),
    # 30 columns of numbers
    "logistic": linear(30, 10) - HEAD,
    "table-mlp-1": linear(30, 64),
    "table-mlp-2": linear(30, 256) + linear(256, 64),
    "table-mlp-3": linear(30, 512) + linear(512, 256) + linear(256, 64),
    "table-resnet": linear(30, K) + 2 * (2 * K + linear(K, 2 * K) + linear(2 * K, K)) + 2 * K,
    "ft-transformer": 30 * K + 30 * K + K + blocks(2),
}
# group norm has as many weights as batch norm
SIZES |= {f"{name}-gn": SIZES[name] for name in ("cnn1d-3", "resnet1d")}


def test_sizes_by_hand():
    assert {name: size_of(name).parameters for name in NAMES} == {n: size + HEAD for n, size in SIZES.items()}
    assert SIZES["transformer1d"] + HEAD == 72_138  # with a calculator
    assert SIZES["table-mlp-2"] + HEAD == 25_034


def test_widths():
    assert {name: size_of(name).width for name in NAMES} == dict.fromkeys(NAMES, K) | {"logistic": 30}


def test_categories_are_embedded():
    columns = 5 + 2 * 8
    assert made("table-mlp-1").features.backbone.fc1.in_features == columns
    assert [tuple(p.shape) for p in made("table-resnet").features.backbone.columns.parameters()] == [(3, 8), (4, 8)]
    assert [tuple(e.weight.shape) for e in made("ft-transformer").features.backbone.embeddings] == [(3, K), (4, K)]


def test_logistic_sees_numbers_as_they_are_and_a_mark_for_each_category():
    x = torch.tensor([[-9.5, 1e6, 0.0, 2.0, 3.0, 2.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 3.0]])
    assert made("logistic").features(x).tolist() == [
        [-9.5, 1e6, 0.0, 2.0, 3.0, 0, 0, 1, 1, 0, 0, 0],
        [1.0, 2.0, 3.0, 4.0, 5.0, 1, 0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("name", ["table-mlp-1", "table-resnet", "ft-transformer"])
def test_a_category_without_an_embedding_is_an_error(name):
    x = rows(TABLE)
    x[0, 5] = 3  # of three values, 0 to 2
    with pytest.raises(IndexError):
        made(name)(x)


@pytest.mark.parametrize("form", [Input("tensor", (2, 3)), Input("tensor", (5,), whole=True), Input("table", (4,))])
@pytest.mark.parametrize("name", ["logistic", "table-mlp-1", "table-resnet", "ft-transformer"])
def test_tables_may_be_any_tensor(name, form):
    assert made(name, form, width=8)(form.zeros(3)).shape == (3, 3)


@pytest.mark.parametrize("length", [1, 3, 4, 9, 50])
@pytest.mark.parametrize("name", [name for name in NAMES if entries()[name].takes == ("signal",)])
def test_signals_of_any_length(name, length):
    form = Input("signal", (2, length))
    assert made(name, form)(rows(form)).shape == (4, 3)


# ---- every model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter(name):
    model = made(name)
    model(rows(form_of(name))).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("name", NAMES)
def test_weights_depend_on_the_seed_alone(name):
    zoo._native_widths.clear()
    measured, again = made(name).state_dict(), made(name).state_dict()
    assert all(torch.equal(measured[n], again[n]) for n in measured)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_reads_no_value_and_has_a_fixed_shape(name):
    model = made(name).train()
    with Observed() as watch:
        model(rows(form_of(name))).sum().backward()
    assert watch.reason is None


@pytest.mark.parametrize("name", [name for name in NAMES if "lstm" not in name and "gru" not in name])
def test_stacked_models_are_the_models(name):
    x = rows(form_of(name), 6).view(2, 3, *form_of(name).shape)
    with draws.seeded(0):
        models = [build(name, shape=form_of(name), classes=3).eval() for _ in range(2)]
    parameters, buffers = stack_module_state(models)
    together = vmap(lambda p, b, x: functional_call(models[0], (p, b), (x,)))(parameters, buffers, x)
    alone = torch.stack([model(part) for model, part in zip(models, x, strict=True)])
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["lstm1d", "gru1d", "textlstm", "textbilstm", "textgru"])
def test_recurrent_models_are_differentiated_twice(name):
    """A product of Hessian and vector in single precision, against a difference of gradients in double precision."""
    model, x = made(name), rows(form_of(name))
    parameters = dict(model.named_parameters())
    draw = torch.Generator().manual_seed(1)
    along = {n: torch.randn(p.shape, generator=draw) for n, p in parameters.items()}

    def gradient(at, x):
        loss = functional_call(model, at, (x,)).square().mean()
        return torch.autograd.grad(loss, list(at.values()), create_graph=True)

    found = sum((g * along[n]).sum() for n, g in zip(parameters, gradient(parameters, x), strict=True))
    found.backward()
    exact = {n: p.detach().double() for n, p in parameters.items()}
    wide = x.double() if x.is_floating_point() else x
    sides = []
    for sign in (1, -1):
        moved = {n: (p + sign * 1e-5 * along[n]).requires_grad_() for n, p in exact.items()}
        sides.append(gradient(moved, wide))
    for p, up, down in zip(parameters.values(), *sides, strict=True):
        expected = (up - down).detach() / 2e-5
        assert torch.allclose(p.grad.double(), expected, rtol=1e-3, atol=1e-4)


# ---- tokens ----------------------------------------------------------------------------------------------------------

TEXT = [name for name in NAMES if entries()[name].takes == ("tokens",)]


@pytest.mark.parametrize("name", TEXT)
def test_padding_changes_nothing(name):
    x = rows(TOKENS)
    longer = Input("tokens", (TOKENS.shape[0] + 5,), vocabulary=TOKENS.vocabulary)
    model, other = made(name).eval(), made(name, longer).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():  # whatever stands for padding
        model.features.backbone.embedding.weight[0] = 7.0
    padded = torch.cat([x, torch.zeros(len(x), 5, dtype=torch.int64)], 1)
    assert torch.allclose(model.features(x), other.features(padded), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TEXT)
def test_rows_of_one_token_and_of_none(name):
    features = made(name).eval().features(torch.tensor([[3] + [0] * 11, [4] + [0] * 11, [0] * 12]))
    assert features.isfinite().all()
    assert not torch.equal(features[0], features[1])


@pytest.mark.parametrize("name", [name for name in TEXT if name != "fasttext"])
def test_order_matters(name):
    x = torch.tensor([[1, 2, 3, 4, 5, 6] + [0] * 6, [6, 5, 4, 3, 2, 1] + [0] * 6])
    features = made(name).eval().features(x)
    assert not torch.allclose(features[0], features[1], atol=1e-4)


def test_the_second_lstm_reads_from_the_last_token_to_the_first():
    net = made("textbilstm").features.backbone
    net.back.load_state_dict(net.ahead.state_dict())
    x = torch.tensor([[5, 6, 7, 0], [7, 6, 5, 0]])
    seen = []
    net.fc.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    net(x)
    ahead, back = seen[0].split(K, 1)
    assert torch.allclose(ahead, back.flip(0), atol=1e-6)  # each row is the other one, reversed


def test_the_state_is_that_of_the_last_token():
    net, x = made("textgru").features.backbone, torch.tensor([[5, 6, 7, 0, 0], [9, 8, 7, 6, 5]])
    alone, full = (net.layer(net.embedding(row))[1][0] for row in (x[:1, :3], x[1:]))
    assert torch.allclose(net(x), torch.cat([alone, full]), atol=1e-6)


# ---- clients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "form", "facts"),
    [
        ("textcnn", Input("image", (1, 8, 8)), ("tokens", "images", "small")),
        ("cnn1d-3", TOKENS, ("signals", "tokens", "text6")),
        ("resnet18", TABLE, ("images", "tables", "table4")),
        ("table-resnet", SIGNAL, ("tables and tensors", "signals", "sensor5")),
        ("logistic", TOKENS, ("tables, tensors, images and signals", "tokens")),
    ],
)
def test_wrong_pairs(name, form, facts):
    with refused(MismatchError, f"'{name}'", *facts, "pluribus list models", f"--takes {form.kind}"):
        build(name, shape=form, classes=3)


def test_digits_are_no_text():
    with refused(MismatchError, "'textcnn'", "tokens", "images"):
        assemble_tiny("local", models="textcnn")


def data_of(kind, number=80):
    form, draw = FORMS[kind], torch.Generator().manual_seed(0)
    x = rows(form, 8).repeat(number // 8, *[1] * len(form.shape))
    y = torch.randint(3, (number,), generator=draw)
    names = tuple(tuple(map(str, range(size))) for size in form.categories)
    x = x.int() if kind == "tokens" else x
    return Dataset(kind, x, y, ("a", "b", "c"), kind=kind, vocabulary=form.vocabulary, categories=names)


QUICK = {"clients": 4, "rounds": 2, "partition": "iid", "batch_size": 16, "progress": False, "threads": 1}


@pytest.mark.parametrize("method", ["fedproto", "fedgh", "fedfree"])
@pytest.mark.parametrize("kind", FORMS)
def test_the_group_of_a_kind_runs_without_further_settings(kind, method):
    group = GROUPS[GROUP_OF[kind]].models
    result = pluribus.run(method, data=data_of(kind), min_samples=4, **QUICK | {"clients": len(group)})
    assert [client.model for client in result.clients.values()] == list(group)


@pytest.mark.parametrize("kind", FORMS)
def test_a_method_for_one_model_gets_the_first_of_the_group(kind):
    result = pluribus.run("fedavg", data=data_of(kind), **QUICK)
    assert {client.model for client in result.clients.values()} == {GROUPS[GROUP_OF[kind]].models[0]}


@pytest.mark.parametrize("models", ["lstm1d", "gru1d"])
def test_recurrent_clients_with_second_derivatives(models):
    pluribus.run("per-fedavg", data=data_of("signal"), models=models, **QUICK)


def test_the_embedded_signals_have_models():
    x = torch.from_numpy(read_embedded("watch")["x"][:4].astype("float32"))
    form = Input("signal", tuple(x.shape[1:]))
    assert {made(name, form)(x).shape for name in GROUPS["sensor5"].models} == {(4, 3)}


@pytest.mark.parametrize(("model", "stacks"), [("cnn1d-2", True), ("transformer1d", True), ("lstm1d", False)])
def test_recurrent_clients_train_one_by_one(model, stacks):
    parts = assemble_tiny("local", data=data_of("signal"), models=model, partition="iid", min_samples=4)
    client = make_host(parts).client(0)
    assert is_stackable(parts.method, client) == stacks
    assert recurrent(client.model) != stacks


def test_layers_that_can_be_exchanged():
    def kinds(name):
        return [layer.kind for layer in layers_of(made(name), form_of(name))]

    assert kinds("cnn1d-2") == ["conv", "norm", "conv", "norm", "linear"]
    assert kinds("lstm1d") == ["linear"]
    assert kinds("textcnn") == ["conv"] * 3 + ["linear"] * 2
    assert kinds("logistic") == ["linear"]


# ---- lists -----------------------------------------------------------------------------------------------------------


def test_models_by_what_they_take():
    assert [row["name"] for row in pluribus.list_models(takes="tokens")] == TEXT
    by_name = {row["name"]: row for row in pluribus.list_models(takes="signal")}
    assert by_name["gru1d"]["parameters"] == SIZES["gru1d"] + HEAD
    assert (by_name["gru1d"]["takes"], by_name["gru1d"]["on"]) == ("signal", "9x128 signals")
    assert {"mlp-64", "logistic"} <= by_name.keys()
    assert "cnn-16" not in by_name
    with refused(UnknownNameError, "'sound'"):
        pluribus.list_models(takes="sound")


def test_a_model_for_other_rows_than_the_typical_ones_has_no_size(monkeypatch):
    monkeypatch.setattr(zoo, "_entries", entries())
    register_model("picky", "for 8 x 8 images")(lambda shape: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
    assert typical_input("picky").shape == (3, 32, 32)
    assert pluribus.list_models("picky")[0]["parameters"] is None
