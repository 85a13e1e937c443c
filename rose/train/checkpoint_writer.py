"""torch's writer of a checkpoint's tensors, which looks whether all ranks wrote into one folder.

torch does not: each rank makes the folder where it is missing, on a disk of its own too, and the first would complete a checkpoint of what it finds.
Importing this takes torch's reader and writer of safetensors files along.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult


class NotShared(OSError):
    """What a rank wrote is not where the first rank looks."""


class OneFolderWriter(HuggingFaceStorageWriter):
    """Each rank its own part, into a folder that all of them share."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, of what all of them wrote.

        Raises:
            NotShared: It is not all here.
        """
        for rank, written in enumerate(results):
            for name in sorted({one.storage_data.relative_path for one in written}):
                if not (self._folder / name).is_file():
                    raise NotShared(f"{self._folder} has no {name}, which rank {rank} wrote there")
        super().finish(metadata, results)
