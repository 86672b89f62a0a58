"""The address at which a browser opens an object, for each kind of store."""

import pytest

from nightbridge.models import StoreSettings
from nightbridge.store.factory import open_store

KEY = "runs/llama/n1/llama-n1-0123456789/a1/logs/log a.out"
AS_PATH = "runs/llama/n1/llama-n1-0123456789/a1/logs/log%20a.out"


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        (StoreSettings(url="file:///shared/store"), f"file:///shared/store/{AS_PATH}"),
        (
            StoreSettings(url="s3://results/nightly", endpoint_url="https://s3.example.org:8443/"),
            f"https://s3.example.org:8443/results/nightly/{AS_PATH}",
        ),
        (
            StoreSettings(url="s3://results", endpoint_url="https://s3.example.org", path_style=False),
            f"https://results.s3.example.org/{AS_PATH}",
        ),
        (
            StoreSettings(url="s3://results/", region="eu-west-1"),
            f"https://results.s3.eu-west-1.amazonaws.com/{AS_PATH}",
        ),
        (StoreSettings(url="s3://results/nightly"), ""),
    ],
)
def test_an_object_has_the_address_at_which_its_store_serves_it(settings: StoreSettings, address: str) -> None:
    assert open_store(settings).link_of(KEY) == address
