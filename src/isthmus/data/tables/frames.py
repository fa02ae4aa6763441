"""The one place that imports polars and pyarrow, which come with the extra ``tables``."""

from isthmus.errors import ConfigError

try:
    import polars as pl
    import pyarrow
    from pyarrow import csv as arrow_csv
except ImportError:
    raise ConfigError("reading tables needs polars and pyarrow: pip install 'isthmus[tables]'") from None

__all__ = ["arrow_csv", "pl", "pyarrow"]
