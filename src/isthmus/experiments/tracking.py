"""Runs in tracking tools, as callbacks: TensorBoard, MLflow, Weights & Biases.

    isthmus.run("fedavg", dataset="cora", callbacks=[isthmus.MLflow(experiment="cora")])

Scores, losses and bytes of every evaluated round go there under the names of ``metrics.jsonl``, settings as parameters,
the scores of the result at the end. Nothing else leaves: no data, no model, no message. A resumed run continues its
record.
"""

from __future__ import annotations

import importlib
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError
from isthmus.experiments.callbacks import Callback, Progress
from isthmus.experiments.config import Settings
from isthmus.experiments.config_values import plain

FINAL = ("score", "val", "test", "test_last", "test_client_mean", "selected_round", "seconds_per_round", "peak_rss_mb")
"""Numbers of a result that are tracked at its end."""
FOLDER = "tracking"
"""Folder in the run folder for what a tool leaves there."""


def tracked(progress: Progress) -> dict[str, float]:
    """What is tracked of a round, by name."""
    scores = {name: value for name, value in (progress.scores or {}).items() if isinstance(value, float)}
    log = (progress.scores or {}).get("log") or {}
    return {
        **scores,
        **{f"log/{name}": float(value) for name, value in log.items()},
        **{f"bytes/{channel}": float(value) for channel, value in progress.bytes.items()},
    }


def parameters(settings: Settings) -> dict[str, str]:
    """Every setting that is set, as text."""
    groups = {"run": plain(settings.run), "method": plain(settings.method_config)}
    return {f"{group}.{key}": str(value) for group, values in groups.items() for key, value in values.items()}


def final(result: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a result, as far as it has them."""
    return {f"final/{name}": float(result[name]) for name in FINAL if result.get(name) is not None}


def _need(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(f"this callback needs the package {package!r}: pip install 'isthmus[{extra}]'") from None


class TensorBoard(Callback):
    """Scores and bytes as TensorBoard scalars under ``tensorboard/`` of the run folder."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("tensorboard=true needs an extra: pip install 'isthmus[tensorboard]'") from None
        self._factory = SummaryWriter
        self._writer: Any = None
        self._folder: Path | None = None

    def on_start(self, settings: Settings, folder: Path, step: int, steps: int) -> None:
        self._folder = folder / "tensorboard"
        self._open(step)

    def _open(self, step: int) -> None:
        # Points of the rounds after ``step`` are removed: those rounds will be repeated.
        self.close()
        self._writer = self._factory(str(self._folder), purge_step=step + 1 if step else None)

    def on_round(self, progress: Progress) -> None:
        for name, value in tracked(progress).items():
            self._writer.add_scalar(name, value, progress.step)

    def on_recover(self, reason: str, step: int) -> None:
        self._open(step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflow(Callback):
    """A run of an MLflow experiment; settings are its parameters.

    Args:
        experiment: Its name; made where it does not exist.
        tracking_uri: Where MLflow keeps it, a server or a database such as ``sqlite:///mlflow.db``; by default what
            MLflow is set up for (``MLFLOW_TRACKING_URI``).
        tags: Further tags of the run.
    """

    def __init__(
        self, experiment: str = "isthmus", tracking_uri: str | None = None, tags: Mapping[str, str] | None = None
    ) -> None:
        self._mlflow = _need("mlflow", "mlflow")
        self.experiment, self.tracking_uri, self.tags = experiment, tracking_uri, dict(tags or {})
        self._client: Any = None
        self._run = ""

    def on_start(self, settings: Settings, folder: Path, step: int, steps: int) -> None:
        self._client = self._mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        known = folder / FOLDER / "mlflow-run"
        if known.is_file():
            self._run = known.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = self._client.create_experiment(self.experiment) if found is None else found.experiment_id
        tags = {"isthmus.method": settings.run.method, "isthmus.run_dir": str(folder), **self.tags}
        self._run = self._client.create_run(experiment, run_name=folder.name, tags=tags).info.run_id
        params = [self._mlflow.entities.Param(name, value[:500]) for name, value in parameters(settings).items()]
        self._client.log_batch(self._run, params=params)
        known.parent.mkdir(exist_ok=True)
        known.write_text(self._run)

    def on_round(self, progress: Progress) -> None:
        self._log(tracked(progress), progress.step)

    def on_end(self, result: Mapping[str, Any]) -> None:
        self._log(final(result), 0)
        self._client.set_terminated(self._run, "FINISHED")
        self._client = None

    def close(self) -> None:
        if self._client is not None:  # stopped or failed; a resumed run goes on in the same record
            self._client.set_terminated(self._run, "KILLED")
            self._client = None

    def _log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)


class WandB(Callback):
    """A run of a Weights & Biases project, kept in the run folder; ``wandb sync`` sends it.

    Args:
        project: Its name.
        mode: ``offline`` sends nothing; ``online`` needs an account.
        options: Further arguments of ``wandb.init``.
    """

    def __init__(self, project: str = "isthmus", mode: str = "offline", **options: Any) -> None:
        self._wandb = _need("wandb", "wandb")
        self.project, self.mode, self.options = project, mode, options
        self._run: Any = None

    def on_start(self, settings: Settings, folder: Path, step: int, steps: int) -> None:
        place = folder / FOLDER
        place.mkdir(exist_ok=True)
        known = place / "wandb-run"
        number = known.read_text().strip() if known.is_file() else secrets.token_hex(4)
        known.write_text(number)
        self._run = self._wandb.init(
            project=self.project,
            mode=self.mode,
            name=folder.name,
            id=number,
            resume="allow" if self.mode == "online" else None,
            dir=str(place),
            config=parameters(settings),
            reinit="create_new",
            **self.options,
        )

    def on_round(self, progress: Progress) -> None:
        self._run.log(tracked(progress), step=progress.step)

    def on_end(self, result: Mapping[str, Any]) -> None:
        self._run.summary.update(final(result))
        self._run.finish()
        self._run = None

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1)
            self._run = None
