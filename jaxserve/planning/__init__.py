"""What a model would take and give on devices that are not there: the engine's own programs, compiled for them."""
