"""The supervisor of one run: ``python -m ddp_core.runs.supervisor RUN_DIR``.

It waits for the run's GPUs, starts torchrun, watches, samples the hardware, and carries out a stop.
It runs detached from whoever asked for the launch, writes to files only, and the training does not
depend on it: if it dies, the next reader of the run starts another, which adopts what is alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ddp_core.config import RunConfig
from ddp_core.errors import UserError
from ddp_core.runs import evidence, gpus, processes
from ddp_core.runs.command import torchrun_command, torchrun_environment
from ddp_core.runs.leases import Leases, holder
from ddp_core.runs.recorder import Recorder
from ddp_core.runs.state import RunStatus
from ddp_core.runs.stopping import Shutdown, stop_request, stop_words
from ddp_core.runs.store import RunDir
from ddp_core.telemetry.follower import JsonlFollower

TICK_S = 0.1
SAMPLE_S = 1.0
QUEUE_S = 0.5
# What a rank leaves behind when torchrun ends by itself (a loader's helper, say) gets this long.
LEFTOVER_GRACE_S = 2.0


class Supervisor:
    """Takes one run from where it stands to its end.

    Args:
        run: The run's directory.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.config = RunConfig()
        self._config_problem = ""
        try:
            self.config = run.config()
        except UserError as error:  # what runs already can be watched and stopped without it
            self._config_problem = str(error)
        self.recorder = Recorder(run, run.state())
        self.leases = Leases()
        self.agent: subprocess.Popen[bytes] | None = None
        self.shutdown: Shutdown | None = None
        self._over = threading.Event()
        self._followers: dict[int, JsonlFollower] = {}
        self._joined: set[int] = set()
        self._stop_seen: dict[str, Any] | None = None

    def main(self) -> None:
        """Carry the run to its end."""
        self.recorder.update(supervisor=processes.identify(os.getpid()))
        try:
            state = self.recorder.state
            if state.state is RunStatus.QUEUED:
                if self._config_problem:
                    raise UserError(self._config_problem)
                if state.attempt_base:
                    checkpoint = Path(state.resume_from).name if state.resume_from else "the newest whole checkpoint"
                    words = f"resumed from {checkpoint}, attempt {state.attempt}"
                    self.recorder.event("state", words, state=str(state.state))
                if not self._wait_for_gpus():
                    return
                self._start()
            else:
                self._adopt()
            # In a thread of its own: a driver that hangs must not keep a stop waiting.
            threading.Thread(target=self._sample, name="sampling", daemon=True).start()
            self._watch()
            self._over.set()
            self._settle()
        except UserError as error:
            self._fail(str(error))

    # --- before torchrun ---

    def _wait_for_gpus(self) -> bool:
        """Hold the run's GPUs; False if the run was stopped or removed while it waited."""
        answers: queue.SimpleQueue[tuple[list[str] | None, str] | Exception] = queue.SimpleQueue()
        looking = False
        while self.run.path.is_dir():
            if stop_request(self.run) is not None:
                self.recorder.move(RunStatus.STOPPING)
                proof = {"seconds": 0.0, "escalated": False, "left_alive": 0, "gpu_memory_released": None}
                self.recorder.move(RunStatus.STOPPED, reason="cancelled before it started", stop=proof, stage="")
                return False
            if not looking:
                threading.Thread(target=self._look_for_gpus, args=(answers,), name="look", daemon=True).start()
            try:
                answer = answers.get(timeout=QUEUE_S)
            except queue.Empty:  # a driver that hangs
                looking = True
                self.recorder.heartbeat()
                continue
            if isinstance(answer, Exception):
                raise answer
            uuids, waiting = answer
            if uuids is not None:
                self.recorder.update(gpus=tuple(uuids))
                return True
            looking = False
            self.recorder.stage(waiting)
            self.recorder.heartbeat()
            time.sleep(QUEUE_S)
        return False

    def _look_for_gpus(self, answers: queue.SimpleQueue[tuple[list[str] | None, str] | Exception]) -> None:
        try:
            answers.put(self._try_gpus())
        except Exception as error:  # it is raised where the answer is waited for
            answers.put(error)

    def _try_gpus(self) -> tuple[list[str] | None, str]:
        launch = self.config.launch
        if launch.gpus == "none" or (launch.gpus == "auto" and launch.device == "cpu"):
            return [], ""
        found = gpus.report()
        if isinstance(launch.gpus, tuple):
            try:
                uuids: list[str] | None = gpus.resolve(launch.gpus, found)
            except UserError as error:  # they were there at the launch, and may come back
                return None, f"waiting: {error.message}"
        elif found["error"] and self.recorder.state.stage.startswith("waiting"):
            # What has waited for GPUs must not go to the CPU because the driver is away for a moment.
            return None, f"waiting: {found['error']}"
        elif not gpus.trains_on_gpus(self.config, found)[0]:
            return [], ""
        else:
            store = self.run.path.parent
            uuids, waiting = gpus.pick(
                found, gpus.processes(), launch.nproc_per_node, store=store, share=launch.share_gpus
            )
            if uuids is None:
                return None, waiting
        assert uuids is not None
        if launch.share_gpus:
            self.leases.take_free(uuids, self.run.path)
            return uuids, ""
        held = self.leases.try_take(uuids, self.run.path)
        if held is None:
            return uuids, ""
        index = next((gpu["index"] for gpu in found["gpus"] if gpu["uuid"] == held), held)
        return None, f"waiting for GPU {index}, held by {holder(held, self.run.path.parent) or 'another run'}"

    def _start(self) -> None:
        self.recorder.move(RunStatus.STARTING, started=time.time(), stage="starting torchrun")
        state = self.recorder.state
        base = state.attempt_base
        command = torchrun_command(self.config, self.run.path, base)
        environment = torchrun_environment(
            self.config,
            self.run.path,
            mark=state.mark,
            gpus=state.gpus,
            attempt_base=base,
            resume_from=state.resume_from,
        )
        # Files, not pipes: a pipe that nobody reads would stall the training once it is full.
        try:
            with self.run.agent_log.open("ab") as log:
                self.agent = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=self.leases.descriptors,
                )
        except OSError as error:  # an environment too large for the kernel, for instance
            raise UserError(f"torchrun could not be started: {error.strerror}") from None
        self.recorder.update(agent=processes.identify(self.agent.pid))
        self.recorder.event("attempt", f"torchrun started (pid {self.agent.pid})", attempt=base, command=command)

    def _adopt(self) -> None:
        alive = processes.marked(self.recorder.state.mark)
        what = f"{len(alive)} of its processes alive" if alive else "nothing of it alive"
        self.recorder.event("warning", f"the supervisor was gone; a new one took over and found {what}")
        if self._config_problem:
            self.recorder.event("warning", f"its config cannot be read: {self._config_problem}")

    # --- while it runs ---

    def _watch(self) -> None:
        while True:
            self._look_for_stop()
            alive = self._agent_alive()
            if self.shutdown is not None:
                if self.shutdown.step(alive):
                    return
            elif not alive:
                if not processes.owned(self.recorder.state.mark):
                    return
                self.shutdown = Shutdown(self.recorder.state.mark, None, self._leftover_grace(), self._say)
            else:
                self._follow_ranks()
            if self.config.launch.share_gpus:
                # A run that does not share must not come to a GPU that this one is on when its holder ends.
                self.leases.take_free(self.recorder.state.gpus, self.run.path)
            self.recorder.heartbeat()
            _reap_orphans(self.agent)
            time.sleep(TICK_S)

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.recorder.sample()

    def _look_for_stop(self) -> None:
        request = stop_request(self.run)
        if request is None or request == self._stop_seen:
            return
        self._stop_seen = request
        grace = float(request.get("grace_s", self.config.launch.stop_grace_s))
        if self.recorder.state.state is not RunStatus.STOPPING:
            self.recorder.move(RunStatus.STOPPING, stage="asked the ranks to stop")
        if self.shutdown is None:
            agent = self.recorder.state.agent
            pid = agent.pid if agent is not None and self._agent_alive() else None
            self.shutdown = Shutdown(self.recorder.state.mark, pid, grace, self._say)
        else:
            self.shutdown.shorten(grace)

    def _agent_alive(self) -> bool:
        if self.agent is not None:
            return self.agent.poll() is None
        return processes.alive(self.recorder.state.agent)

    def _leftover_grace(self) -> float:
        """With a whole training alive behind a dead agent the user's grace counts, else a short one."""
        exited_by_itself = self.agent is not None and (self.agent.returncode or 0) >= 0
        return LEFTOVER_GRACE_S if exited_by_itself else self.config.launch.stop_grace_s

    def _follow_ranks(self) -> None:
        """Learn the ranks' pids and how many have joined, until all have; then look for a restart."""
        state = self.recorder.state
        nproc = state.nproc_per_node
        if self.run.rank_log(state.attempt + 1, 0).parent.is_dir():
            self._followers.clear()
            self._joined.clear()
            self.recorder.update(attempt=state.attempt + 1, joined=0, ranks={})
            self.recorder.event("attempt", f"torchrun started the ranks again, attempt {state.attempt + 1}")
            state = self.recorder.state
        if len(self._joined) == nproc and state.state is RunStatus.RUNNING:
            return
        ranks = dict(state.ranks)
        for rank in range(nproc):
            follower = self._followers.setdefault(rank, JsonlFollower(self.run.rank_log(state.attempt, rank)))
            for record in follower.poll():
                if record.get("event") == "start" and (found := processes.identify(int(record["pid"]))):
                    ranks[rank] = found
                elif record.get("event") == "joined":
                    self._joined.add(rank)
        if len(ranks) != len(state.ranks) or len(self._joined) != state.joined:
            self.recorder.update(ranks=ranks, joined=len(self._joined))
        if len(self._joined) == nproc:
            if state.state is RunStatus.STARTING:
                self.recorder.move(RunStatus.RUNNING, stage="training")
            else:
                self.recorder.stage("training")
        elif self._joined or len(ranks) == nproc:
            self.recorder.stage(f"{len(self._joined)}/{nproc} ranks joined")
        elif ranks:
            self.recorder.stage(f"{len(ranks)}/{nproc} ranks started")

    # --- at the end ---

    def _settle(self) -> None:
        """Give the verdict, from evidence: the intent first, then the ranks' own words, then torchrun's code."""
        state = self.recorder.state
        exit_code = self.agent.returncode if self.agent is not None else None
        last = evidence.latest(self.run, state.attempt, state.nproc_per_node)
        known: dict[str, Any] = {
            "exit_code": exit_code,
            "final": evidence.figures(last),
            "step": last["step"],
            "epoch": last["epoch"],
            "stage": "",
        }
        proof = self.shutdown.proof(state.gpus) if self.shutdown is not None else None
        outcomes = set(evidence.outcomes(self.run, state.attempt, state.nproc_per_node).values())
        stopping = state.state is RunStatus.STOPPING
        if stopping and outcomes != {"finished"}:
            assert proof is not None
            self.recorder.move(RunStatus.STOPPED, reason=stop_words(proof), stop=proof, **known)
        elif (exit_code == 0 and not stopping and outcomes != {"stopped"}) or outcomes == {"finished"}:
            after = f", then torchrun ended with {evidence.exit_words(exit_code)}" if exit_code else ""
            self.recorder.move(RunStatus.FINISHED, reason=f"training finished{after}", **known)
        elif outcomes == {"stopped"} and (exit_code >= 0 if exit_code is not None else self.shutdown is None):
            # The ranks were asked to end, by torchrun (which was asked itself) or by somebody else.
            self.recorder.move(RunStatus.STOPPING, stage="")
            self.recorder.move(RunStatus.STOPPED, reason="stopped by a signal from outside", stop=proof, **known)
        else:
            failure = evidence.find_failure(self.run, state.attempt, state.nproc_per_node, exit_code)
            if exit_code is None and failure["rank"] is None and not (self.shutdown and self.shutdown.ended_pids):
                reason = "nothing of it is alive and no rank recorded an outcome"
                self.recorder.move(RunStatus.LOST, reason=reason, **known)
            else:
                self.recorder.move(RunStatus.FAILED, reason=failure["message"], failure=failure, **known)

    def _fail(self, message: str) -> None:
        failure: dict[str, Any] = {"rank": None, "kind": "launch", "message": message, "traceback": None, "victims": []}
        self.recorder.move(RunStatus.FAILED, reason=message, failure=failure, stage="")

    def _say(self, event: str, message: str) -> None:
        self.recorder.event(event, message)
        if self.shutdown is not None:
            self.recorder.update(stage=message)


def _reap_orphans(agent: subprocess.Popen[bytes] | None) -> None:
    """Collect adopted children that have ended; torchrun's own status is left to its Popen."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if agent is not None and found.si_pid == agent.pid:
                return
            os.waitpid(found.si_pid, 0)


def main(arguments: list[str]) -> int:
    """Supervise the run in ``arguments[0]``; 1 if another supervisor has it already."""
    run = RunDir(Path(arguments[0]).absolute())
    lock = os.open(run.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 1
    if run.state().state.ended:
        return 0
    processes.become_subreaper()
    Supervisor(run).main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
