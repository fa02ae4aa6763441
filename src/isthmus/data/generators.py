"""Generated data sets, each in a file of its own: `blockmodel`, `banks`, `motifs`. A name carries its parameters:
``csbm:nodes=600,classes=4,homophily=0.8``; what is left out has a default.
"""

from __future__ import annotations

from typing import Protocol

from isthmus.data.graph_set import GraphSetData
from isthmus.data.parameters import describe_object, parse_object
from isthmus.data.whole_graph import Loaded
from isthmus.registry import Registry
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


GENERATORS: Registry[type[Generator]] = Registry("generator", "isthmus.data")
GRAPH_GENERATORS: Registry[type[GraphGenerator]] = Registry("generator", "isthmus.data")
"""Generators of one graph and of sets of graphs, by name. To add one, decorate a frozen dataclass whose fields have
defaults.
"""


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
