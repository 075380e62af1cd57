"""What a model file can be guilty of. This package sits below jaxserve, so the errors live here."""


class CheckpointError(ValueError):
    """A model file is damaged, truncated, or not what it says it is. The message names the file and the field."""


class UnsupportedCheckpoint(CheckpointError):
    """A sound file that uses something this version cannot compute: an architecture, a tensor type, a tokenizer."""


class DownloadError(Exception):
    """A model could not be fetched, or what was fetched does not have the expected digest."""


class UnknownModel(Exception):
    """The name is neither in the catalog, nor a path that exists, nor a source that can be fetched."""
