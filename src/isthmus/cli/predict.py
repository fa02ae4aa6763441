"""``isthmus predict``: what trained models say, from their packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from isthmus.errors import no_package

NAME = "predict"


def command(
    package: Annotated[
        Path, typer.Argument(help="A model package, a folder of packages (RUN_DIR/models), or a run folder.")
    ],
    out: Annotated[Path, typer.Option(help="File to write, .csv or .parquet.")],
    client: Annotated[str | None, typer.Option(help="Predictions of this client only.")] = None,
    part: Annotated[str, typer.Option(help="all, train, val or test of the split the data have.")] = "all",
    tables: Annotated[
        Path | None, typer.Option(help="Folder of tables: one owner's, or a folder of such folders.")
    ] = None,
    nodes: Annotated[Path | None, typer.Option(help="Further rows of the owner's table of nodes.")] = None,
    edges: Annotated[Path | None, typer.Option(help="Further rows of the owner's table of edges.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="A saved torch_geometric Data (.pt): one client's, or of all with owner.")
    ] = None,
    id_: Annotated[
        list[str] | None, typer.Option("--id", help="Only this node (or graph); repeat it for several.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Add the features and own neighbours that count most.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="How many features and neighbours --explain names.")] = 5,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Predict with trained models: a row per node (or graph) with its class and the probability of every class.

    Without data options the models predict for the data they were trained on.
    """
    if not package.exists():
        raise no_package(package, ": there is no such folder")
    from isthmus.data.own_graph import read_pt
    from isthmus.experiments.models import check_ending, load_models, pooled_accuracy, write_predictions

    check_ending(out)
    models = load_models(package)
    given = read_pt(data, labelled=False) if data is not None else None
    found = models.predict(
        client,
        part=part,
        data=given,
        tables=tables,
        nodes=nodes,
        edges=edges,
        ids=id_ or None,
        explain=top if explain else 0,
    )
    write_predictions(found, out)
    rows, accuracy = sum(map(len, found.values())), pooled_accuracy(found)
    labelled = sum(one.labelled for one in found.values())
    sent = sum(entry.total for entry in models.entries)
    if json_:
        facts = {"out": str(out), "rows": rows, "labelled": labelled, "accuracy": accuracy, "bytes": sent}
        print(json.dumps(facts | {"clients": sorted(found)}))
        return
    print(f"{rows} predictions of {', '.join(sorted(found))}: {out}")
    if accuracy is not None:
        print(f"accuracy {accuracy:.4f} on the {labelled} that have a label")
    if sent:
        print(f"messages between the parties: {sent} bytes")
