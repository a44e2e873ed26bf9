"""Small methods that together use every part of the contract. None is a paper; each says whose shape it has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from pluribus.client import Batch, Client
from pluribus.data.federated import Data
from pluribus.message import Dim, Field, Inbox, Message, Rows, Wire, schema_of
from pluribus.method import Exchange, Method, Need, PeerMethod, ServerModel
from pluribus.methods.fedavg import FedAvg
from pluribus.ops import average_uploads, class_means, onehot, weighted_mean
from pluribus.optim import Opt, Rule
from pluribus.server import Server
from pluribus.task import Card, Task

WITH_PUBLIC_DATA = MappingProxyType({"public_fraction": 0.2})


def normed(shape: tuple[int, ...]) -> nn.Module:
    """A backbone that cannot train on a single sample: batch norm has no variance of it."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.BatchNorm1d(64), nn.ReLU())


class RowReader(nn.Module):
    """Reads an image row by row; the features are what is remembered at the end."""

    def __init__(self, kind: type[nn.RNNBase], inputs: int, width: int) -> None:
        super().__init__()
        self.net = kind(inputs, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.transpose(1, 2).flatten(2))[0][:, -1]


def lstm(shape: tuple[int, int, int]) -> nn.Module:
    """A recurrent backbone, whose layers torch runs as one fused kernel."""
    return RowReader(nn.LSTM, shape[0] * shape[2], 64)


def scores_on(client: Client, data: Data) -> Tensor:
    """The model's scores of a small set, in order."""
    return client.sweep(logits, data)


def logits(client: Client, x: Tensor) -> Tensor:
    """The model's own scores."""
    return client.model(x)


@dataclass(frozen=True)
class Consensus(Method):
    """FedMD: two exchanges. Scores on a public subset go up, and everyone digests the mean of the others'."""

    paper = "toy"
    up = "scores on a public subset"
    down = "mean scores of the others"
    needs = frozenset({Need.PUBLIC_DATA})
    defaults = WITH_PUBLIC_DATA
    exchanges = (Exchange(None, "share", "collect"), Exchange("consensus", "digest", None))

    subset: int = 12
    """Public samples per round."""

    def schema(self, task: Task, card: Card) -> tuple[Wire, Wire]:
        scores = Field((self.subset, task.classes))
        return Wire(up={"scores": scores}), Wire(down={"consensus": scores})

    def chosen(self, client: Client, t: int) -> Data:
        store = client.public[0].store
        rows = torch.cat([data.rows for data in client.public.values()])
        order = torch.randperm(len(rows), generator=client.task.draw("subset", t))
        return Data(store, rows[order[: self.subset]])

    def setup(self, server: Server) -> None:
        server.state.scores = torch.zeros(server.task.clients, self.subset, server.task.classes)
        server.state.sent = torch.zeros(server.task.clients, dtype=torch.bool)

    def share(self, client: Client) -> Message:
        client.fit(self.step)
        return Message({"scores": scores_on(client, self.chosen(client, client.t))})

    def collect(self, server: Server, uploads: Mapping[int, Message]) -> None:
        server.state.sent.zero_()
        for k, upload in uploads.items():
            server.state.scores[k] = upload.tensor("scores")
            server.state.sent[k] = True

    def consensus(self, server: Server, client: int) -> Message:
        weights = server.state.sent.float()
        weights[client] = 0
        return Message({"consensus": torch.einsum("k,knc->nc", weights, server.state.scores) / weights.sum().clamp(1)})

    def digest(self, client: Client) -> Message:
        client.fit(self.agree, self.chosen(client, client.t), epochs=1)
        return Message({})

    def agree(self, client: Client, batch: Batch) -> Tensor:
        loss = F.l1_loss(client.model(batch.x), client.got["consensus"][batch.i])
        client.descend(loss)
        return loss


@dataclass(frozen=True)
class Mutual(Method):
    """FML: a second model per client that travels; the two teach each other, each with its own optimizer."""

    paper = "toy"
    up = "the traveling model"
    down = "the mean traveling model"

    aux: str = "mlp-64"
    """The model that travels."""
    label_weight: float = 0.5
    """Weight of the labels against the other model."""

    def schema(self, task: Task, card: Card) -> Wire:
        model = schema_of(task.shape_of(self.aux))
        return Wire(down=model, up=model)

    def prepare(self, client: Client) -> None:
        client.state.aux = client.task.build(self.aux, "aux", client.card.id)

    def optimizers(self, client: Client) -> dict[str, Opt]:
        return {"model": Opt(client.model), "aux": Opt(client.state.aux)}

    def setup(self, server: Server) -> None:
        server.state.aux = server.task.build(self.aux, "aux")

    def download(self, server: Server, client: int) -> Message:
        return Message.of(server.state.aux)

    def receive(self, client: Client, down: Message) -> None:
        client.state.aux.load_state_dict(down.part())

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message.of(client.state.aux)

    def step(self, client: Client, batch: Batch) -> Tensor:
        mine, other = client.model(batch.x), client.state.aux(batch.x)
        loss = self._one(mine, other, batch.y) + self._one(other, mine, batch.y)
        client.descend(loss, "model", "aux")
        return loss

    def _one(self, student: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
        distance = F.kl_div(student.log_softmax(1), teacher.detach().softmax(1), reduction="batchmean")
        return self.label_weight * F.cross_entropy(student, y) + (1 - self.label_weight) * distance

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        samples = {k: server.cards[k].samples for k in uploads}
        server.state.aux.load_state_dict(weighted_mean({k: m.part() for k, m in uploads.items()}, samples))


@dataclass(frozen=True)
class Reviewed(Mutual):
    """FedDF: the server trains the traveling model on public rows, towards the mean scores of those that it got."""

    needs = frozenset({Need.PUBLIC_AT_SERVER})
    defaults = WITH_PUBLIC_DATA

    review_steps: int = 3
    """Steps of the server per round."""

    def setup(self, server: Server) -> None:
        super().setup(server)
        server.optimize("aux", server.state.aux, Rule(lr=0.05, momentum=0.9), life="round")

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        x = server.public.take(torch.arange(len(server.public)))
        sent = [{name: value.to(server.device) for name, value in one.part().items()} for one in uploads.values()]
        with torch.no_grad():
            scores = [functional_call(server.state.aux, weights, (x,)) for weights in sent]
        mean, steps = torch.stack(scores).mean(0), self.review_steps
        server.fit(self.review, x, mean, opts=("aux",), batch=8, steps=steps, anneal=True, shuffle="review")

    def review(self, server: Server, batch: Batch) -> Tensor:
        return F.mse_loss(server.state.aux(batch.x), batch.y)


@dataclass(frozen=True)
class Counted(Method):
    """FedGen: label counts go up once, at enrolment; their sum comes down as log-frequencies that shift the scores."""

    paper = "toy"
    up = "label counts, once"
    down = "log-frequency of each class"
    enrols = True

    def schema(self, task: Task, card: Card) -> Wire:
        counts = Field((task.classes,), torch.int64)
        return Wire(down={"prior": Field((task.classes,))}, once={"counts": counts})

    def enrol(self, client: Client) -> Message:
        return Message({"counts": torch.bincount(client.data["train"].labels(), minlength=client.task.classes)})

    def download(self, server: Server, client: int) -> Message:
        known = [card.enrolled.tensor("counts") for card in server.cards.values() if card.enrolled is not None]
        pooled = torch.stack(known).sum(0).clamp(min=1)
        return Message({"prior": (pooled / pooled.sum()).log()})

    def loss(self, client: Client, batch: Batch) -> Tensor:
        return F.cross_entropy(client.model(batch.x) + client.got["prior"], batch.y)


@dataclass(frozen=True)
class Prototypes(Method):
    """FedProto and FedTGP: class-keyed rows both ways, trained on the server, pulled at by a weight that grows."""

    paper = "toy"
    up = "mean feature of each held class"
    down = "a prototype of each class that anyone held"
    needs = frozenset({Need.SAME_WIDTH})

    server_lr: float = 0.1
    """Learning rate of the prototypes."""
    server_momentum: float = 0.5
    """Momentum of the prototypes; its buffer outlives the round."""

    def schema(self, task: Task, card: Card) -> Wire:
        rows = Field((task.classes, card.width), form="rows")
        return Wire(down={"prototypes": rows}, up={"means": rows})

    def schedule(self, t: int, rounds: int) -> dict[str, float]:
        return {"pull": (t + 1) / rounds}

    def setup(self, server: Server) -> None:
        shape = server.task.classes, server.cards[0].width
        server.state.prototypes, server.state.speed = torch.zeros(shape), torch.zeros(shape)
        server.state.held = torch.zeros(shape[0], dtype=torch.bool)

    def download(self, server: Server, client: int) -> Message:
        return Message({"prototypes": Rows(server.state.prototypes, server.state.held)})

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message({"means": class_means(client)})

    def loss(self, client: Client, batch: Batch) -> Tensor:
        features, rows = client.features(batch.x), client.got["prototypes"]
        there = rows.held[batch.y, None]
        distance = F.mse_loss(features * there, rows.value[batch.y] * there)
        return F.cross_entropy(client.model.head(features), batch.y) + client.now["pull"] * distance

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        state = server.state
        for upload in uploads.values():
            means = upload.rows("means")
            gradient = (state.prototypes - means.value) * means.held[:, None]
            state.speed = self.server_momentum * state.speed + gradient
            state.prototypes = state.prototypes - self.server_lr * state.speed
            state.held = state.held | means.held

    def predict(self, client: Client, x: Tensor) -> Tensor:
        features, rows = client.features(x), client.got["prototypes"]
        nearness = -torch.cdist(features, rows.value).masked_fill(~rows.held, 1e4)
        return torch.where(rows.held.any(), nearness, client.model.head(features))


@dataclass(frozen=True)
class Steady(Method):
    """FedH2L's optimizer, alone: AMSGrad whose moments live as long as the run, under a learning weight that falls."""

    paper = "toy"

    def schedule(self, t: int, rounds: int) -> dict[str, float]:
        return {"scale": 1 - t / rounds}

    def optimizers(self, client: Client) -> dict[str, Opt]:
        return {"model": Opt(client.model, Rule("amsgrad", lr=0.001), life="run")}

    def loss(self, client: Client, batch: Batch) -> Tensor:
        return client.now["scale"] * super().loss(client, batch)


@dataclass(frozen=True)
class Peers(PeerMethod):
    """FedH2L: no server. Everyone teaches its posteriors on a public batch that its students derive from the round."""

    paper = "toy"
    up = "posteriors on an own public batch"
    down = "those of the teachers"
    needs = frozenset({Need.PUBLIC_DATA})
    defaults = WITH_PUBLIC_DATA

    lesson: int = 6
    """Public samples that a teacher shows per round."""

    def schema(self, task: Task, card: Card) -> Wire:
        return Wire(up={"posteriors": Field((self.lesson, task.classes))})

    def shown(self, client: Client, teacher: int) -> Data:
        public = client.public[teacher]
        picked = torch.randint(len(public), (self.lesson,), generator=client.task.draw("lesson", client.t, teacher))
        return Data(public.store, public.rows[picked])

    def teach(self, client: Client) -> Message | None:
        client.fit(self.step)
        me = client.card.id
        if not client.task.public[me]:
            return None
        return Message({"posteriors": scores_on(client, self.shown(client, me)).softmax(1)})

    def learn(self, client: Client, inbox: Inbox) -> None:
        lessons = [self.shown(client, teacher) for teacher in inbox.ids]
        client.fit(self.imitate, Data(lessons[0].store, torch.cat([data.rows for data in lessons])), epochs=1)

    def imitate(self, client: Client, batch: Batch) -> Tensor:
        posteriors = client.inbox.got["posteriors"].flatten(0, 1)[batch.i]
        loss = F.kl_div(client.model(batch.x).log_softmax(1), posteriors, reduction="batchmean")
        client.descend(loss)
        return loss


@dataclass(frozen=True)
class Pairs(Peers):
    """The same among random pairs, drawn anew each round; of an odd number one stays alone."""

    def topology(self, task: Task, t: int, present: tuple[int, ...]) -> Mapping[int, tuple[int, ...]]:
        order = [present[i] for i in torch.randperm(len(present), generator=task.draw("pairs", t)).tolist()]
        pairs = list(zip(order[::2], order[1::2], strict=False))
        return {one: (other,) for pair in pairs for one, other in (pair, pair[::-1])}


@dataclass(frozen=True)
class Adapted(FedAvg):
    """Per-FedAvg: a view of its own, in which every client first takes one step from the global model."""

    views = ("adapted", "before")

    def adapt(self, client: Client, view: str) -> None:
        if view == "adapted":
            client.fit(self.step, steps=1)


@dataclass(frozen=True)
class Sampled(Method):
    """FedHPL's ragged lists: a few labeled features go up, all of them come down, sizes known only at run time."""

    paper = "toy"
    up = "a few labeled features"
    down = "everyone's"
    needs = frozenset({Need.SAME_WIDTH})

    most: int = 5
    """Features that a client may send."""

    def schema(self, task: Task, card: Card) -> Wire:
        return Wire(down=self._list(task, card, task.clients * self.most), up=self._list(task, card, self.most))

    def _list(self, task: Task, card: Card, most: int) -> dict[str, Field]:
        rows = Dim("rows", most)
        return {"z": Field((rows, card.width), kept=False), "y": Field((rows,), torch.int64, kept=False)}

    def prepare(self, client: Client) -> None:
        most = client.task.clients * self.most
        client.state.z = torch.zeros(most, client.card.width)
        client.state.y = torch.zeros(most, dtype=torch.int64)
        client.state.there = torch.zeros(most)

    def setup(self, server: Server) -> None:
        clients, width = server.task.clients, server.cards[0].width
        server.state.z = torch.zeros(clients, self.most, width)
        server.state.y = torch.zeros(clients, self.most, dtype=torch.int64)
        server.state.sent = torch.zeros(clients, dtype=torch.int64)

    def download(self, server: Server, client: int) -> Message:
        state = server.state
        there = torch.arange(self.most) < state.sent[:, None]
        return Message({"z": state.z[there], "y": state.y[there]})

    def receive(self, client: Client, down: Message) -> None:
        n = len(down.tensor("y"))
        client.state.z[:n], client.state.y[:n] = down.tensor("z"), down.tensor("y")
        client.state.there = (torch.arange(len(client.state.there)) < n).float()

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        train = client.data["train"]
        x, y = train.take(torch.arange(min(self.most, len(train))))
        with torch.no_grad():
            return Message({"z": client.features(x), "y": y})

    def loss(self, client: Client, batch: Batch) -> Tensor:
        state = client.state
        labels = onehot(state.y, client.task.classes)
        others = -(labels * client.model.head(state.z).log_softmax(1)).sum(1) * state.there
        return super().loss(client, batch) + others.sum() / state.there.sum().clamp(1)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        for k, upload in uploads.items():
            n = len(upload.tensor("y"))
            server.state.z[k, :n], server.state.y[k, :n] = upload.tensor("z"), upload.tensor("y")
            server.state.sent[k] = n


@dataclass(frozen=True)
class Groups(Method):
    """FedDF's shape: the server has a model per architecture, which is evaluated beside those of clients."""

    paper = "toy"
    up = "the model"
    down = "the mean model of the architecture"
    views = ("after", "group")
    defenses = ("clip",)

    def schema(self, task: Task, card: Card) -> Wire:
        model = schema_of(task.shape_of(card.model))
        return Wire(down=model, up=model)

    def setup(self, server: Server) -> None:
        for card in server.cards.firsts():
            setattr(server.state, f"of_{card.id}", server.task.start(card.model))

    def _model(self, server: Server, client: int) -> nn.Module:
        first = server.cards.architectures()[server.cards[client].model]
        return getattr(server.state, f"of_{first}")

    def download(self, server: Server, client: int) -> Message:
        return Message.of(self._model(server, client))

    def receive(self, client: Client, down: Message) -> None:
        client.model.load_state_dict(down.part())

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message.of(client.model)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        for model, first in server.cards.architectures().items():
            alike = {k: upload.part() for k, upload in uploads.items() if server.cards[k].model == model}
            if alike:
                self._model(server, first).load_state_dict(weighted_mean(alike, dict.fromkeys(alike, 1)))

    def server_model(self, server: Server, view: str, client: int) -> ServerModel:
        return ServerModel(server.cards[client].model, self._model(server, client).state_dict())


@dataclass(frozen=True)
class Shares(Method):
    """HeteroFL's shape: a client's capacity decides how much of one tensor of the server travels."""

    paper = "toy"
    up = "the client's part of the head's bias and weight"
    down = "the same part of the server's"
    needs = frozenset({Need.SAME_ARCHITECTURE})
    defaults = MappingProxyType({"models": "mlp-64", "capacity": "1,0.5"})
    defenses = ("clip",)

    def schema(self, task: Task, card: Card) -> Wire:
        head = schema_of(task.shape_of(card.model).head)
        return Wire(down=head, up=head)

    def setup(self, server: Server) -> None:
        server.state.model = server.task.start(server.cards[0].architecture)

    def download(self, server: Server, client: int) -> Message:
        part = server.task.part_of(server.cards[client].model).take(server.state.model.state_dict())
        return Message({name: part[f"head.{name}"] for name in ("weight", "bias")})

    def receive(self, client: Client, down: Message) -> None:
        client.model.head.load_state_dict(down.part())

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message.of(client.model.head)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        whole = server.state.model.state_dict()
        for k, upload in uploads.items():
            part = server.task.part_of(server.cards[k].model)
            for name, value in upload.part().items():
                whole[f"head.{name}"][part.at(f"head.{name}")] = value


@dataclass(frozen=True)
class Turns(Method):
    """An asynchronous method: one client per event, whoever the method draws."""

    paper = "toy"

    def participants(self, task: Task, t: int) -> list[int]:
        return torch.randint(task.clients, (1,), generator=task.draw("turn", t)).tolist()


@dataclass(frozen=True)
class Careful(FedAvg):
    """A method that takes progress for gradients."""

    needs = frozenset({Need.SAME_MODEL, Need.PLAIN_SGD})


TOYS = (Consensus, Mutual, Reviewed, Counted, Prototypes, Steady, Peers, Pairs, Adapted, Sampled, Groups, Shares)


# ---- methods with one fault each, which the conformance kit must find ------------------------------------------------


@dataclass(frozen=True)
class SharedHead(Method):
    """LG-FedAvg: heads go up, their mean comes down. The toys below break it in one place each."""

    paper = "toy"
    up = "the head"
    down = "the mean head"
    needs = frozenset({Need.SAME_HEAD})

    def schema(self, task: Task, card: Card) -> Wire:
        head = schema_of(task.shape_of(card.model).head, "head")
        return Wire(down=head, up=head)

    def setup(self, server: Server) -> None:
        server.state.head = server.task.build(server.cards[0].model, "global").head

    def download(self, server: Server, client: int) -> Message:
        return Message.of(server.state.head, "head")

    def receive(self, client: Client, down: Message) -> None:
        client.model.head.load_state_dict(down.part("head"))

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message.of(client.model.head, "head")

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        server.state.head.load_state_dict(average_uploads(server, uploads, "head"))


@dataclass(frozen=True)
class Unread(SharedHead):
    """A field goes up that the server never looks at."""

    def schema(self, task: Task, card: Card) -> Wire:
        wire = super().schema(task, card)
        return Wire(down=wire.down, up={**wire.up, "samples": Field(())})

    def local_update(self, client: Client) -> Message:
        return Message({**super().local_update(client), "samples": torch.tensor(float(client.card.samples))})


@dataclass(frozen=True)
class Unmerged(SharedHead):
    """Uploads of an exchange that has no merge."""

    exchanges = (Exchange("download", "local_update", None),)


@dataclass(frozen=True)
class Overlooked(SharedHead):
    """A field comes down into `client.got` and no step looks at it."""

    def schema(self, task: Task, card: Card) -> Wire:
        wire = super().schema(task, card)
        return Wire(down={**wire.down, "prior": Field((task.classes,))}, up=wire.up)

    def download(self, server: Server, client: int) -> Message:
        return Message({**super().download(server, client), "prior": torch.ones(server.task.classes)})


@dataclass(frozen=True)
class Uninstalled(SharedHead):
    """The mean head comes down, and nobody installs it."""

    def receive(self, client: Client, down: Message) -> None:
        pass


@dataclass(frozen=True)
class Misnamed(SharedHead):
    """Server and clients look for another prefix than the one that travels: all-zero heads come down for ever."""

    def setup(self, server: Server) -> None:
        super().setup(server)
        server.state.head.load_state_dict({n: torch.zeros_like(v) for n, v in server.state.head.state_dict().items()})

    def receive(self, client: Client, down: Message) -> None:
        client.model.head.load_state_dict(down.part("heads"), strict=False)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        server.state.head.load_state_dict(average_uploads(server, uploads, "heads"), strict=False)


@dataclass(frozen=True)
class Deaf(Peers):
    """Students train on the teachers' images without looking at what the teachers said."""

    def imitate(self, client: Client, batch: Batch) -> Tensor:
        return self.step(client, batch)


@dataclass(frozen=True)
class Constant(SharedHead):
    """Training is right, and predictions say the same of every image."""

    def predict(self, client: Client, x: Tensor) -> Tensor:
        return client.model.head(torch.zeros(len(x), client.card.width))
