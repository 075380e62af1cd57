"""What every test runs under: checked array shapes, the CPU backend, a compilation cache inside the clone."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).parent))  # so that tests import what they share by name
from fixture_files import unpack_all  # noqa: E402

# Before jax is imported, and inherited by the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ["HF_HUB_OFFLINE"] = "1"

# Before the packages are imported: modules loaded earlier would stay unchecked.
install_import_hook(["jaxserve", "pallas_kernels", "sharding", "checkpoints"], "beartype.beartype")

DEVICE_PLATFORMS = {"gpu": ("cuda", "gpu"), "tpu": ("tpu",)}


def pytest_sessionstart() -> None:
    """Fixture weights are packed in the repository."""
    unpack_all()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--network", action="store_true", help="run the tests that reach out of this machine")
    parser.addoption("--kernels", choices=("reference", "xla", "cpu"), help="what tests use that name no kernels")
    parser.addoption("--cpu-level", help="hide from the CPU kernels what lies above this level (avx2, generic)")


@pytest.fixture(scope="session", autouse=True)
def chosen_kernels(pytestconfig: pytest.Config) -> Iterator[None]:
    """--kernels changes what "auto" means, --cpu-level what the host has; in this process, not in its children."""
    kernels, level = pytestconfig.getoption("--kernels"), pytestconfig.getoption("--cpu-level")
    with pytest.MonkeyPatch.context() as patch:
        if kernels is not None:
            patch.setattr("jaxserve.engine.cpu_choice.AUTO_ON_CPU", kernels)
        if level is not None:
            from pallas_kernels.cpu import levels  # here: the import hook must be in place first

            hidden = levels._host_features() & frozenset(levels.known_level(level).features)
            patch.setattr(levels, "_host_features", lambda: hidden)
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips device tests where JAX_PLATFORMS names another device, and network tests without --network."""
    chosen = os.environ["JAX_PLATFORMS"].split(",")[0]
    for item in items:
        for mark, platforms in DEVICE_PLATFORMS.items():
            if item.get_closest_marker(mark) and chosen not in platforms:
                item.add_marker(pytest.mark.skip(reason=f"run with JAX_PLATFORMS={platforms[0]}"))
        if item.get_closest_marker("network") and not config.getoption("--network"):
            item.add_marker(pytest.mark.skip(reason="run with --network"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The small model tests run on, pulled on first use. When it cannot be had, the test errors and says why."""
    from checkpoints.hub import default_cache_dir, pull  # here: the import hook must be in place first

    return pull("smollm2-135m-instruct", cache_dir=default_cache_dir(os.environ), progress=False).path


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The Gemma of the catalog, for slow tests; as above."""
    from checkpoints.hub import default_cache_dir, pull

    return pull("gemma3-270m-q4-k-m", cache_dir=default_cache_dir(os.environ), progress=False).path
