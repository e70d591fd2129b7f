"""The pool of ranks that every test shares; `pool` sets the threads and devices before torch is imported."""
import pool as pool_module
import pytest


@pytest.fixture(scope="session")
def pool():
    shared = pool_module.Pool()
    yield shared
    shared.close()
    shared.folder.cleanup()
