"""The round loop of every run.

Each round: 1. run a round of the current phase, 2. evaluate if due, 3. write the ledger segment and the metrics line,
4. checkpoint if due. A round is a transaction: after a crash, of a party or of this process, all parties return to the
newest checkpoint ("tag") that all of them hold, and the rounds since are repeated with the same random streams and so
the same bits. Noise of differential privacy is secret, so two runs of one seed differ in it; within a run a repeated
round adds the same noise again, from a secret each party keeps in its own checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import ConfigError, DataError, IsthmusError, RunError
from isthmus.experiments.byte_totals import EVALUATION, ByteTotals
from isthmus.experiments.callbacks import Callback, Progress
from isthmus.experiments.config import Settings, settings_from_toml
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.scoring import better, evaluation_line, summed_line, use_metric, use_metric_of_totals
from isthmus.federation.contract import Contract
from isthmus.federation.engine import Engine
from isthmus.federation.interface import QuorumError, View
from isthmus.federation.ledger import Entry, Sheet
from isthmus.federation.messages import SERVER, ClientId
from isthmus.federation.session import Session
from isthmus.federation.transcript import Transcript
from isthmus.methods.evaluation import ALL_CLIENTS, Detail, Evaluation, ScoreBins, SummedScores, WantedMetric
from isthmus.methods.registry import Phase, score_bins_of
from isthmus.methods.training import TrainConfig
from isthmus.metrics.registry import parse_metric
from isthmus.metrics.score_bins import LEAST_CLIENTS
from isthmus.preparation import LINKING, SCALING
from isthmus.records import Record, make_record
from isthmus.seeds import Stream

logger = logging.getLogger(__name__)

RECOVERABLE = ("timeout", "unavailable", "crashed")
"""Kinds of failures after which parties may come back."""
MAX_RECOVERIES = 3


@dataclass(frozen=True)
class Position:
    """A place in the run: ``step`` rounds are committed, the next is ``round`` of phase number ``phase``."""

    step: int
    phase: int
    round: int


class RoundLoop:
    """Runs the phases of a method on an engine.

    Args:
        view: What the server may know at the start.
        nodes: Number of nodes per client, for weighted scores.
        folder: The run folder; None keeps everything in memory (tests).
        contract: What parties may be asked; None where the method declares no script.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        view: View,
        nodes: Mapping[str, int],
        *,
        folder: RunFolder | None = None,
        callbacks: Sequence[Callback] = (),
        incarnation: int = 0,
        contract: Contract | None = None,
    ) -> None:
        self.settings, self.engine, self.nodes, self.folder, self.callbacks = settings, engine, nodes, folder, callbacks
        self.method, self.config, self.run_config = settings.method, settings.method_config, settings.run
        if isinstance(self.config, TrainConfig):
            self.config.check_clients(view)
        self.contract = contract
        self._left_out = {} if folder is None else folder.left_out()
        self.session = self._open_session(incarnation)
        self.state: Record = self.method.init(view, self.config, Stream(settings.run.seed, ("common",)))
        self._saved_type = make_record(
            "ServerSnapshot",
            settings=str,
            position=_PositionRecord,
            seconds=Mapping[str, float],
            round_seconds=Tensor,
            missed=Mapping[str, Tensor],
            absent=Mapping[str, int],
            server=type(self.state),
            selected=type(self.state) | None,
        )
        self._metric = parse_metric(settings.run.metric)
        self._alike = view.alike
        if self._metric is not None and settings.secure and not view.alike and len(view.clients) < LEAST_CLIENTS:
            raise ConfigError(
                f"{settings.run.metric} of clients with different features or classes is their mean, which with "
                f"secure_sum=true needs at least {LEAST_CLIENTS} clients: leave --metric out, or run without secure_sum"
            )
        self.selected_state: Record | None = None
        self.best: Mapping[str, Any] | None = None
        self.at = self._position(0)
        self.lines: list[dict[str, Any]] = []
        self.sheet, self.totals = Sheet(), ByteTotals.empty()
        self.seconds = {"setup": 0.0, "train": 0.0, "eval": 0.0}
        self.round_seconds: list[float] = []
        self.missed: dict[ClientId, list[int]] = {}
        """Committed steps that each client was absent from."""
        self._lost_at: dict[ClientId, float] = {}
        self._tags: dict[int, Record] = {}
        self._entries: list[tuple[int, list[Entry]]] = []  # the ledger, without a folder
        self._setup_phases = frozenset({SCALING, LINKING, *(phase.name for phase in self.method.phases if phase.setup)})
        self._last_checkpoint = time.monotonic()
        self._checkpoint_cost = 0.0
        self._started = time.monotonic()

    def _open_session(self, incarnation: int) -> Session:
        run = self.run_config
        transcript = Transcript(self.folder.path) if run.transcript and self.folder is not None else None
        session = Session(
            self.engine,
            self.method.table,
            seed=run.seed,
            incarnation=incarnation,
            secure=self.settings.secure,
            transcript=transcript,
            contract=self.contract,
        )
        session.clock.deadline = run.deadline or None
        session.clock.left_out = self._left_out
        session.clock.keep_left_out = None if self.folder is None else self.folder.keep_left_out
        return session

    @property
    def absent(self) -> Mapping[ClientId, int]:
        """Clients that were lost and are not back, and since which step."""
        return self.session.clock.absent

    @property
    def kept_state(self) -> Record:
        """The server's state of the round whose models the clients keep: the selected one, or the last."""
        return self.state if self.selected_state is None else self.selected_state

    @property
    def steps(self) -> int:
        """Rounds of all phases."""
        return self.settings.total_rounds

    @property
    def stopped(self) -> bool:
        """Whether validation has not improved for ``patience`` rounds, so that training has ended early."""
        patience = self.run_config.patience
        if not patience or self.best is None or not self.lines:
            return False
        return bool(self.lines[-1]["round"] - self.best["round"] >= patience)

    def evaluates(self, phase: Phase, round: int) -> bool:
        """Rounds of the main phase are evaluated every ``eval_every`` rounds, its last one always."""
        return phase.rounds is None and (
            round == self.settings.rounds_of(phase) or round % self.run_config.eval_every == 0
        )

    def _evaluated(self, until: int) -> list[int]:
        """Steps that have a metrics line once ``until`` steps are committed."""
        steps, before = list[int](), 0
        for phase in self.method.phases:
            rounds = self.settings.rounds_of(phase)
            steps += [before + round for round in range(1, rounds + 1) if self.evaluates(phase, round)]
            before += rounds
        return [step for step in steps if step <= until]

    def note_preparation(self, entries: Sequence[Entry]) -> None:
        """Enter the messages by which owners of tables prepared their data, once, before the first round."""
        known = list(self.folder.ledger(0)) if self.folder is not None else []
        if self.at.step or self.sheet.rows() or not (known or entries):
            return
        self.sheet.add(known or entries)
        self.totals.add(known or entries, self._setup_phases)
        if self.folder is None:
            self._entries.append((0, list(entries)))
        elif not known:
            self.folder.append_round(0, entries, None)

    # -- rounds ------------------------------------------------------------------------------------

    def play(self, until: int | None = None) -> None:
        """Run rounds until ``until`` steps are committed (default: all)."""
        goal = self.steps if until is None else min(until, self.steps)
        if self.at.step == 0 and not self._tags:
            self.checkpoint()
        self._started, started_at = time.monotonic(), self.at.step
        failed_at, recoveries = -1, 0
        while self.at.step < goal and not self.stopped:
            try:
                self._round(started_at)
            except QuorumError as error:
                recoveries = recoveries + 1 if self.at.step <= failed_at else 1
                failed_at = max(failed_at, self.at.step)
                if recoveries > MAX_RECOVERIES or not any(f.kind in RECOVERABLE for f in error.failures.values()):
                    raise
                self._recover(error)

    def _take_back(self) -> None:
        """At the beginning of a round: clients that can be reached again take part from here on."""
        if not self.absent:
            return
        back = self.engine.take_back(self.at.step)
        for client in sorted(back):
            logger.info("%s is back, after %d rounds without it", client, len(self.missed.get(client, ())))
            self.session.clock.absent.pop(client)
        if back:
            self.checkpoint()  # from here on a checkpoint is held by them too

    def _note_absent(self) -> None:
        """Before a round is committed: who is absent from it."""
        absent = self.absent
        for client in absent.keys() - self.engine.away:
            logger.warning("%s is lost in step %d; the run goes on without it", client, self.at.step + 1)
        self.engine.away = frozenset(absent)
        for client in absent:
            self.missed.setdefault(client, []).append(self.at.step + 1)
        self._lost_at = {client: self._lost_at.get(client, time.time()) for client in absent}

    def _round(self, started_at: int) -> None:
        self._take_back()
        phase = self.method.phases[self.at.phase]
        round = self.at.round
        self.session.clock.begin(phase.name, round, self.at.step + 1)
        self.session.ledger.take()  # entries of a failed attempt
        begun = time.perf_counter()
        with self._method_code(phase.name, round):
            state, log = phase.run_round(self.state, self.session, self.config)
        spent = time.perf_counter() - begun
        line, eval_spent = self._evaluate(state, phase, log) if self.evaluates(phase, round) else (None, 0.0)
        self._note_absent()
        if line is not None and self.absent:
            line["absent"] = sorted(self.absent)
        if line is not None and not self.lines:
            self._note_unscored(line)
        self._commit(state, phase, spent, eval_spent, line)
        self._progress(phase, round, line, started_at)
        if self.stopped or self._due(phase, round):
            self.checkpoint()

    def _note_unscored(self, line: Mapping[str, Any]) -> None:
        """Say so where the nodes of a part give no score, as when none of them is of the rare class."""
        run = self.run_config
        sought = "val_loss" if run.selection == "best_val_loss" else "val"
        if run.selection != "last" and line[sought] is None:
            consequence = "so no round can be picked and the last one counts"
            logger.warning("%s", _unscored(run.metric if sought == "val" else "the loss", "validation", consequence))
        if line["test"] is None:
            logger.warning("%s", _unscored(run.metric, "test", "so the run has no score"))

    @contextmanager
    def _method_code(self, phase: str, round: int) -> Iterator[None]:
        """Turn any exception of a method's code into a RunError; the traceback goes to the log."""
        try:
            # Numbers that overflow are refused where they are sent, by name: numpy's own warnings say nothing more.
            with np.errstate(over="ignore", invalid="ignore"):
                yield
        except IsthmusError:
            raise
        except Exception as error:
            logger.info("%s round %d failed", phase, round, exc_info=True)
            raise RunError(
                f"{phase} round {round} of {self.method.name} failed: {type(error).__name__}: {error}"
            ) from error

    def _evaluate(self, state: Record, phase: Phase, log: Mapping[str, float]) -> tuple[dict[str, Any], float]:
        begun = time.perf_counter()
        self.session.clock.begin(EVALUATION, self.at.round, self.at.step + 1)
        place = {"step": self.at.step + 1, "phase": phase.name, "round": self.at.round}
        with self._method_code(EVALUATION, self.at.round):
            evaluations = self.method.evaluate(state, self.session, self.config)
            if self.session.secure:
                line = {**place, **self._summed_line(evaluations), "log": dict(log)}
            else:
                line = {**place, **evaluation_line(evaluations, self.nodes), "log": dict(log)}
                if self._metric is not None:
                    use_metric(line, self._metric, self.method.details(self.session, self.config), self.nodes)
        return line, time.perf_counter() - begun

    def _summed_line(self, scores: Mapping[str, Evaluation]) -> dict[str, Any]:
        """Scores where the server may read totals alone."""
        if not isinstance(scores, SummedScores):
            raise RunError(
                f"{self.method.name} asks every client for its scores, which secure_sum=true does not show: let its "
                "evaluate return scores_of(federation, handler, request), or run without secure_sum"
            )
        total: Detail | None = None
        if self._metric is not None and self._alike:  # before scores are binned: clients bin this score too
            total = self.method.details(self.session, self.config)[ALL_CLIENTS]
        line = summed_line(scores, self._score_bins(scores.role))
        if self._metric is not None:
            use_metric_of_totals(line, self._metric, total)
        return line

    def _score_bins(self, role: str) -> ScoreBins | None:
        """The histogram of the clients' scores, where it does not come near a list of them."""
        handler = score_bins_of(self.method, role)
        asked = self.session.tier(role)
        if handler is None or len(asked.clients) < LEAST_CLIENTS:
            return None
        bins: ScoreBins = asked.sum(handler, WantedMetric(self.run_config.metric), at_least=asked.least)
        return bins

    def _commit(
        self, state: Record, phase: Phase, spent: float, eval_spent: float, line: dict[str, Any] | None
    ) -> None:
        """Commit a round: add it to the totals, the metrics and the folder."""
        entries = self.session.ledger.take()
        self.sheet.add(entries)
        self.totals.add(entries, self._setup_phases)
        self.state = state
        self.seconds["setup" if phase.setup else "train"] += spent
        self.seconds["eval"] += eval_spent
        if phase.rounds is None:
            self.round_seconds.append(spent)
        self.at = self._position(self.at.step + 1)
        if line is not None:
            line["bytes"] = {"setup": sum(self.totals.setup.values()), **self.totals.training}
            line["seconds"] = sum(self.seconds.values())
            self.lines.append(line)
            if better(line, self.best, self.run_config.selection):
                self.best = line
                if self.run_config.selection != "last":
                    self.selected_state = state
                    self.engine.select()
        if self.folder is not None:
            self.folder.append_round(self.at.step, entries, line)
        else:
            self._entries.append((self.at.step, entries))

    def _progress(self, phase: Phase, round: int, line: Mapping[str, Any] | None, started_at: int) -> None:
        done, elapsed = self.at.step - started_at, time.monotonic() - self._started
        left = elapsed / done * (self.steps - self.at.step) if done else None
        progress = Progress(
            phase.name,
            round,
            self.settings.rounds_of(phase),
            self.at.step,
            self.steps,
            left,
            {channel: self.totals.setup[channel] + sent for channel, sent in self.totals.training.items()},
            line,
            {client: (step, self._lost_at.get(client, time.time())) for client, step in sorted(self.absent.items())},
        )
        for callback in self.callbacks:
            callback.on_round(progress)

    # -- checkpoints -------------------------------------------------------------------------------

    def _due(self, phase: Phase, round: int) -> bool:
        rounds = self.settings.rounds_of(phase)
        if round == rounds or (round == rounds - 1 and self.settings.ends_out_of_turn and phase.rounds is None):
            return True  # the second: from there it can be given more rounds
        every = self.run_config.checkpoint_every
        if every:
            return self.at.step % every == 0
        return time.monotonic() - self._last_checkpoint > max(2.0, 20 * self._checkpoint_cost)

    def checkpoint(self) -> None:
        """Checkpoint every party, then the server: a checkpoint the server holds is held by all."""
        begun = time.monotonic()
        self.engine.commit(self.at.step)
        values: dict[str, Any] = {
            "settings": self.settings.to_toml(),
            "position": _PositionRecord(self.at.step, self.at.phase, self.at.round, self.session.clock.incarnation),
            "seconds": dict(self.seconds),
            "round_seconds": torch.tensor(self.round_seconds, dtype=torch.float64),
            "missed": {client: torch.tensor(steps) for client, steps in self.missed.items()},
            "absent": dict(self.absent),
            "server": self.state,
            "selected": self.selected_state,
        }
        record = self._saved_type(**values)
        self._tags[self.at.step] = record
        self._tags = {step: self._tags[step] for step in sorted(self._tags)[-2:]}
        if self.folder is not None:
            store = self.folder.store(SERVER)
            store.save(self.at.step, record)
            store.forget(keep=sorted(self._tags))
        self._last_checkpoint = time.monotonic()
        self._checkpoint_cost = self._last_checkpoint - begun

    def _recover(self, error: QuorumError) -> None:
        logger.info("%s; rolling back", error)
        self.restore()
        for callback in self.callbacks:
            callback.on_recover(str(error), self.at.step)

    def restore(self) -> None:
        """Roll back to the newest checkpoint that the server and every party hold and that can be read."""
        steps = set(self._tags) | set(self.folder.store(SERVER).steps() if self.folder is not None else ())
        if not steps and self.folder is not None and not self.folder.begun:
            return  # stopped before the first checkpoint was complete: nothing has happened yet
        damage: list[str] = []
        for step in sorted(steps, reverse=True):
            try:
                if not self._held_by_all(step):
                    continue
                self._restore(step)
            except DataError as error:
                damage.append(str(error))
                continue
            for text in damage:
                logger.warning("%s; rolled back to the checkpoint before", text)
            return
        raise DataError(
            f"no checkpoint that all parties hold can be read{f': {damage[0]}' if damage else ''}; start the run again"
        )

    def _saved(self, step: int) -> Any:
        record: Any = self._tags.get(step)
        if record is None:
            assert self.folder is not None
            record = self.folder.store(SERVER).load(step, self._saved_type)
        return record

    def _held_by_all(self, step: int) -> bool:
        """Whether all clients hold a checkpoint but those that were absent when it was made."""
        self.engine.away = frozenset(self._saved(step).absent)
        return step in self.engine.tags()

    def _restore(self, step: int) -> None:
        """Roll back to one checkpoint; after a DataError the folder is unchanged."""
        record = self._saved(step)
        if not self._same_settings(record.settings, step):
            raise ConfigError("config.toml was changed since this run began: undo the change, or start a new run")
        if self.folder is not None:
            self.folder.check(step, self._evaluated(step))
            entries = list(self.folder.ledger(step))
        else:
            self._entries = [(at, batch) for at, batch in self._entries if at <= step]
            entries = [entry for _, batch in self._entries for entry in batch]
        self.engine.rollback(step)
        self.at = self._position(step)
        self.state, self.selected_state = record.server, record.selected
        self.seconds, self.round_seconds = dict(record.seconds), record.round_seconds.tolist()
        incarnation = max(self.session.clock.incarnation, record.position.attempt) + 1
        self.session = self._open_session(incarnation)
        self.session.clock.absent.update(record.absent)
        self.missed = {client: missed.tolist() for client, missed in record.missed.items()}
        self._tags = {tag: kept for tag, kept in self._tags.items() if tag < step} | {step: record}
        if self.folder is not None:
            self.folder.truncate(step)
            self.lines = self.folder.metrics()
        else:
            self.lines = [line for line in self.lines if line["step"] <= step]
        self._recount(entries)

    def _same_settings(self, saved: str, step: int) -> bool:
        """Whether a checkpoint is of a run with these settings; a run that was finished may have been given more
        rounds since.
        """
        if saved == self.settings.to_toml():
            return True
        rounds = settings_from_toml(saved).run.rounds
        fewer = replace(self.settings, run=replace(self.run_config, rounds=rounds))
        last = fewer.total_rounds - fewer.ends_out_of_turn
        return saved == fewer.to_toml() and step >= last and rounds < self.run_config.rounds

    def _position(self, step: int) -> Position:
        """Where the run stands once ``step`` rounds are committed."""
        left = step
        for number, phase in enumerate(self.method.phases):
            if left < (rounds := self.settings.rounds_of(phase)):
                return Position(step, number, left + 1)
            left -= rounds
        return Position(step, len(self.method.phases), 1)

    def _recount(self, entries: Sequence[Entry]) -> None:
        self.sheet, self.totals = Sheet(), ByteTotals.empty()
        self.sheet.add(entries)
        self.totals.add(entries, self._setup_phases)
        self.best = None
        for line in self.lines:
            if better(line, self.best, self.run_config.selection):
                self.best = line


@dataclass(frozen=True)
class _PositionRecord(Record):
    step: int
    phase: int
    round: int
    attempt: int


def _unscored(score: str, part: str, consequence: str) -> str:
    return (
        f"{score} is not defined on the {part} nodes, {consequence}: {part} needs labelled nodes, for most scores of "
        "two classes; split=stratified:40/20/40 puts some of every class into every part"
    )
