"""`python -m jaxserve.cli` is `jaxserve`."""

from jaxserve.cli.main import run

if __name__ == "__main__":
    run()
