"""The demo as it is: how long it takes from torchrun to its end, and how accurate it gets.

Run: ``python -m benchmarks.demo``. Targets: 20 to 90 s on two cores, at least 95 % validation accuracy.
"""

from __future__ import annotations

import tempfile
import time

from ddp_core.config import RunConfig
from ddp_core.runs import RunStatus, Store, launch, show


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = launch(RunConfig(), Store(folder))
        while not RunStatus(show(run)["state"]).ended:
            time.sleep(0.2)
        document = show(run)
    final = document["final"]
    print(f"state                {document['state']} ({document['reason']})")
    print(f"duration             {document['duration_s']:.1f} s, {document['step']} steps, {document['epoch']} epochs")
    print(f"steps per second     {document['step'] / document['duration_s']:.1f} (start of the processes included)")
    print(f"validation accuracy  {100 * final['val_accuracy']:.2f} %")


if __name__ == "__main__":
    main()
