"""How good a model is, measured through the engine that serves it. Beside `bench`, which measures how fast."""
