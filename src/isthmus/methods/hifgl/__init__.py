"""HiFGL: devices, silos and a server. Start reading at `algorithm`; `method` puts the parts together."""

from isthmus.methods.hifgl.method import METHOD

__all__ = ["METHOD"]
