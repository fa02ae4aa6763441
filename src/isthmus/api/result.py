"""The result of a run as Python sees it: the keys of ``result.json``, and what else its folder holds."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.api.history import History
from isthmus.api.model_words import model_words
from isthmus.errors import ConfigError, DataError, check_run_folder, unknown
from isthmus.experiments.config import Settings, settings_from_toml
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.model_package import MODELS, ModelPackage, read_package, read_packages
from isthmus.experiments.models import Models, Predictions, explained_model
from isthmus.experiments.scenarios import parts_for, scenario_of
from isthmus.methods.explain import Explanation, explain
from isthmus.report import write_report


class Result(dict[str, Any]):
    """A finished run. It is the mapping of ``result.json``; everything else is read from the run folder when it is
    asked for.

    Example:
        >>> import isthmus
        >>> result = isthmus.run("fedavg", dataset="csbm:nodes=60", clients=2, rounds=3, out=getfixture("tmp_path"))
        >>> result["rounds"], result.history["round"]
        (3, [1, 2, 3])
        >>> result.clients
        ('client-0', 'client-1')
    """

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self["run_dir"])

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients whose models the run left."""
        if self["per_client"] is not None:
            return tuple(row["client"] for row in self["per_client"])
        sizes = json.loads((self._open().path / "scenario.json").read_text())["sizes"]  # secure sums hide the rows
        return tuple(sizes)

    @cached_property
    def settings(self) -> Settings:
        """Every setting of the run, resolved."""
        return settings_from_toml(self._open().config)

    @cached_property
    def history(self) -> History:
        """The evaluated rounds, as columns."""
        return History(self._open().metrics())

    def model(self, client: str) -> nn.Module:
        """A client's model as a plain module in evaluation mode: ``forward(x, edge_index)``, of graphs
        ``forward(x, edge_index, batch)``; ``to_onnx(path)`` writes it as ONNX. Features are given as they were for
        training, which scaled them: the module does so too. Edges are given as the model saw them: both ways where the
        run used them so (``undirected``). Refused for methods whose models are more than a graph neural network on the
        client's own graph.
        """
        return self._package(client).model_of_raw()

    def predict(
        self, client: str | None = None, *, part: str | None = None, data: Any = None
    ) -> Predictions | dict[str, Predictions]:
        """What the models say, from the packages in the run folder: of one client, or of all by client.

        Args:
            client: Whose; None for all.
            part: ``train``, ``val`` or ``test`` of the run's split; None for all samples.
            data: Other data than those of the training, see `isthmus.experiments.models.Models.predict`.
        """
        found = Models(read_packages(self._open().path / MODELS)).predict(client, part=part, data=data)
        return found if client is None else found[client]

    def confusion(self, part: str = "test", client: str | None = None) -> Tensor:
        """Samples of each class by the class they were given (C, C): row = true class. Of all clients together, or of
        one.
        """
        packages = read_packages(self._open().path / MODELS)
        found = Models(packages).predict(client, part=part)
        sizes = {one.probability.shape[1] for one in found.values()}
        if len(sizes) > 1:
            raise ConfigError("these clients have different classes: name one client")
        counts = torch.zeros(classes := sizes.pop(), classes, dtype=torch.int64)
        for one in found.values():
            known = one.label >= 0
            pairs = one.label[known] * classes + one.predicted[known]
            counts += torch.bincount(pairs, minlength=classes * classes).view(classes, classes)
        return counts

    def explain(
        self, client: str, nodes: Sequence[int] | None = None, *, top: int = 5, steps: int = 64
    ) -> list[Explanation]:
        """Which features and neighbours count for what a client's model says of its nodes.

        Args:
            nodes: Ids of own nodes of the client; default: its first five test nodes.
            top: How many features and neighbours are named.
            steps: Points of the integral that forms the contributions.
        """
        model = explained_model(self._package(client))
        data = parts_for(self.settings, scenario_of(self.settings))[client]
        chosen = data.node_id[data.test][:5].tolist() if nodes is None else list(nodes)
        return explain(model, data, chosen, top=top, steps=steps)

    def _package(self, client: str) -> ModelPackage:
        if client not in self.clients:
            raise unknown("client", client, self.clients)
        return read_package(self._open().path / MODELS / client.replace("/", "."))

    def report(self, out: str | os.PathLike[str] | None = None) -> Path:
        """Write the report of this run, one HTML page that needs no network; returns its path.

        Args:
            out: Default: ``report.html`` in the run folder.
        """
        return write_report([self._open().path], self.folder / "report.html" if out is None else Path(out))

    def _open(self) -> RunFolder:
        if not (self.folder / "config.toml").is_file():
            raise DataError(f"the run folder {self.folder} is gone; only the keys of the result are left")
        return RunFolder(self.folder)

    # -- shown in a notebook or a console ----------------------------------------------------------

    def __repr__(self) -> str:
        facts = (self["method"], "on", f"{self['dataset']},", f"{self['clients']} clients, seed {self['seed']}:")
        return f"<Result {' '.join(facts)} {_scores(self)}; {self['run_dir']}>"

    def _repr_html_(self) -> str:
        """A small table and the curves, for notebooks."""
        rows = {
            "score": f"{_percent(self['score'])} ({self['score_rule']})",
            "settings": f"preset {self['preset']}, split {self['split']}, selection {self.get('selection', '-')}",
            "model": model_words(self.get("model")),
            f"round {self['rounds']}, the last": f"test, pooled {_percent(self['test_last'])}; mean over clients "
            f"{_percent(self['test_client_mean_last'])}",
            f"round {self['selected_round']}, picked": f"test, pooled {_percent(self['test'])}; mean over "
            f"clients {_percent(self['test_client_mean'])}",
            "folder": self["run_dir"],
        }
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>"
            f"{html.escape(text)}</td></tr>"
            for name, text in rows.items()
        )
        title = f"{self['method']} on {self['dataset']}, {self['clients']} clients, seed {self['seed']}"
        try:
            curve = _curves({name: self.history[name] for name in ("val", "test")})
        except (DataError, KeyError):
            curve = ""
        return f"<div><b>{html.escape(title)}</b><table>{cells}</table>{curve}</div>"


def load(path: str | os.PathLike[str]) -> Result:
    """The result of a finished run, from its folder.

    Args:
        path: The run folder, wherever it lies now.
    """
    folder = RunFolder(Path(path))
    check_run_folder(folder.path)
    found = folder.result()
    if found is None:
        raise DataError(f"{path} holds no finished run: continue it with `isthmus resume {path}`")
    return Result(found, run_dir=str(folder.path))


def _scores(result: Mapping[str, Any]) -> str:
    return f"score {_percent(result['score'])}, test {_percent(result['test'])}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


WIDTH, HEIGHT = 360, 120
COLOURS = {"val": "#888888", "test": "#1f77b4"}


def _curves(columns: Mapping[str, Sequence[float | None]]) -> str:
    """Scores over the evaluated rounds as an SVG picture; empty where there is nothing to draw."""
    known = [value for column in columns.values() for value in column if value is not None]
    count = max((len(column) for column in columns.values()), default=0)
    if count < 2 or not known:
        return ""
    low, high = min(known), max(known)
    span = (high - low) or 1.0
    lines = []
    for name, column in columns.items():
        points = " ".join(
            f"{4 + (WIDTH - 8) * at / (count - 1):.1f},{HEIGHT - 4 - (HEIGHT - 8) * (value - low) / span:.1f}"
            for at, value in enumerate(column)
            if value is not None
        )
        lines.append(f"<polyline fill='none' stroke='{COLOURS[name]}' stroke-width='1.5' points='{points}'/>")
    legend = ", ".join(f"<span style='color:{COLOURS[name]}'>{name}</span>" for name in columns)
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT}' role='img' aria-label='scores by round'>{''.join(lines)}</svg>"
        f"<div>{legend}: {_percent(low)} to {_percent(high)} over {count} evaluated rounds</div>"
    )
