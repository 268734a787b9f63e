"""Images in shards of TFRecords."""

from __future__ import annotations

import numpy as np

from lightning_ipu.data.tf_example import only_bytes, parse_example
from lightning_ipu.data.tfrecord import TFRecords
from lightning_ipu.errors import UserError


class ShardImages:
    """Images in TFRecords with the features `image/encoded` and `image/class/label`, which counts from 1.

    Args:
        records: the records of all shards of a split.
        num_classes: labels are checked against it.
    """

    def __init__(self, records: TFRecords, *, num_classes: int) -> None:
        self.records, self.num_classes = records, num_classes

    def __len__(self) -> int:
        return len(self.records)

    def fingerprint(self) -> str:
        """Fingerprint of the shards' names and the positions of their records; moving them all does not change it."""
        return self.records.fingerprint()

    def name(self, number: int) -> str:
        """File, record and byte."""
        path, record, at = self.records.where(number)
        return f"{path}: record {record} at byte {at}"

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Bytes (uint8) and label of an image; raises TFRecordError."""
        record = self.records[number]
        try:
            features = parse_example(record)
            data = np.frombuffer(only_bytes(features, "image/encoded"), dtype=np.uint8)
            label = features.get("image/class/label")
            if not isinstance(label, np.ndarray) or label.dtype != np.int64 or len(label) != 1:
                raise UserError("feature 'image/class/label' must be one whole number")
            if not 1 <= label[0] <= self.num_classes:
                raise UserError(f"label {label[0]} must lie between 1 and {self.num_classes}, the number of classes")
        except ValueError as error:
            raise self.records.error(number, str(error)) from None
        return data, int(label[0]) - 1
