"""What all tests share: options, skips with their reasons, and an environment free of the user's settings."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

for name in [name for name in os.environ if name.startswith("LEAFSUM_")]:
    del os.environ[name]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: its children would ignore Ctrl-C too
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["OMP_NUM_THREADS"] = "1"  # of torch and numpy, which have little to do here: more threads would mostly spin
os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub or transformers is first imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full, which take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # longest first: what is left at the end goes to and fro between test processes, and takes its fixtures along
    items.sort(key=lambda item: "system" not in item.path.parts)
    if not config.getoption("--full"):
        skip_marked(items, "full", "takes minutes: run with --full")
    if any(item.get_closest_marker("gpu") for item in items) and not has_gpu():
        skip_marked(items, "gpu", "needs a CUDA GPU: torch.cuda.is_available() is False")


def skip_marked(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):  # keywords would also hold the ids of parameters
            item.add_marker(pytest.mark.skip(reason=reason))


def has_gpu() -> bool:
    import torch  # only when a test asks for it: the import takes seconds

    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder for the run: the demonstration model is made once in it, the user's own cache stays as it is."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
