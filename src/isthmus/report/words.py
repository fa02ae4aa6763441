"""Numbers and scenarios in words: the same wording in the terminal and on the page.

Plain text only. Whoever puts it into HTML escapes it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.metrics.gain import Gain

ABSENT = "–"  # noqa: RUF001 (a dash, not a minus)

_DATASETS = {
    "cora": "Cora",
    "citeseer": "CiteSeer",
    "pubmed": "PubMed",
    "chameleon": "Chameleon",
    "amazon-photo": "Amazon Photo",
    "amazon-ratings": "Amazon Ratings",
    "coauthor-cs": "Coauthor CS",
    "coauthor-physics": "Coauthor Physics",
    "mutag": "MUTAG",
}

_METRICS = {"auprc": "AUPRC", "auroc": "AUROC", "macro_f1": "macro F1"}

KINDS = {
    "model": "weights of a model",
    "gradient": "the direction in which a client would change the model",
    "embedding": "vectors computed from a client's nodes",
    "feature": "features of nodes as they are",
    "feature statistic": "sums, extremes and histograms of columns",
    "random start": "first values drawn at random, which tell nothing of the data",
    "structure": "information about who is connected to whom",
    "label statistic": "counts or means formed over labels",
    "count": "how many, for example training nodes",
    "identifier": "names of nodes or parties",
    "share": "a piece of a secret that says nothing on its own",
    "ciphertext": "encrypted content the receiver of the message cannot open alone",
    "metric": "a score or a loss",
    "framing": "headers and lengths that every message needs",
}


def plural(number: int, noun: str) -> str:
    """`1 client`, `3 clients`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listing(names: Sequence[str], limit: int = 8) -> str:
    """`a, b and c`; a long list is cut with how many more."""
    if len(names) > limit + 1:  # "and 1 more" takes as long to read as the name
        return ", ".join(names[:limit]) + f" and {len(names) - limit} more"
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1] if names else ""


def percent(value: float | None) -> str:
    """A score in 0..1 as percent with two decimals, without the sign."""
    return ABSENT if value is None else f"{100 * value:.2f}"


def score(mean: float | None, spread: float | None) -> str:
    """`81.23 ± 0.42`, or `81.23` with one seed, whose spread cannot be known."""
    if mean is None:
        return ABSENT
    return percent(mean) if spread is None else f"{percent(mean)} ± {percent(spread)}"


def count(value: float | None) -> str:
    """A whole number with thousands marked."""
    return ABSENT if value is None else f"{value:,.0f}"


def size(value: float | None) -> str:
    """Bytes in decimal units (1 kB = 1000 B), three significant digits."""
    if value is None:
        return ABSENT
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB" if value < 1000 else f"{value:,.0f} TB"


def seconds(value: float | None) -> str:
    """Seconds, as milliseconds below one."""
    if value is None:
        return ABSENT
    return f"{1000 * value:.3g} ms" if value < 0.9995 else f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def dataset(name: str) -> str:
    """The name people write, parameters in brackets; of a file or folder its own name."""
    if name.startswith((".", "/", "~")):
        return name.rstrip("/").rpartition("/")[2]
    own, _, parameters = name.partition(":")
    own = _DATASETS.get(own.lower(), own)
    return f"{own} ({', '.join(parameters.split(','))})" if parameters else own


def metric(name: str) -> str:
    """A score as it is written in a sentence: `AUPRC`, `macro F1`."""
    return _METRICS.get(name, name.replace("_", " "))


def kind(name: str) -> str:
    """A kind of content as we write it in tables."""
    return name.replace("_", " ")


def split(text: str, things: str = "nodes") -> str:
    """What a split string means, as the end of a sentence."""
    rule, _, parts = text.rpartition(":")
    shares = parts.split("/")
    if len(shares) == 3 and all(share.replace(".", "", 1).isdigit() for share in shares):
        train, val, test = shares
        how = f" ({rule})" if rule else ""
        return f"{train}\u00a0% of the {things} train, {val}\u00a0% validate, {test}\u00a0% test{how}"
    return f"split {text}" if text else "split not recorded"


def partition(name: str, clients: int | None) -> str:
    """How the data came to be split between clients."""
    owners = plural(clients, "client") if clients is not None else "clients"
    how = " at random" if name == "random" else f" by {name}" if name else ""
    return f"split between {owners}{how}"


def gain_rules(gains: Iterable[Gain | None]) -> str:
    """What graph gain counts from and to, as a sentence; empty where there is none."""
    measured: dict[tuple[str, str], bool] = {}
    for gain in gains:
        if gain is not None:
            ends = (gain.zero, gain.one)
            measured[ends] = measured.get(ends, False) or gain.value is not None
    said = [
        f"0 is {zero}, 100 is {one}" if there else f"none, since {one} is not above {zero}"
        for (zero, one), there in measured.items()
    ]
    scale = "test pooled, where " if any(measured.values()) else ""
    return f"Graph gain: {scale}{'; '.join(said)}." if said else ""
