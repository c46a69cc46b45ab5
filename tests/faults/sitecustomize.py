"""Faults for real ranks: put this folder on a run's PYTHONPATH and name the fault in FAULT.

``raise``: the rank FAULT_RANK raises in its main thread on SIGUSR1, wherever it is.
``ignore_term``: the rank FAULT_RANK never ends on SIGTERM and takes no further step either, whatever the
training installs later, so that the other ranks wait for it.
``grandchild``: the rank FAULT_RANK leaves a process in a session of its own behind.
"""

import os
import signal
import subprocess
import sys
import time

if os.environ.get("RANK") == os.environ.get("FAULT_RANK", "none"):
    fault = os.environ.get("FAULT")
    if fault == "raise":

        def _raise(*_: object) -> None:
            raise RuntimeError("the injected fault")

        signal.signal(signal.SIGUSR1, _raise)
    elif fault == "ignore_term":

        def _hang(*_: object) -> None:
            while True:
                time.sleep(1)

        signal.signal(signal.SIGTERM, _hang)
        _signal = signal.signal

        def _keep(signum: int, handler: object) -> object:
            return None if signum == signal.SIGTERM else _signal(signum, handler)

        signal.signal = _keep
    elif fault == "grandchild":
        environment = {k: v for k, v in os.environ.items() if k != "FAULT"}
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, env=environment
        )
