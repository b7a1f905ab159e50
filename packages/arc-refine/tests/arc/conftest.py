import pytest

from .small import write_tasks


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("arc") / "tasks")
