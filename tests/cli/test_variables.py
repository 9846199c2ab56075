"""Variables of the environment that look like ours: known, refused, or set by a cluster."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.options import EngineArgs, ServerArgs


@pytest.mark.parametrize("record", [EngineArgs, ServerArgs])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("OCTAVO_HOTS", "did you mean OCTAVO_HOST?"),
        ("OCTAVO_API_KEYS", "did you mean OCTAVO_API_KEY"),
        ("OCTAVO_DEVICES", "did you mean OCTAVO_DEVICE?"),
        ("OCTAVO_QQQQQQQQ", "--help"),
    ],
)
def test_a_name_that_nothing_reads_is_refused(
    record: type, name: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError) as refused:
        record()
    assert name in refused.value.message
    assert hint in refused.value.message


def test_what_a_cluster_sets_for_a_service_of_our_name_is_no_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "OCTAVO_PORT": "tcp://10.0.0.1:8000",
        "OCTAVO_SERVICE_HOST": "10.0.0.1",
        "OCTAVO_SERVICE_PORT": "8000",
        "OCTAVO_SERVICE_PORT_HTTP": "8000",
        "OCTAVO_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "OCTAVO_PORT_8000_TCP_ADDR": "10.0.0.1",
        "OCTAVO_LLM_PORT": "tcp://10.0.0.2:80",
        "OCTAVO_LLM_SERVICE_HOST": "10.0.0.2",
    }.items():
        monkeypatch.setenv(name, value)
    server = ServerArgs()
    assert server.port == 8000
    assert "port" not in server.sources
    EngineArgs()


def test_names_that_are_read_still_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "9123")
    monkeypatch.setenv("OCTAVO_API_KEYS_FILE", "keys.toml")
    server = ServerArgs()
    assert (server.port, server.api_keys_file) == (9123, "keys.toml")
    assert server.sources["port"] == "environment OCTAVO_PORT"
