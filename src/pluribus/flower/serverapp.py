"""What Flower runs at the server: the round loop over its sites."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from pluribus.flower.config import FederationFile, read
from pluribus.flower.federate import federation
from pluribus.flower.transport import FlowerTransport
from pluribus.folder import RunFolder

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Go on with the run folder that is there, or begin one."""
    file, out = Path(str(context.run_config["config"])), Path(str(context.run_config["out"]))
    described = read(FederationFile, file)
    names = dict(enumerate(described.sites))
    folder = RunFolder.open(out) if (out / "config.toml").exists() else RunFolder.create(str(out), "sites")
    try:
        if not (out / "config.toml").exists():
            folder.write_config(described.experiment().settings())
        transport = FlowerTransport(grid, names)
        federation(described.experiment(), described.agreement(), names, transport, folder, described.deadline).run()
    finally:
        folder.close()
