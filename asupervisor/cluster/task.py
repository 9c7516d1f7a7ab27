"""`Task`: this process's part in a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any, Literal, Self

import tensorflow as tf

from asupervisor.clock import Clock, SystemClock
from asupervisor.cluster.config import VARIABLE, Layout, Role, layout, parse
from asupervisor.cluster.joining import wait_for_end_of_job, wait_for_workers
from asupervisor.cluster.membership import Membership
from asupervisor.errors import PortInUse
from asupervisor.events import EventSink, log_only

tf1 = tf.compat.v1

# TensorFlow's server cannot be stopped: there is one for each address, as long as the process lives. Keyed by process,
# since a forked child inherits the record but not the server's threads.
_servers: dict[tuple[int, str], Any] = {}
_lock = threading.Lock()

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


class Task:
    """This process's part in a cluster: a parameter server, the chief, a worker, an evaluator, or all alone.

    ::

        task = Task.from_tf_config()
        if task.role == "ps":
            await task.join()
        else:
            with graph.as_default(), tf.compat.v1.device(task.device_fn):
                build_model()
            async with MonitoredTrainingSession(graph=graph, task=task, checkpoint_dir=logdir) as sess:
                while not sess.should_stop():
                    await sess.run(train_op)

    Pass it to `Supervisor` or `MonitoredTrainingSession` as ``task=``: they take the master, the session's
    configuration and `is_chief` from it, the chief adopts a model that is alive, and a lost peer ends in a recovery or
    in an error that names it. Where there is one task alone, all of it means nothing, and the same program trains by
    itself.

    TensorFlow's servers listen on all interfaces, without any authentication: whoever reaches them can run what he
    likes. Keep their ports inside of a network that you trust.

    Source: `tf.distribute.Server`, `tf.distribute.cluster_resolver.TFConfigClusterResolver`.

    Args:
        cluster: The addresses of each job: a `tf.train.ClusterSpec`, or a mapping. None for one task alone.
        job_name: Our job: ``"ps"``, ``"chief"`` (or ``"master"``), ``"worker"`` or ``"evaluator"``.
        task_index: Our number in it.
        step_timeout_secs: The longest that a run may take, in seconds; `RunOptions.timeout_in_ms` allows one run more.
            It is the only way in which a frozen peer is noticed.
        outage_secs: How long parameter servers may be gone, once there was a session, before `PeersUnreachable` is
            raised; in seconds. One that is lost again before there is a session has what is left of it. When they
            are back, a worker waits as long for the chief to make the model ready.
        chief_grace_secs: How long a parameter server serves workers after the end of the chief, in seconds.
        clock: Where the time of waits comes from.
        emit: Where events of `join` go.

    Raises:
        ClusterConfigError: The cluster cannot work; one line that says what to write.
    """

    def __init__(
        self,
        cluster: Any = None,
        job_name: str = "chief",
        task_index: int = 0,
        *,
        step_timeout_secs: float = 10.0,
        outage_secs: float = 300.0,
        chief_grace_secs: float = 30.0,
        clock: Clock | None = None,
        emit: EventSink = log_only,
    ) -> None:
        if isinstance(cluster, Layout):
            self.layout = cluster
        else:
            addresses = cluster.as_dict() if isinstance(cluster, tf.train.ClusterSpec) else cluster
            self.layout = layout(addresses or {}, job_name, task_index)
        self.step_timeout_secs = step_timeout_secs
        self.outage_secs = outage_secs
        self.chief_grace_secs = chief_grace_secs
        self._clock = clock or SystemClock()
        self._emit = emit
        self._membership = Membership(self) if self.layout.jobs and self.role in ("chief", "worker") else None

    @classmethod
    def from_tf_config(cls, tf_config: str | Mapping[str, Any] | None = None, **options: Any) -> Self:
        """The task that ``TF_CONFIG`` describes.

        Args:
            tf_config: Its value, or the object in it; None reads the environment. Where there is none, this is one task
                alone.
            **options: Keyword arguments of `Task`.

        Raises:
            ClusterConfigError: It cannot work; one line that says what to write.
        """
        if tf_config is None:
            tf_config = os.environ.get(VARIABLE)
        elif not isinstance(tf_config, str):
            tf_config = json.dumps(tf_config)
        return cls(parse(tf_config), **options)

    # ------------------------------------------------------------------ who we are

    @property
    def role(self) -> Role:
        """``"ps"``, ``"chief"``, ``"worker"`` or ``"evaluator"``."""
        return self.layout.role

    @property
    def index(self) -> int:
        """Our number among the tasks of the same job."""
        return self.layout.index

    @property
    def is_chief(self) -> bool:
        """Whether we initialise, restore, save and summarise; worker 0 does, where no task is called chief."""
        return self.layout.is_chief

    @property
    def is_distributed(self) -> bool:
        """Whether there are others."""
        return bool(self.layout.jobs) and self.role != "evaluator"

    @property
    def num_replicas(self) -> int:
        """How many tasks train."""
        return max(1, len(self.layout.trainers))

    @property
    def replica(self) -> int:
        """Our number among those that train, from 0, the chief's."""
        me = self.layout.me
        return self.layout.trainers.index(me) if me in self.layout.trainers else 0

    @property
    def name(self) -> str:
        """What TensorFlow calls us."""
        return f"/job:{self.layout.job}/task:{self.index}"

    @property
    def cluster_spec(self) -> tf.train.ClusterSpec | None:
        """The cluster; None where there is none."""
        return tf.train.ClusterSpec(self.layout.addresses()) if self.layout.jobs else None

    # ------------------------------------------------------------------ what sessions and graphs need

    @property
    def peers(self) -> Membership | None:
        """Our place among the others; None for a parameter server, an evaluator, and alone."""
        return self._membership

    @property
    def target(self) -> str:
        """The master for sessions: our own server, by its loopback address; ``''`` where there is none."""
        me = self.layout.me
        return "" if me is None else f"grpc://127.0.0.1:{me.port}"

    @property
    def device_fn(self) -> Any:
        """For `tf.compat.v1.device`: variables on the parameter servers in turn, everything else here.

        Source: `tf.compat.v1.train.replica_device_setter`. Call that for another strategy.
        """
        if not self.is_distributed:
            return None
        return tf1.train.replica_device_setter(cluster=self.cluster_spec, worker_device=self.name)

    @property
    def session_config(self) -> Any:
        """A `ConfigProto` for sessions; see `configured`. None where there is no cluster."""
        return self.configured()

    def configured(self, config: Any = None) -> Any:
        """A `ConfigProto` with which no missing peer can block a session for ever.

        Sessions see the parameter servers and their own task only, go through the network even to their own server, and
        have a timeout for each run, for their opening and their closing.

        Args:
            config: One to start from, which is not changed; what it sets itself is kept.

        Returns:
            The configuration; where there is no cluster, `config` itself.
        """
        if not self.is_distributed:
            return config
        complete = tf1.ConfigProto()
        if config is not None:
            complete.CopyFrom(config)
        if not complete.device_filters:
            complete.device_filters.extend(["/job:ps", self.name])
        complete.rpc_options.use_rpc_for_inprocess_master = True
        if not complete.operation_timeout_in_ms:
            complete.operation_timeout_in_ms = int(self.step_timeout_secs * 1000)
        return complete

    # ------------------------------------------------------------------ the server

    @property
    def server(self) -> Any:
        """Our `tf.distribute.Server`, started at the first use, which blocks for some ten milliseconds; None alone."""
        self.start_server()
        me = self.layout.me
        return None if me is None else _servers.get((os.getpid(), f"{me.host}:{me.port}"))

    def start_server(self) -> None:
        """Start our server, if it does not run yet; blocks for some ten milliseconds, on any thread.

        Sessions and `join` do it by themselves.

        Raises:
            PortInUse: Somebody else listens at our address.
        """
        me, spec = self.layout.me, self.cluster_spec
        if me is None or spec is None:
            return
        address = f"{me.host}:{me.port}"
        with _lock:
            if (os.getpid(), address) in _servers:
                return
            self._bypass_proxies()
            if _listens(me.port):
                raise PortInUse(me.name, address)
            try:
                server = tf.distribute.Server(spec, job_name=me.job, task_index=me.index, protocol="grpc")
            except tf.errors.UnknownError as error:  # somebody was faster
                raise PortInUse(me.name, address) from error
            _servers[os.getpid(), address] = server

    def _bypass_proxies(self) -> None:
        """GRPC asks a proxy even for the loopback interface, unless it is told not to."""
        if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
            return
        hosts = {"127.0.0.1", "localhost"} | {
            member.host for members in self.layout.jobs.values() for member in members
        }
        for name in ("no_proxy", "no_grpc_proxy"):
            known = [host for host in os.environ.get(name, "").split(",") if host]
            if name == "no_proxy" or known:  # gRPC looks at the second one alone, where there is one
                os.environ[name] = ",".join([*known, *sorted(hosts - set(known))])

    # ------------------------------------------------------------------ the end of the job

    async def join(self) -> Literal["done", "signal"]:
        """Wait for the end of the job.

        * A parameter server serves until chief and workers are done, or until SIGINT or SIGTERM.
        * The chief waits until no worker is at work any more, or a stop is requested; inside of its session, which
          waits for them at its end anyhow. A monitored session recovers a model that is lost meanwhile, and the wait
          goes on; under a Supervisor the loss is raised here, too, and `train_loop` recovers.
        * A worker, an evaluator, and whoever is alone, has nothing to wait for.

        Cancelling it ends the wait; the server itself lives as long as the process.

        Returns:
            ``"done"``; or ``"signal"`` where a signal has ended the wait of a parameter server and `cluster.run` ends
            the process. Elsewhere the signal is sent again, for whoever handled it before.

        Raises:
            PortInUse: Somebody else listens at our address.
            PeersUnreachable: A parameter server has not answered the chief for `outage_secs`.
            RuntimeError: The chief has no session.
            BaseException: What the session of the chief stops with, if that is an error.

        Source: `tf.distribute.Server.join`, which no signal ends, and no end of the job.
        """
        if self.role == "ps":
            return await wait_for_end_of_job(self, self._clock, self._emit)
        if self._membership is not None and self.is_chief:
            await wait_for_workers(self._membership)
        return "done"


def _listens(port: int) -> bool:
    """Whether somebody listens at a port of this machine, so that a server of ours could not."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
    return False
