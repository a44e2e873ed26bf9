"""pFedPT (Li et al., 2023): each client adds a private border of learned pixels to its images; models are averaged."""

from dataclasses import dataclass, replace

from torch import Tensor

from pluribus.client import Batch, Client
from pluribus.errors import RangeError
from pluribus.message import Message
from pluribus.method import register
from pluribus.methods._border import Border
from pluribus.methods.fedavg import FedAvg
from pluribus.optim import Opt
from pluribus.settings import setting
from pluribus.task import Cards, Task


@register("pfedpt")
@dataclass(frozen=True)
class PFedPT(FedAvg):
    """Average whole models; each client adds a private learned border to its images."""

    paper = "Li et al., arXiv 2023"
    family = "prompts"
    takes = ("image",)
    views = ("after", "before")

    border: int = setting(2, at_least=1, symbol="s")
    """Width of the learned border in pixels."""
    prompt_epochs: int = setting(1, at_least=0)
    """Epochs on the border with a frozen model, before --epochs on the model with a frozen border."""
    prompt_lr: float = setting(0.1, above=0)
    """Learning rate of the border, with plain SGD."""

    def optimizers(self, client: Client) -> dict[str, Opt]:
        # plain SGD, whose rate follows the schedule of the experiment
        plain = replace(client.local.rule, name="sgd", lr=self.prompt_lr, momentum=0, weight_decay=0, clip_norm=None)
        return {"prompt": Opt(client.state.prompt, plain), "model": Opt(client.model)}

    def prepare(self, client: Client) -> None:
        client.state.prompt = client.make("prompt", lambda: Border(client.task.shape, self.border))

    def local_update(self, client: Client) -> Message:
        client.fit(self.prompt_loss, opts=("prompt",), epochs=self.prompt_epochs)
        client.fit(self.step)
        return Message.of(client.model)

    def prompt_loss(self, client: Client, batch: Batch) -> Tensor:
        """Stage 1: train the border. The model and its batch-norm statistics do not change."""
        return client.task_loss(client.call(client.state.prompt(batch.x), client.parameters()), batch.y)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Stage 2: train the model on images with the border."""
        return client.task_loss(self.predict(client, batch.x), batch.y)

    def predict(self, client: Client, x: Tensor) -> Tensor:
        return client.model(client.state.prompt(x))  # type: ignore[no-any-return]

    def check(self, task: Task, cards: Cards) -> None:
        _, height, width = task.shape
        if self.border >= min(height, width) / 2:
            raise RangeError(
                f"--border must be from 1 to {(min(height, width) - 1) // 2} for images of {height}x{width}, not "
                f"{self.border}: at least one pixel must be inside the border."
            )
