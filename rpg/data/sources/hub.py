"""Problems of a dataset that the `datasets` library loads."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from rpg.data.columns import TableSource, has_short_floats, rows_of
from rpg.data.problems import SourceProblem
from specs.errors import Issue, SpecError
from specs.machine.foreign.tables import OversizedError, require_parquet
from specs.schema.base import names_path

_BATCH_ROWS = 4096


class HubSource(TableSource):
    """A dataset that the `datasets` library can load: a Hub id or a local directory."""

    path: str = names_path("path or id", min_length=1)
    """Hub id or directory."""
    split: str = "train"
    """Part of the dataset."""
    revision: str = "main"
    """Branch, tag or commit on the Hub."""

    def read(self) -> Iterator[SourceProblem]:
        """See Source."""
        table = self._load()
        name = self.name or self.path.rstrip("/").split("/")[-1]
        columns = self.columns_to_read(table.features.arrow_schema, name)
        chosen = table.select_columns(columns)
        rows: Iterable[dict[str, Any]] = chosen
        if any(map(has_short_floats, chosen.features.arrow_schema)):
            rows = (row for batch in chosen.with_format("arrow").iter(_BATCH_ROWS) for row in rows_of(batch))
        for number, row in enumerate(rows, 1):
            yield self.problem(row, name, f"{name}, row {number}")

    def peek(self, count: int) -> Iterator[SourceProblem]:
        """See Source; returns no problems of a dataset that may need a download."""
        if not os.path.isdir(self.path):
            return
        name = self.name or self.path.rstrip("/").split("/")[-1]
        for number, row in enumerate(islice(self._load(streaming=True), count), 1):
            yield self.problem(row, name, f"{name}, row {number}")

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Returns the first rows. Raises SpecError if they cannot be read."""
        with self._reported():
            return list(islice(self._load(streaming=True), count))

    def splits(self) -> list[str]:
        """Returns the names of the dataset's parts. Raises SpecError if it cannot be read."""
        import datasets

        with self._reported():
            if not _is_saved(self.path):
                return list(map(str, datasets.get_dataset_split_names(self.path, revision=self._revision())))
            saved = datasets.load_from_disk(self.path)
            return list(map(str, saved)) if isinstance(saved, datasets.DatasetDict) else [str(saved.split or "train")]

    def is_here(self) -> bool:
        """See Source; returns true if a directory or an earlier download has the data."""
        if os.path.isdir(self.path):
            return True
        from datasets.load import CachedDatasetModuleFactory

        try:
            CachedDatasetModuleFactory(self.path).get_module()
        except (FileNotFoundError, AssertionError):  # not downloaded, or not an id of the Hub
            return False
        return True

    def _load(self, *, streaming: bool = False) -> Any:
        """Returns the dataset, or its rows as they are read from its files."""
        import datasets

        _check_files(self.path)
        datasets.disable_progress_bars()
        if _is_saved(self.path):
            return self._saved()
        with self._reported():
            return datasets.load_dataset(self.path, split=self.split, streaming=streaming, revision=self._revision())

    def _revision(self) -> str | None:
        """Returns the revision; None for a directory. A directory has no revision, which would only change the cache's
        key."""
        return None if os.path.isdir(self.path) else self.revision

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Raises SpecError in place of the errors of `datasets` within the block."""
        import datasets

        try:
            yield
            return
        except (MemoryError, SpecError):
            raise
        except datasets.exceptions.DatasetNotFoundError as error:
            issue = Issue(
                f"no such dataset: {error}",
                path=("path",),
                given=self.path,
                hint="a directory with data files, or the id of a dataset on the Hub",
            )
        except ConnectionError as error:
            issue = Issue(
                f"the Hub cannot be reached: {error}",
                path=("path",),
                given=self.path,
                hint="download the dataset on a machine with a network, and give its directory",
            )
        except Exception as error:
            # `datasets` wraps its readers' exceptions in its own classes and reports an unknown split as a ValueError.
            split = "split" in str(error)
            issue = Issue(
                f"the dataset cannot be loaded: {str(error).splitlines()[0]}",
                path=("split" if split else "path",),
                given=self.split if split else self.path,
            )
        raise SpecError(issue)

    def _saved(self) -> Any:
        """Returns the dataset of a directory that `save_to_disk` of `datasets` has written.

        Raises:
            SpecError: the dataset lacks the split or cannot be read.
        """
        import datasets

        try:
            saved = datasets.load_from_disk(self.path)
        except MemoryError:
            raise
        except Exception as error:  # three libraries report a damaged file with their own classes
            message = f"the saved dataset cannot be read: {(str(error).splitlines() or [type(error).__name__])[0]}"
            hint = "save it again with save_to_disk, or write it with to_parquet and use `source: parquet`"
            raise SpecError(Issue(message, path=("path",), given=self.path, hint=hint)) from None
        if isinstance(saved, datasets.DatasetDict):
            if self.split in saved:
                return saved[self.split]
            allowed = ", ".join(map(str, saved))
        else:
            own = str(saved.split or "")
            if self.split in ("train", own):
                return saved
            allowed = own or "train, which selects the whole dataset"
        message = "the saved dataset has no such split"
        raise SpecError(Issue(message, path=("split",), given=self.split, allowed=allowed))


def _is_saved(directory: str) -> bool:
    """Returns whether `save_to_disk` of `datasets` has written a directory."""
    path = Path(directory)
    is_one = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    return is_one or (path / "dataset_dict.json").is_file()


def _check_files(directory: str) -> None:
    """Raises SpecError if a Parquet file of a directory unpacks to more than its size allows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in Path(directory).rglob("*.parquet") if os.path.isdir(directory) else ():
        with suppress(pa.ArrowException, OSError), pq.ParquetFile(file) as table:  # `datasets` names the broken ones
            try:
                require_parquet(file.stat().st_size, table.metadata)
            except OversizedError as error:
                message = f"{file.name} decompresses to more than is allowed for its size: {error}"
                raise SpecError(Issue(message, path=("path",), given=str(file))) from None
