"""FedTAD: the method's round in `algorithm`, the server's generator and distillation in `distillation`."""

from isthmus.methods.fedtad.algorithm import METHOD, FedTADClient, FedTADConfig

__all__ = ["METHOD", "FedTADClient", "FedTADConfig"]
