"""Ask an engine for a snapshot's probe, and check its answer."""

from datamodules.canary import Canary
from datamodules.engines.engine import Engine
from datamodules.snapshots import Snapshot


def check_canary(engine: Engine, snapshot: Snapshot) -> tuple[float, ...]:
    return Canary(engine.name, engine.canary_tolerance).check(snapshot, engine.score(snapshot.probe))
