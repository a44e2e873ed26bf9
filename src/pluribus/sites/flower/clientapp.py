"""The app that Flower runs at a site for each message. It relays the request to the site's worker."""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from pluribus.sites.flower.wire import BLOB, ask

app = ClientApp()


@app.query()
def relay(message: Message, context: Context) -> Message:
    """Send a request to the worker, and return its answer."""
    request: Any = message.content[BLOB][BLOB]
    answer = ask(str(context.node_config["socket"]), request)
    return Message(RecordDict({BLOB: ConfigRecord({BLOB: answer})}), reply_to=message)
