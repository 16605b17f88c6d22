import pytest


@pytest.fixture(scope="package", autouse=True)
def compiled_anew(tmp_path_factory):
    """ptxas is asked about every kernel: what it says of one from Triton's cache is not known any more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
