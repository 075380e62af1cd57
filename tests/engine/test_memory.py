"""How many pages there are, and the words that say why."""

from types import SimpleNamespace

import pytest

from jaxserve.engine.memory import page_budget, spare_bytes
from jaxserve.errors import ConfigError


def budget(**changes):
    options = {
        "page_bytes": 100,
        "wanted_pages": 50,
        "num_pages": None,
        "memory_bytes": None,
        "free": (3000, "a tenth"),
        "total_bytes": 10**6,
    }
    return page_budget(**(options | changes))


def test_as_many_as_memory_gives():
    found = budget()
    assert (found.num_pages, found.num_bytes, found.reason) == (30, 3000, "as many as fit: a tenth")
    assert budget(free=(3099, "x")).num_pages == 30


def test_never_more_than_could_be_used():
    found = budget(wanted_pages=12)
    assert (found.num_pages, found.num_bytes) == (12, 1200)
    assert found.reason == "enough for every sequence at full length"


def test_a_given_number_of_bytes_goes_before_memory():
    assert budget(memory_bytes=750).num_pages == 7
    assert "--kv-cache-memory-bytes" in budget(memory_bytes=750).reason


def test_a_given_number_of_pages_goes_before_everything():
    found = budget(num_pages=99, memory_bytes=1)
    assert (found.num_pages, found.num_bytes, found.reason) == (99, 9900, "--num-pages")


@pytest.mark.parametrize("changes", [{"free": (99, "a tenth")}, {"free": (-5, "a tenth")}, {"memory_bytes": 99}])
def test_no_page_at_all_is_an_error_that_says_what_to_do(changes):
    with pytest.raises(ConfigError, match=r"one page takes 100 bytes and .* raise --kv-cache-memory-bytes or lower"):
        budget(**changes)


def test_spare_bytes_of_an_accelerator_are_its_limit_less_what_is_in_use():
    stats = {"bytes_limit": 10_000, "bytes_in_use": 2_000}
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    spare, why = spare_bytes(device, 500, 0)
    assert spare == 6_500
    assert why == "90% of 10,000 less 2,000 in use and 500 for the largest step"


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_spare_bytes_where_the_device_does_not_say(platform):
    device = SimpleNamespace(platform=platform, memory_stats=lambda: None)
    assert spare_bytes(device, 0, 8_000) == (1_000, "12.5% of this machine's memory")


@pytest.mark.parametrize("asked", [{"num_pages": 20_000}, {"memory_bytes": 2_000_000}])
def test_more_than_the_device_has_is_refused(asked):
    with pytest.raises(ConfigError, match="asks for 2,000,000 bytes and the device has 1,000,000"):
        budget(**asked)
