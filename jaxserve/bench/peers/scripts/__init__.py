"""Programs that run other engines, with the interpreter those are installed for. Nothing here imports jaxserve."""
