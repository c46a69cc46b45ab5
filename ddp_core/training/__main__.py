"""Entry of one rank. Says ``start`` in the rank log before it imports torch, and ``end`` whatever happens."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, cast

from ddp_core.errors import UserError
from ddp_core.telemetry.rank_log import RankLog
from ddp_core.training.environment import RankEnvironment, StopFlag

if TYPE_CHECKING:
    from ddp_core.training.loop import End


def main() -> int:
    """Train as ``config.yaml`` of ``$DDP_RUN_DIR`` says.

    Returns:
        The exit code: 0 when finished or stopped, 1 for what a :class:`UserError` explains.
        Any other failure leaves as the exception it is, which exits with 1 as well.
    """
    try:
        here = RankEnvironment.from_environ()
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    log = RankLog(here.log_path)
    log.event(
        "start",
        rank=here.rank,
        local_rank=here.local_rank,
        world_size=here.world_size,
        attempt=here.attempt,
        pid=os.getpid(),
        host=socket.gethostname(),
        version=1,
    )
    stop = StopFlag(on_early_stop=lambda: log.event("end", outcome="stopped"))
    try:
        from torch.distributed.elastic.multiprocessing.errors import record

        from ddp_core.training.loop import train

        # record writes the error file from which torchrun tells the rank that failed first.
        end = cast("End", record(train)(here, log, stop))
        log.event("end", outcome=end.outcome, **({"reason": end.reason} if end.reason else {}))
    except UserError as error:
        log.event("end", outcome="failed", message=str(error))
        print(error, file=sys.stderr)
        return 1
    except BaseException as error:
        log.event("end", outcome="failed", message=_describe(error))
        raise
    finally:
        log.close()
    return 0


def _describe(error: BaseException) -> str:
    text = str(error).strip()
    if "\nOriginal Traceback" in text:
        # A DataLoader worker's error carries its whole traceback as its message; what happened is the last line.
        return text.splitlines()[-1]
    return f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    code = main()
    # Everything is closed and said. Taking a Python with torch apart costs a rank about half a
    # second of CPU, which every stop and every end would wait for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
