"""Many simulated clients on many cores, or on a cluster, inside one trust domain (``--engine ray``, extra
``isthmus[ray]``).

Clients are packed on a few actors, one per core: client ``i`` lives on actor ``i mod n`` and stays there. An actor is a
:class:`~isthmus.federation.host.PartyHost`; frames of our codec travel to and from it as numpy bytes, which ray shares
without copying. Ray's own serialiser (cloudpickle) carries only what the simulation hands over once: data, roles,
config, places of checkpoints.

Ray never runs anything a second time here (no restarts, no retries: a restarted actor would be empty and answer all the
same). An actor
that dies is a lost place: the loop takes everybody back to the newest tag, :meth:`RayEngine.revive` starts a new actor
that reads its parties' tags from the run folder, and the rounds since are run again, with the same bits.

With ``execution=each`` results are those of the local engine, bit for bit. With ``execution=cohort`` each actor trains
its own clients
together, so sums are formed in another order than in one process: equal within 1e-5 after a round, and bits depend on
``ray.actors``.

Without ``ray.address`` a cluster of the run's own is started on this machine: no dashboard, no usage statistics, a
token of its own, ended with the run. With it, actors run on that cluster; its nodes need isthmus installed and must
share the file system of the run folder.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported or started

import numpy as np
import ray
import ray.exceptions
import torch

from isthmus.compiling import use_threads
from isthmus.errors import ConfigError, IsthmusError, RunError
from isthmus.federation.codec import Part, Pieces
from isthmus.federation.contract import Contract
from isthmus.federation.engines.remote import Place, RemoteEngine
from isthmus.federation.host import FrameKind, Order, PartyHost
from isthmus.federation.interface import Failure
from isthmus.federation.messages import ClientId, PartyId, address
from isthmus.federation.party import Store
from isthmus.federation.roles import RoleTable
from isthmus.federation.wire import Frame, pack, unpack
from isthmus.seeds import Stream

logger = logging.getLogger(__name__)

SHARED = 2**18
"""A message of this many bytes or more that goes to several actors is put into ray's object store once."""
_CONNECT_SECONDS = 10.0
_LONGEST_FOLDER = 40  # a path longer than this leaves no room for ray's sockets (107 characters in all)

SMALL = 2**16
Arrays = list[np.ndarray]
"""A part of a frame, stretch by stretch."""
Bundle = bytes | list[Arrays]


class Cluster:
    """A connection to ray, and actors that wait for work.

    A run has one of its own; several runs one after another may share one (``with Cluster(actors=2) as cluster``), so
    that only the first waits for processes to start.

    Args:
        address: ``host:port`` of an existing cluster; None starts one on this machine. A process that is connected
            already stays so.
        actors: Cores of a cluster on this machine; None is all of them.
    """

    def __init__(self, address: str | None = None, actors: int | None = None) -> None:
        self._idle: list[Any] = []
        self._folder: str | None = None
        self._mine = not ray.is_initialized()
        if not self._mine:
            return
        logging.getLogger("ray").setLevel(logging.ERROR)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        try:
            if address is None:
                self._begin(actors or len(os.sched_getaffinity(0)), quiet)
            else:
                _join(address, quiet)
        except BaseException:
            self.close()
            raise

    def _begin(self, cores: int, quiet: Mapping[str, Any]) -> None:
        # Whether memory suffices is decided by the system, not by how full the machine is because of others.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        if not os.environ.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
            # Ray asks for a token by itself; with one of our own it need not keep one in the user's home.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        self._folder = tempfile.mkdtemp(prefix="isthmus-ray-")
        place = {"_temp_dir": self._folder} if len(self._folder) <= _LONGEST_FOLDER else {}
        try:
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **place, **quiet)
        except (ConnectionError, RuntimeError, OSError) as error:
            raise RunError(
                f"ray does not start on this machine: {_first_line(error)}; run with --engine local"
            ) from None

    def actor(self) -> Any:
        """An actor that waits for work, or a new one."""
        if self._idle:
            return self._idle.pop()
        actor: Any = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Actor)
        return actor.remote()

    def room(self) -> int:
        """How many actors there is room for."""
        free = len(self._idle) + int(ray.available_resources().get("CPU", 0))
        if not free:
            raise ConfigError("the ray cluster has no free core: wait for other work on it, or leave ray.address out")
        return free

    def give_back(self, actor: Any) -> None:
        """The actor is free for another run."""
        self._idle.append(actor)

    def close(self) -> None:
        """Ends the actors, and the cluster if it was started here; disconnects from one that was not."""
        idle, self._idle = self._idle, []
        if ray.is_initialized():
            for actor in idle:
                ray.kill(actor)
            if self._mine:
                ray.shutdown()
        self._mine = False
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RayEngine(RemoteEngine):
    """Clients on ray actors.

    Args:
        parts: Each client's data, handed over once.
        cohort: Train the clients of an actor together where their class offers it.
        address: ``host:port`` of an existing cluster; None starts one on this machine.
        actors: How many; None is one per core. Never more than clients.
        cluster: One that is there already and stays; instead of ``address``.
    """

    def __init__(
        self,
        parts: Mapping[ClientId, Any],
        table: RoleTable,
        config: Any,
        stream: Stream,
        *,
        wire: bool = False,
        cohort: bool = False,
        address: str | None = None,
        actors: int | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        for role in table.roles.values():
            if role.cls.__module__ == "__main__":
                raise ConfigError(
                    f"actors cannot import {role.cls.__name__} from a script: move the method into a module of its own"
                )
        self._actors: dict[Place, Any] = {}
        self._late: dict[Place, Any] = {}
        self._store: Callable[[PartyId], Store] | None = None
        self._contract: Contract | None = None
        self._checked = False
        self._owns_cluster = cluster is None
        self._cluster = cluster or Cluster(address, min(len(parts), actors or len(os.sched_getaffinity(0))))
        try:
            room = self._cluster.room()
            if actors is not None and room < min(actors, len(parts)):
                raise ConfigError(
                    f"the ray cluster has {room} free cores, ray.actors={actors} needs more: give a smaller number"
                )
            count, names = min(len(parts), actors or room), sorted(parts)
            super().__init__({f"actor-{k}": names[k::count] for k in range(count)}, table)
            self._parts = parts
            self._common = (table, config, stream, cohort, torch.get_num_threads())
            self._start(list(self.places))
            opened = list(self.order(Order("open")).values())
            self._cohort = any(answer.execution == "cohort" for answer in opened)
            self._why_each = next((answer.why_each for answer in opened if answer.why_each), "")
        except BaseException:
            self.close()
            raise

    @property
    def execution(self) -> Literal["each", "cohort"]:
        return "cohort" if self._cohort else "each"

    @property
    def why_each(self) -> str:
        return self._why_each

    @property
    def resolved(self) -> Mapping[str, Any]:
        return {"ray_actors": len(self.places)}

    # -- actors ------------------------------------------------------------------------------------

    def _start(self, places: Sequence[Place]) -> None:
        """Actors at these places, with the data of their clients and the stores of their parties."""
        builds: dict[Place, Any] = {}
        for place in places:
            self._actors[place] = self._cluster.actor()
            parts = {client: self._parts[client] for client in self.places[place]}
            builds[place] = self._actors[place].build.remote(parts, *self._common)
        for place, build in builds.items():
            try:
                ray.get(build)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, IsthmusError):
                    raise error.cause from None
                raise RunError(
                    f"{place} cannot build its clients: {type(error.cause).__name__}: {error.cause}"
                ) from error
            except ray.exceptions.RayError as error:
                self._actors[place] = None
                raise RunError(
                    f"{place} did not start ({type(error).__name__}): see the logs of ray, then resume the run"
                ) from error
        if self._store is not None:
            self._hand_stores(places)
        if self._contract is not None:
            ray.get([self._actors[place].watch.remote(self._contract) for place in places])

    def _hand_stores(self, places: Sequence[Place]) -> None:
        assert self._store is not None
        parties = {
            place: [address(client, role) for role in self._table.roles for client in self.places[place]]
            for place in places
        }
        ray.get(
            [
                self._actors[place].keep_tags.remote({party: self._store(party) for party in parties[place]})
                for place in places
            ]
        )

    def watch(self, contract: Contract) -> None:
        self._contract = contract
        ray.get([actor.watch.remote(contract) for actor in self._actors.values() if actor is not None])

    def keep_tags(self, store: Callable[[PartyId], Store]) -> None:
        self._store, self._checked = store, False
        self._hand_stores(list(self.places))

    def revive(self) -> None:
        for place, late in list(
            self._late.items()
        ):  # one that answers late is kept, one that still does not answer is given up
            if not ray.wait([late], timeout=0)[0]:
                ray.kill(self._actors[place])
                self._actors[place] = None
        self._late.clear()
        lost = [place for place, actor in self._actors.items() if actor is None]
        if lost:
            logger.info("starting again: %s", ", ".join(lost))
            self._start(lost)

    def commit(self, step: int) -> None:
        super().commit(step)
        if self._store is not None and not self._checked:
            for clients in self.places.values():
                if step not in self._store(clients[0]).steps():
                    raise ConfigError(
                        "actors write checkpoints where this process does not find them: "
                        "choose an --out on a file system that all nodes of the cluster share"
                    )
            self._checked = True

    def close(self) -> None:
        actors, self._actors = self._actors, {}
        for actor in actors.values():
            if actor is not None:
                self._cluster.give_back(actor)
        if self._owns_cluster:
            self._cluster.close()

    # -- frames ------------------------------------------------------------------------------------

    def carry(
        self, kind: FrameKind, frames: Mapping[Place, Frame], timeout: float | None
    ) -> Mapping[Place, Frame | Failure]:
        deadline = None if timeout is None else time.monotonic() + timeout
        users = Counter(id(part) for frame in frames.values() for part in frame)
        put: dict[int, Any] = {}
        for frame in frames.values():
            for part in frame:
                if users[id(part)] > 1 and len(part) >= SHARED and id(part) not in put:
                    put[id(part)] = ray.put(_arrays(part))
        answers: dict[Place, Frame | Failure] = {}
        refs: dict[Place, Any] = {}
        for place, frame in frames.items():
            actor = self._actors.get(place)
            if actor is None:
                answers[place] = Failure("crashed", "actor is gone")
                continue
            shared = {k: put[id(part)] for k, part in enumerate(frame) if id(part) in put}
            own = _bundle([part for k, part in enumerate(frame) if k not in shared])
            refs[place] = (
                actor.handle.remote(kind, own, list(shared), *shared.values())
                if shared
                else actor.handle.remote(kind, own)
            )
        for place, ref in refs.items():
            answers[place] = self._answer(place, ref, deadline)
        return answers

    def _answer(self, place: Place, ref: Any, deadline: float | None) -> Frame | Failure:
        try:
            found: Bundle = ray.get(ref, timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            return tuple(_parts(found))
        except ray.exceptions.GetTimeoutError:
            self._late[place] = ref
            return Failure("timeout", "no answer in time")
        except (
            ray.exceptions.ActorUnavailableError
        ) as error:  # may have run: the session asks once more, with the same sequence
            self._late[place] = ref
            return Failure("unavailable", type(error).__name__)
        except ray.exceptions.RayActorError as error:
            self._actors[place] = None
            return Failure("crashed", type(error).__name__)
        except ray.exceptions.RayError as error:  # e.g. out of memory in transit: what became of the call is unknown
            self._late[place] = ref
            return Failure("unavailable", type(error).__name__)


class _Actor:
    """A host of parties in a process of its own."""

    def build(
        self, parts: Mapping[ClientId, Any], table: RoleTable, config: Any, stream: Stream, cohort: bool, threads: int
    ) -> None:
        use_threads(threads)
        # One trust domain: texts of errors may leave, so that a failed simulation says why.
        self.host = PartyHost(parts, table, config, stream, cohort=cohort, explain=True)

    def pid(self) -> int:
        return os.getpid()

    def watch(self, contract: Contract) -> None:
        self.host.watch(contract)

    def keep_tags(self, stores: Mapping[PartyId, Store]) -> None:
        self.host.keep_tags(stores.__getitem__)

    def handle(self, kind: FrameKind, own: Bundle, places: Sequence[int] = (), *shared: Arrays) -> Bundle:
        parts = _parts(own)
        for k, arrays in zip(places, shared, strict=True):
            parts.insert(k, _part(arrays))
        return _bundle(self.host.handle(kind, tuple(parts)))


def _arrays(part: Part) -> Arrays:
    stretches = part.stretches if isinstance(part, Pieces) else (part,)
    return [np.frombuffer(stretch, dtype=np.uint8) for stretch in stretches]


def _part(arrays: Arrays) -> Part:
    return arrays[0].data if len(arrays) == 1 else Pieces([array.data for array in arrays])


def _bundle(parts: Sequence[Part]) -> Bundle:
    """What ray is given: small parts as one byte string, which travels inside the call; large ones as arrays, which it
    copies into memory that all processes share.
    """
    return pack(tuple(parts)) if sum(map(len, parts)) < SMALL else [_arrays(part) for part in parts]


def _parts(bundle: Bundle) -> list[Part]:
    return list(unpack(bundle)) if isinstance(bundle, bytes) else [_part(arrays) for arrays in bundle]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _join(address: str, quiet: Mapping[str, Any]) -> None:
    _check_reachable(address)
    try:
        ray.init(address=address, **quiet)
    except (
        ConnectionError,
        RuntimeError,
        ValueError,
    ) as error:  # other versions of ray or Python, a head that is no ray
        raise ConfigError(
            f"cannot use the ray cluster at {address}: {_first_line(error)}; see `ray status --address {address}`"
        ) from None


def _check_reachable(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not host or not port.isdigit():
        raise ConfigError(
            f"ray.address must be HOST:PORT of the cluster's head (as `ray start --head` prints it), got {address!r}"
        )
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        advice = "start one with `ray start --head`, or leave ray.address out"
        raise ConfigError(f"no ray cluster answers at {address} ({reason}): {advice}") from None
