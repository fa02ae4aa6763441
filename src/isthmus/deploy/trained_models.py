"""Models an organisation kept of earlier runs."""

from __future__ import annotations

from isthmus.deploy.job_template import check_run_name
from isthmus.deploy.site_settings import SiteSettings
from isthmus.errors import ConfigError
from isthmus.experiments.model_package import MODELS, ModelPackage, read_package


def trained_package(site: SiteSettings, run: str, client: str) -> ModelPackage:
    """The model package this organisation kept of an earlier run."""
    path = site.state / check_run_name(run) / MODELS / client
    if not path.is_dir():
        raise ConfigError(
            f"{client} holds no model of run {run}: only who took part in its training can predict with it"
        )
    return read_package(path)
