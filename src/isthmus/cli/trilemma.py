"""``isthmus trilemma``: accuracy, bytes and what the audited attacks recover, of all methods on one scenario."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.api.several import SPREAD
from isthmus.cli.batch import interruptible
from isthmus.cli.console import print_table, stdout
from isthmus.cli.options import BatchOptions, takes

if TYPE_CHECKING:
    from isthmus.api.compare import Comparison
    from isthmus.api.table import Cell as TableCell
    from isthmus.api.table import Table
    from isthmus.cli.recovered_share import Audited
    from isthmus.experiments.config import Settings
    from isthmus.report.tradeoff import Point

NAME = "trilemma"
MEANING = (
    "Recovered: the largest share, beyond chance, that an attack of this adversary read from the messages of the first "
    "rounds ({rounds}), or for the holder of a model from its losses on training and test records. Not tried: "
    "the messages allow the attack, and no program here measures it on them. Sent in the clear: what needs no attack; "
    "scores sent for evaluation are left out. Parties follow the protocol and look at all they get."
)


@takes(BatchOptions, without=("profile", "engine"), preset="own")
def command(
    methods: Annotated[
        list[str] | None,
        typer.Argument(help="Methods, also as fedavg:secure_sum=true; default: all that take the data."),
    ] = None,
    *,
    options: BatchOptions,
    audit_rounds: Annotated[int, typer.Option(help="Rounds whose messages are attacked.", min=1)] = 2,
) -> None:
    """Run methods with their own settings, attack what they send, and set score, bytes and what came out side by
    side; as a table and a page with a picture.
    """
    options.check(methods or ())
    from isthmus.api.batch import raise_failure
    from isthmus.api.compare import compare_outcomes
    from isthmus.api.table import check_table_file, write_table

    check_table_file(options.table)
    flags, overrides, config = options.flags, options.overrides, options.config
    chosen, refused = (list(methods), {}) if methods else taking(flags, overrides, config)
    run = interruptible(options.jobs, silent=True)
    found, outcomes = compare_outcomes(chosen, flags, overrides, config, runs=options.runs, out=options.out, run=run)
    document = {**found, "refused": refused, "audit_rounds": audit_rounds}
    audited = audit_all(found, flags, overrides, config, audit_rounds)
    for row in document["methods"]:
        row["audit"] = audited[row["method"]].to_json()
    target = Path(found["out"])
    shown = tradeoff_table(document, audited)
    if "report" in found:
        (target / "trilemma.json").write_text(json.dumps(document, indent=1) + "\n")
        document["page"] = str(_write_page(document, audited, shown, target / "trilemma.html"))
    if options.json_:
        print(json.dumps(document))
    else:
        print_table(shown.headings, shown.texts, shown.title)
        stdout().print("\n".join(shown.notes))
        if "page" in document:
            stdout().print(f"picture: {document['page']}")
    if options.table is not None:
        write_table([shown], options.table)
    raise_failure(outcomes)


def taking(
    flags: Mapping[str, Any], overrides: Mapping[str, Any], config: Path | None
) -> tuple[list[str], dict[str, str]]:
    """All methods that take the data, and why the others do not."""
    from isthmus.api.compare import compared_settings
    from isthmus.errors import ConfigError
    from isthmus.methods.registry import METHODS

    chosen, refused = list[str](), dict[str, str]()
    for name in ("fedavg", *(name for name in sorted(METHODS) if name != "fedavg")):
        try:
            compared_settings([name], flags, overrides, config, 1)
            chosen.append(name)
        except ConfigError as error:
            refused[name] = str(error)
    if not chosen:
        raise ConfigError(next(iter(refused.values())))
    return chosen, refused


def audit_all(
    found: Comparison, flags: Mapping[str, Any], overrides: Mapping[str, Any], config: Path | None, rounds: int
) -> dict[str, Audited]:
    """The attacks on every method, seed 0."""
    from isthmus.api.compare import compared_settings
    from isthmus.api.progress import say
    from isthmus.cli.recovered_share import Audited, audit_method
    from isthmus.papers import folder_of

    names = [row["method"] for row in found["methods"]]
    settings: dict[str, list[Settings]] = compared_settings(names, flags, overrides, config, 1)
    audited: dict[str, Audited] = {}
    for row in found["methods"]:
        (first,) = settings[row["method"]]
        if not row["folders"] or 0 not in row["seeds"]:
            audited[row["method"]] = Audited((), failed="no finished run")
            continue
        if first.method.pooled:
            audited[row["method"]] = Audited((), failed="all data in one place")
            continue
        trained = Path(row["folders"][row["seeds"].index(0)])
        variant = json.loads((trained / "result.json").read_text()).get("variant")
        folder = folder_of(first, Path(found["out"]) / "audit")
        audited[row["method"]] = audit_method(first, variant, trained, folder, rounds)
        say(f"attacked {row['method']}: {audited[row['method']].failed or 'done'}")
    return audited


def bytes_of(row: Mapping[str, Any]) -> int:
    """Everything that left a party in one run, setup included, evaluation not."""
    sent = row["bytes"] or {}
    return sum(int(sent.get(key, 0)) for key in ("setup_up", "setup_down", "up", "down", "peer", "device"))


def undominated(rows: Sequence[Mapping[str, Any]], audited: Mapping[str, Audited]) -> set[str]:
    """Methods that no other one beats in score, bytes and largest recovered share at once. Those that were not attacked
    are left out, and beat nobody."""
    points: dict[str, tuple[float, float, float]] = {}
    for row in rows:
        judged = audited[row["method"]]
        if row["score"] is not None and not judged.failed:
            worst = judged.worst()
            points[row["method"]] = (
                -row["score"]["mean"],
                float(bytes_of(row)),
                0.0 if worst is None or worst.share is None else worst.share,
            )
    return {
        name
        for name, mine in points.items()
        if not any(other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in points.values())
    }


def tradeoff_table(document: Mapping[str, Any], audited: Mapping[str, Audited]) -> Table:
    """Score, bytes and what each adversary recovered."""
    from isthmus.api.compare import equal_rows
    from isthmus.api.progress import size
    from isthmus.api.table import Cell, Table, counted, scored
    from isthmus.cli.recovered_share import ADVERSARIES

    best = undominated(document["methods"], audited)
    lines = []
    for row in document["methods"]:
        judged = audited[row["method"]]
        leaks = [_leak_cell(judged, adversary) for adversary in ADVERSARIES]
        told = "; ".join(f"{adversary}: {', '.join(kinds)}" for adversary, kinds in judged.clear.items())
        lines.append(
            (
                Cell(row["method"]),
                Cell(row["ran"]),
                scored(row["score"]),
                counted(len(row["seeds"])),
                counted(bytes_of(row), size(bytes_of(row))),
                *leaks,
                Cell(told),
                Cell("yes" if row["method"] in best else ""),
            )
        )
    scenario = document["scenario"]
    title = f"{scenario['dataset']}, {scenario['clients']} clients ({scenario['partition']}), split {scenario['split']}"
    rules = dict.fromkeys(row["score_rule"] for row in document["methods"] if row["score_rule"])
    notes = [
        f"score: {'; '.join(rules)}. {SPREAD}. The same seeds and partitions for all. Bytes of one "
        "whole run, evaluation not counted.",
        MEANING.format(rounds=document["audit_rounds"]),
        "Not dominated: no other method has at least its score with at most its bytes and its largest recovered share. "
        "What was not tried counts as nothing recovered, so a method may be among them for want of an attack.",
    ]
    notes += equal_rows(document["methods"])
    if document["refused"]:
        listed = "; ".join(f"{name} ({why})" for name, why in document["refused"].items())
        notes.append(f"Do not take this scenario: {listed}.")
    headings = (
        *("method", "ran with", "score", "seeds", "bytes"),
        *(f"{adversary} recovers" for adversary in ADVERSARIES),
        "sent in the clear",
        "not dominated",
    )
    return Table(title, headings, tuple(lines), tuple(notes), frozenset({"score"}))


def _leak_cell(judged: Audited, adversary: str) -> TableCell:
    """What an adversary recovered; where it recovered nothing, what was tried, and what nobody tried."""
    from isthmus.api.table import Cell

    if judged.failed:
        return Cell(judged.failed)
    worst = judged.worst(adversary)
    untried = ", ".join(judged.unmeasured.get(adversary, ()))
    also = f"; not tried: {untried}" if untried else ""
    if worst is None:
        return Cell(also.removeprefix("; ") or "nothing to attack")
    return Cell(f"{100 * (worst.share or 0.0):.1f} % ({worst.attack}){also}", worst.share)


def largest(point: Point) -> float | None:
    """The largest share that any adversary recovered; None where attacks apply and none was measured."""
    shares = [share for share, _ in point.recovered.values()]
    if not shares and (point.failed or point.untried):
        return None
    return max(shares, default=0.0)


def _write_page(document: Mapping[str, Any], audited: Mapping[str, Audited], shown: Table, out: Path) -> Path:
    from isthmus.cli.recovered_share import ADVERSARIES
    from isthmus.papers.svg import Mark, scatter
    from isthmus.report import words
    from isthmus.report.tradeoff import Point, write_tradeoff

    points = [
        Point(
            row["method"],
            row["ran"],
            row["score"]["mean"],
            row["score"]["std"],
            bytes_of(row),
            {
                adversary: (worst.share or 0.0, f"{worst.attack}: {worst.outcome}")
                for adversary in ADVERSARIES
                if (worst := audited[row["method"]].worst(adversary)) is not None
            },
            audited[row["method"]].failed,
            {who: ", ".join(attacks) for who, attacks in audited[row["method"]].unmeasured.items()},
        )
        for row in document["methods"]
        if row["score"] is not None
    ]
    marks = [Mark(point.method, max(1.0, point.sent / 1e6), 100 * point.score, largest(point)) for point in points]
    shade = "the largest share that any adversary recovered; hollow: no attack was measured"
    metric = str(document["scenario"].get("metric") or "accuracy")
    y = f"test {words.metric(metric)}, %"
    picture = scatter(marks, x="MB of a whole run, 1 or less at the left", y=y, shade=shade)
    out.with_suffix(".svg").write_text(picture)
    return write_tradeoff(points, ADVERSARIES, shown.title, shown.headings, shown.texts, shown.notes, out, metric)
