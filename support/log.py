"""A run's log.jsonl."""

import json
from pathlib import Path
from typing import Any


class Log:
    """log.jsonl, one JSON object a line, written by rank 0; TensorBoard too, if asked for."""

    def __init__(self, folder: Path, active: bool, tensorboard: bool, size: int | None = None):
        """Append to the log; with `size`, cut it to that many bytes first.

        What a killed run wrote after its last checkpoint is computed and written again.
        """
        self.file, self.board = None, None
        if active:
            self.file = open(folder / "log.jsonl", "ab")  # noqa: SIM115, open as long as the run
            if size is not None:
                self.file.truncate(min(size, self.file.tell()))
        if active and tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError(
                    "--tensorboard needs its package: pip install -e '.[tensorboard]'"
                ) from error
            self.board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, event: str, **values: Any) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps({"event": event, **values}).encode() + b"\n")
        self.file.flush()
        if self.board is not None and "consumed_tokens" in values:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self.board.add_scalar(f"{event}/{name}", value, values["consumed_tokens"])

    def close(self) -> None:
        for part in (self.file, self.board):
            if part is not None:
                part.close()

    def size(self) -> int:
        return 0 if self.file is None else self.file.tell()
