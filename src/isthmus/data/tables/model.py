"""What a model of tables must take along: what the columns mean, and how owners agreed to scale them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isthmus.data.tables.scaling import Scaling
from isthmus.data.tables.schema import Schema, differences, parse_schema
from isthmus.errors import DataError

KEY = "link_key"


@dataclass(frozen=True)
class TablesModel:
    """Schema and scaling of the tables a model was trained on.

    Args:
        scaling: Agreed numbers by name (`isthmus.data.tables.scaling.Scaling`).
        key: Link key, under which nodes had their ids in training; empty where there was none.
    """

    schema: Schema
    scaling: Mapping[str, Tensor]
    key: bytes = b""

    @classmethod
    def of(cls, schema: bytes, tensors: Mapping[str, Tensor]) -> TablesModel:
        """From the files of a package."""
        key = tensors.get(KEY)
        scaling = {name: tensor for name, tensor in tensors.items() if name != KEY}
        if scaling.keys() != Scaling.__dataclass_fields__.keys():
            raise DataError(
                f"scaling.safetensors holds {', '.join(sorted(scaling)) or 'nothing'}: copy the package again"
            )
        return cls(parse_schema(schema), scaling, b"" if key is None else key.numpy().tobytes())

    def tensors(self) -> dict[str, Tensor]:
        """As they are stored."""
        stored = {name: tensor.contiguous().clone() for name, tensor in self.scaling.items()}
        return stored | ({KEY: torch.from_numpy(np.frombuffer(self.key, dtype=np.uint8).copy())} if self.key else {})

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.schema.labels.classes)

    def check(self, schema: Schema) -> None:
        """Refuse tables of another schema; the error names where they differ."""
        found = [] if schema.hash == self.schema.hash else differences(schema, self.schema)
        if found:
            raise DataError(f"the model was trained with another schema.toml: {'; '.join(found)}")
