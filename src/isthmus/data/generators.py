"""Generated data sets. A name carries its parameters: ``csbm:nodes=600,classes=4,homophily=0.8``; what is left out has
a default.

csbm        contextual block model; heterophilic for small homophily
powerlaw    the same with heavy-tailed degrees, up to millions of edges
banks       payments between accounts of several banks with laundering schemes across them; natural partition ``owner``
motifs      many small graphs with planted motifs (graph task)
"""

from __future__ import annotations

from typing import Protocol

from isthmus.data.banks import Banks
from isthmus.data.blockmodel import ContextualBlockModel, PowerLaw
from isthmus.data.graph_set import GraphSetData
from isthmus.data.motifs import Motifs
from isthmus.data.parameters import describe_object, parse_object
from isthmus.data.whole_graph import Loaded
from isthmus.seeds import Stream


class Generator(Protocol):
    """Parameters of a generated graph."""

    def draw(self, stream: Stream) -> Loaded:
        """The data of these parameters and this stream."""
        ...


class GraphGenerator(Protocol):
    """Parameters of a generated set of graphs."""

    def draw(self, stream: Stream) -> GraphSetData:
        """The data of these parameters and this stream."""
        ...


GENERATORS: dict[str, type[Generator]] = {"csbm": ContextualBlockModel, "powerlaw": PowerLaw, "banks": Banks}
GRAPH_GENERATORS: dict[str, type[GraphGenerator]] = {"motifs": Motifs}


def generate(name: str, stream: Stream) -> Loaded:
    """The graph of a name such as ``csbm:nodes=600,homophily=0.2``."""
    return parse_object("generator", name, GENERATORS).draw(stream)


def generate_graphs(name: str, stream: Stream) -> GraphSetData:
    """The set of graphs of a name such as ``motifs:graphs=100``."""
    return parse_object("generator", name, GRAPH_GENERATORS).draw(stream)


def canonical(name: str) -> str:
    """A generator's name with only the parameters that differ from their defaults, in their order."""
    known: dict[str, type[object]] = {**GENERATORS, **GRAPH_GENERATORS}
    return describe_object(name.partition(":")[0].lower(), parse_object("generator", name, known))
