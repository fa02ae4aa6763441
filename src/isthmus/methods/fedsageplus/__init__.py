"""FedSage+: GraphSAGE with FedAvg on graphs that a generator of missing neighbours has mended; see `algorithm`."""

from isthmus.methods.fedsageplus.algorithm import METHOD

__all__ = ["METHOD"]
